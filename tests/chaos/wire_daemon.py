"""A whole daemon for the sweep: the same one for all cuts, each of which hits its next message."""

from __future__ import annotations

from typing import ClassVar

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.maintenance import Periods
from tests.chaos.wire_kit import Operation, Told, differs, rows_of
from tests.kits.daemon import Recorder, insert, running, until
from tests.kits.process import TABLES

COMMAND_S = 0.3
"""Orphaned attempts are released after three times this."""
NEVER_S = 3600.0


class OneJob(Operation):
    """A job is inserted beside an idle daemon, and must complete."""

    name = "daemon: a job, from claim to settle"
    cuts_min: ClassVar[tuple[int, int]] = (4, 3)  # which message of a daemon is the next is by chance
    kind: ClassVar[str] = "plain"

    async def prepare(self) -> None:
        if "seen" not in self.scene.memory:
            await self.db.execute(f"{TABLES} CREATE TABLE written (job uuid, attempt int)")
            connection = ConnectionOptions(self.scene.proxy.dsn, connect_timeout_s=2, command_timeout_s=COMMAND_S)
            periods = Periods(NEVER_S, NEVER_S, NEVER_S, orphans_s=0.1)
            daemon = running(
                app_of_three(), self.scene.proxy.dsn, connection=connection, heartbeat_s=1.0, periods=periods
            )
            _, self.scene.memory["seen"] = await self.scene.stack.enter_async_context(daemon)
            self.scene.proxy.on_message = self.scene.cutter
        self.seen: Recorder = self.scene.memory["seen"]
        del self.seen.seen[:]

    async def attempt(self) -> Told:
        self.job = await insert(self.db, self.kind)
        await until(self.done)
        return "done"

    async def done(self) -> bool:
        return [row[0] for row in await rows_of(self.db, self.job)] == ["completed"]

    async def faults(self) -> list[str]:
        (_, attempts, failures), *_ = await rows_of(self.db, self.job)
        given_back = await self.db.fetchval("SELECT count(*) FROM given_back WHERE job = $1", self.job)
        written = [row[0] for row in await self.db.fetch("SELECT attempt FROM written WHERE job = $1", self.job)]
        # Only the handler's own statements may fail, never the engine's.
        return [
            *differs("attempts", attempts, 1 + failures + given_back),
            *differs("attempts that wrote", written, [attempts] if self.kind != "plain" else []),
            *differs("failures", failures <= (self.kind != "plain"), True),
            *differs("events", [name for name in (events.JOB_STALE,) if self.seen.all(name)], []),
        ]


class Transaction(OneJob):
    """The handler's writes commit together with the completion, or not at all."""

    name = "daemon: a job with job.transaction()"
    cuts_min = (7, 8)
    kind = "writes"


class OneTransaction(Transaction):
    """The claim is committed with the writes and the completion, or not at all."""

    name = "daemon: a job with transaction=True"
    cuts_min = (7, 8)
    kind = "owns"

    async def prepare(self) -> None:
        await super().prepare()
        # Else its claims would be committed before it has lived for one lease.
        await self.db.execute("UPDATE pgworkd.workers SET started_at = pgworkd.clock() - interval '1 h'")


def app_of_three() -> App:
    """A handler that does nothing, one that writes, and one that does so in the transaction of its claim."""
    app = App()

    @app.handler("plain", max_attempts=10, backoff=0.01)
    async def plain() -> None:
        return None

    @app.handler("owns", max_attempts=10, backoff=0.01, transaction=True)
    @app.handler("writes", max_attempts=10, backoff=0.01)
    async def writes(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO written VALUES ($1, $2)", job.id, job.attempt)

    return app
