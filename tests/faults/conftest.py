"""The fixtures of this folder."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pymysql
import pytest

from tests.fixtures.engines import engine_to, never_cut, watch

__all__ = ["engine_to", "never_cut", "watch"]


@pytest.fixture(scope="package", autouse=True)
def tls(no_tls: None) -> Iterator[None]:
    """Let drivers prefer TLS, as they do by themselves, since that changes what they see of a connection's death.

    PyMySQL would read all certificates at each connection, and verify nothing with them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGSSLMODE", "prefer")
        patch.setattr(pymysql.connections, "SSL_ENABLED", True)
        patch.setattr(ssl.SSLContext, "load_default_certs", lambda self, purpose=None: None)
        yield
