"""The fixtures of this folder."""

from tests.fixtures.queues import engine, engine_to, leveled
from tests.fixtures.worker_states import direct, lite

__all__ = ["direct", "engine", "engine_to", "leveled", "lite"]
