"""The server's clock, read fresh: one element, compiled per engine. No other clock decides anything here.

``now()`` and its like are the transaction's or the statement's start, which a wait has made old.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import DateTime
from sqlalchemy.sql.functions import FunctionElement


class Now(FunctionElement[datetime]):
    """This instant, in UTC, by the server."""

    type = DateTime()
    inherit_cache = True
