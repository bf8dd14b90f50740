"""A password that must appear nowhere: how to set it up, and how to find it in any encoding."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import pytest

MARKS = ("c4n4ry", "t41l")
"""No encoding changes them; the second shows where only the first part was recognized as the password."""
PASSWORDS = {"encoded": quote("c4n4ry@:/?#%t41l", safe=""), "raw": "c4n4ry:%t41l"}
"""As they are written in a DSN."""


def leaks(*texts: object) -> list[str]:
    """Those of the texts that show (a part of) the password."""
    return [str(text) for text in texts if any(mark in str(text) for mark in MARKS)]


def with_login(dsn: str, user: str, password: str) -> str:
    """The DSN of the same database for another user; `password` as written there."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.netloc.rpartition('@')[2]}"))


@pytest.fixture(params=PASSWORDS)
async def secret_dsn(request: pytest.FixtureRequest, dsn: str, db: asyncpg.Connection[Any]) -> AsyncIterator[str]:
    """A DSN of the test's database, with a superuser of its own who has the password."""
    user = f"canary_{uuid.uuid4().hex[:12]}"
    plain = "c4n4ry@:/?#%t41l" if request.param == "encoded" else PASSWORDS["raw"]
    await db.execute(f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD '{plain}'")
    yield with_login(dsn, user, PASSWORDS[request.param])
    await db.execute(f"REASSIGN OWNED BY {user} TO CURRENT_USER; DROP OWNED BY {user}; DROP ROLE {user}")
