"""The fixtures of this folder."""

from tests.fixtures.engines import engine, engine_to, never_cut, watch

__all__ = ["engine", "engine_to", "never_cut", "watch"]
