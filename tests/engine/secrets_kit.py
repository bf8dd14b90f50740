"""A password that must turn up nowhere: how to plant it, and how to see it whatever form it has taken."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import pytest

MARKS = ("c4n4ry", "t41l")
"""No writing changes them; the second shows where only the first part of the password was taken for it."""
PASSWORDS = {"encoded": quote("c4n4ry@:/?#%t41l", safe=""), "raw": "c4n4ry:%t41l"}
"""As they stand in an address."""


def leaks(*texts: object) -> list[str]:
    """What of these shows (a part of) the password."""
    return [str(text) for text in texts if any(mark in str(text) for mark in MARKS)]


def with_login(dsn: str, user: str, password: str) -> str:
    """The address of the same database for another user; `password` as it is to stand there."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.netloc.rpartition('@')[2]}"))


@pytest.fixture(params=PASSWORDS)
async def secret_dsn(request: pytest.FixtureRequest, dsn: str, db: asyncpg.Connection[Any]) -> AsyncIterator[str]:
    """An address of the test's database with a superuser of its own, who has the password."""
    user = f"canary_{uuid.uuid4().hex[:12]}"
    plain = "c4n4ry@:/?#%t41l" if request.param == "encoded" else PASSWORDS["raw"]
    await db.execute(f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD '{plain}'")
    yield with_login(dsn, user, PASSWORDS[request.param])
    await db.execute(f"REASSIGN OWNED BY {user} TO CURRENT_USER; DROP OWNED BY {user}; DROP ROLE {user}")
