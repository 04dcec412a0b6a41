"""The fixtures of this folder."""

from tests.operation.fixtures import engine_to, watch

__all__ = ["engine_to", "watch"]
