"""Settings from the environment."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """See README.md."""

    database_url: str = os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///backup.db")
    slots: int = int(os.environ.get("SLOTS", "2"))
    slot_ttl: float = float(os.environ.get("SLOT_TTL", "30"))
    wait_seconds: float = float(os.environ.get("WAIT_SECONDS", "2"))
    copy_seconds: float = float(os.environ.get("COPY_SECONDS", "0"))
    locks_admin: str = os.environ.get("LOCKS_ADMIN", "")


settings = Settings()
