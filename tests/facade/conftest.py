"""The fixtures of this folder."""

from tests.operation.fixtures import engine_to, unhurried, watch

__all__ = ["engine_to", "unhurried", "watch"]
