"""The fixtures of this folder."""

from tests.fixtures.engines import engine_to, never_cut, watch

__all__ = ["engine_to", "never_cut", "watch"]
