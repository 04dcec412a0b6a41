"""The fixtures of this folder."""

from tests.operation.fixtures import engine_to, never_cut, unhurried, watch

__all__ = ["engine_to", "never_cut", "unhurried", "watch"]
