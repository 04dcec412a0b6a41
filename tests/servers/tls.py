"""The certificate of the servers with TLS: MySQL, PostgreSQL 15, its standby, and servers that are based on it.

Drivers of PostgreSQL and PyMySQL prefer TLS where a server has it. tests/conftest.py turns that off, and tests/faults on
again: there, every cell of PostgreSQL 15 goes through TLS, and none of PostgreSQL 18 and of YugabyteDB's stand-in.
aiomysql and asyncmy use TLS if given `ssl=`. MariaDB has no TLS here.
"""

import datetime
from pathlib import Path

from tests.servers import cache
from tests.servers.process import own


def certificate() -> Path:
    """The folder of `server.crt` and `server.key`, self-signed, in the servers' account and closed to others."""
    return cache.prepared("certificate", _make)


def _make(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=36500))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    own(folder)
    for file, content in (("server.crt", signed.public_bytes(serialization.Encoding.PEM)), ("server.key", private)):
        path = folder / file
        path.touch(mode=0o600)
        path.write_bytes(content)
        own(path)
