"""Fixtures: additional sessions for a test, and one that listens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest

from tests.kits.schema import Roles, granted
from tests.kits.sessions import Notices
from tests.kits.verbs import Db, clock

Connect = Callable[[], Awaitable[Db]]


@pytest.fixture
async def connect(dsn: str) -> AsyncIterator[Connect]:
    """Opens further sessions; all are closed at the end of the test."""
    opened: list[Db] = []

    async def open_one() -> Db:
        opened.append(await asyncpg.connect(dsn))
        return opened[-1]

    yield open_one
    for session in opened:
        session.terminate()


@pytest.fixture
async def t0(db: Db) -> None:
    """The first session's clock is set to T0."""
    await clock(0, db)


@pytest.fixture
async def other(connect: Connect) -> Db:
    """A second session, at T0."""
    session = await connect()
    await clock(0, session)
    return session


@pytest.fixture
async def third(connect: Connect) -> Db:
    """A third session, at T0."""
    session = await connect()
    await clock(0, session)
    return session


@pytest.fixture
async def notices(connect: Connect) -> Notices:
    """A session that listens from the start."""
    return await Notices(await connect()).listen()


@pytest.fixture
async def roles(dsn: str, db: Db) -> AsyncIterator[Roles]:
    """The roles of `pgworkd grants` in the test's database."""
    async with granted(dsn, db) as made:
        yield made
