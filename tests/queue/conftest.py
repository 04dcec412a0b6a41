"""The fixtures of this folder."""

from tests.fixtures.queues import engine, engine_to, leveled

__all__ = ["engine", "engine_to", "leveled"]
