"""While the database refuses claims, STATUS, /readyz and the log say so; and no longer once one has succeeded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from anyio.to_thread import run_sync

from pgworkd.core.events import Events
from pgworkd.engine.refusals import REFUSED_S, Refusals
from pgworkd.errors import DatabaseUnavailable
from tests.kits.commands import Start, Systemd, events, logged, start, systemd, waits_until
from tests.kits.daemon import insert
from tests.kits.metrics import address_of, fetch
from tests.kits.proxy import Proxy
from tests.kits.watched import APP, LISTEN, ready

pytestmark = pytest.mark.slow("databases that refuse for several seconds")

__all__ = ["start", "systemd"]  # fixtures

ROLE = "refused_role"
OTHERS = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE usename = 'refused_role' AND application_name NOT LIKE '%lease%'"""


class Refused:
    """A database that refuses claims within `refuses`, and the address by which a daemon reaches it."""

    def __init__(self, dsn: str, db: asyncpg.Connection[Any]) -> None:
        self.dsn, self._db = dsn, db

    @contextlib.asynccontextmanager
    async def connections(self) -> AsyncIterator[tuple[str, Any]]:
        """All connections are refused."""
        async with Proxy(self.dsn) as proxy:

            @contextlib.asynccontextmanager
            async def refuses() -> AsyncIterator[None]:
                proxy.mode = "refuse"
                proxy.cut()
                yield
                proxy.mode = "pass"

            yield proxy.dsn, refuses

    @contextlib.asynccontextmanager
    async def logins(self) -> AsyncIterator[tuple[str, Any]]:
        """The password has been changed: the lease is renewed all the while."""
        await self._db.execute(f"CREATE ROLE {ROLE} SUPERUSER LOGIN PASSWORD 'right'")
        at = urlsplit(self.dsn)
        dsn = at._replace(netloc=f"{ROLE}:right@{at.hostname}:{at.port}").geturl()

        @contextlib.asynccontextmanager
        async def refuses() -> AsyncIterator[None]:
            await self._db.execute(f"ALTER ROLE {ROLE} PASSWORD 'other'")
            await self._db.execute(OTHERS)
            yield
            await self._db.execute(f"ALTER ROLE {ROLE} PASSWORD 'right'")

        try:
            yield dsn, refuses
        finally:
            await self._db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", ROLE)
            await self._db.execute(f"DROP ROLE {ROLE}")

    @contextlib.asynccontextmanager
    async def locks(self) -> AsyncIterator[tuple[str, Any]]:
        """A transaction has locked the table of jobs."""

        @contextlib.asynccontextmanager
        async def refuses() -> AsyncIterator[None]:
            async with self._db.transaction():
                await self._db.execute("LOCK TABLE pgworkd.jobs IN ACCESS EXCLUSIVE MODE")
                yield

        yield self.dsn, refuses


@pytest.mark.parametrize(
    ("how", "busy", "failing", "said"),
    [
        ("connections", True, {"database", "claims"}, "no connection to the database"),
        ("connections", False, {"database", "claims"}, "no connection to the database"),
        ("logins", True, {"database", "claims"}, "(28P01)"),
        ("locks", False, {"claims"}, "(57014)"),
    ],
)
async def test_refused_claims_are_told(
    start: Start, systemd: Systemd, dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, how: str,
    failing: set[str], said: str, *, busy: bool,
) -> None:  # fmt: skip
    (tmp_path / "watched.py").write_text(APP)
    limits = {"PGWORKD_COMMAND_TIMEOUT_S": "1", "PGWORKD_CONNECT_TIMEOUT_S": "1", "PGWORKD_LOG_FORMAT": "json"}
    async with getattr(Refused(dsn, db), how)() as (address, refuses):
        flags = ("--app=watched:app", "--poll-s=0.05", *LISTEN)
        run = start("run", *flags, PGWORKD_DSN=address, **limits, **systemd.environ)
        url = await run_sync(address_of, run)
        await run_sync(waits_until, lambda: ready(url))
        if busy:
            await db.execute("SELECT pgworkd.set_queue('mail', '{\"paused_until\": \"infinity\"}')")
            await insert(db, "mail")
            await logged(run, "queue.settings")
        async with refuses():
            if busy:
                await db.execute("SELECT pgworkd.set_queue('mail', '{\"paused_until\": null}')")
            await systemd.receives("STATUS=claims refused for ", after=len(systemd.received))
            page = await run_sync(fetch, url, "/readyz")
            assert page.status == 503
            assert failing <= page.failing.keys() <= failing | {"wake", "lease"}
            assert page.failing["claims"].startswith("claims refused for ")
            assert said in page.failing["claims"]
            (refused,) = await logged(run, "claims.refused")
            assert refused["since_s"] >= REFUSED_S
            assert said in refused["error"]
        await logged(run, "claims.resumed")
        await systemd.receives("STATUS=working", after=len(systemd.received))
        await run_sync(waits_until, lambda: ready(url))
        assert len(events(run, "claims.refused")) == len(events(run, "claims.resumed")) == 1
        run.stop()
        assert await run_sync(run.ends) == 0


class Told:
    """Refusals on a clock that a test sets, and the events that they emit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.seen = 1000.0, list[str]()
        monkeypatch.setattr("pgworkd.engine.refusals.time", SimpleNamespace(monotonic=lambda: self.now))
        emitter = Events()
        emitter.listen(lambda name, _: self.seen.append(name))
        self.refusals = Refusals(emitter)

    def fails(self, part: str, took_s: float) -> None:
        sent_at, self.now = self.now, self.now + took_s
        self.refusals.failed(part, DatabaseUnavailable("away"), sent_at)


def test_what_passes_within_moments_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    for _ in range(3):
        told.fails("a", REFUSED_S - 1)
        assert (told.refusals.text(), told.seen) == ("", [])
        told.refusals.passed("a")  # it counts anew
    told.fails("a", 0.1)
    told.fails("a", REFUSED_S)
    assert told.refusals.text() == "claims refused for 5 s: away"
    assert told.seen == ["claims.refused"]


def test_the_first_of_several_queues_is_told_and_the_last_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    for queue in ("a", "b"):
        told.fails(queue, REFUSED_S)
    assert told.refusals.text() == "claims refused for 10 s (in 2 queues): away"
    told.refusals.passed("a")
    assert told.seen == ["claims.refused"]
    told.refusals.passed("b")
    assert (told.refusals.text(), told.seen) == ("", ["claims.refused", "claims.resumed"])
