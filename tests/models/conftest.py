"""The fixtures of this folder."""

from tests.fixtures.engines import engine_to

__all__ = ["engine_to"]
