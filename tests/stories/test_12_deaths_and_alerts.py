"""A bad night: 3,000 jobs die of 12 causes while daemons are killed. Each cause is one group, all deaths are told, in
few messages, and in the morning the digest's sums are those of the table."""

from __future__ import annotations

import json
import random
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.alerts.digest import Digest
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life import signals
from tests.kits.daemon import running, until
from tests.kits.dying import CAUSES, LEASE, QUEUES, SENT, app_of, dying_daemon

pytestmark = pytest.mark.slow("3,000 deaths, and daemons killed meanwhile")

JOBS = 3000
KILLS = 3
SERVES = "SELECT EXISTS (SELECT FROM pgworkd.pools p JOIN pgworkd.workers w ON w.id = p.worker_id WHERE w.pid = $1)"
UNTOLD = """SELECT NOT EXISTS (SELECT FROM pgworkd.alerts WHERE due_at IS NOT NULL)
    AND NOT EXISTS (SELECT FROM pgworkd.jobs WHERE kind LIKE '%.alert.%')"""
ALL_DEAD = "SELECT count(*) = $2 FROM pgworkd.jobs WHERE status = 'dead' AND queue = ANY ($1)"


async def test_each_cause_of_death_is_one_group_and_each_death_is_told(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two daemons work; one of them is killed again and again, a third one does the rest."""
    monkeypatch.setattr(signals, "DEATHS_S", 0.2)
    await db.execute(SENT)
    await db.execute("INSERT INTO pgworkd.queues (name, max_losses) SELECT unnest($1::text[]), 100", QUEUES)
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, payload)
           SELECT ($1::text[])[1 + n % 4], jsonb_build_object('n', n, 'cause', ($2::text[])[1 + (n / 4) % 3])
           FROM generate_series(1, $3::int) n""",
        QUEUES,
        list(CAUSES),
        JOBS,
    )
    chance = random.Random(7)  # noqa: S311 - it decides when to kill
    with dying_daemon(dsn):
        for _ in range(KILLS):
            with dying_daemon(dsn) as victim:
                await until(lambda victim=victim: db.fetchval(SERVES, victim.pid))
                await anyio.sleep(chance.uniform(0.0, 0.3))  # then it is killed, at work
                assert await db.fetchval(ALL_DEAD, QUEUES, JOBS) is False
    sent: list[Digest] = []
    app = app_of(dsn)
    morning = digest_app(sent)
    async with running(app, dsn, **LEASE), Admin(ConnectionOptions(dsn, by="ann@desk")) as ann:
        await until(lambda: db.fetchval(ALL_DEAD, QUEUES, JOBS), 60)
        await until(lambda: db.fetchval("SELECT count(*) = 0 FROM pgworkd.deaths WHERE group_id IS NULL"))
        await until(lambda: db.fetchval(UNTOLD))

        groups = (await ann.dead.find(limit=100)).rows
        assert len(groups) == 12, {group.error for group in groups}
        assert {(group.queue, group.kind) for group in groups} == {(queue, queue) for queue in QUEUES}
        assert sum(group.dead for group in groups) == JOBS
        assert all(group.new for group in groups)

        # Each group was told of as new, in a few messages, whoever was killed when. Each was sent, at least once.
        made = await db.fetch("SELECT result FROM pgworkd.finished_jobs WHERE kind = 'pgworkd.alert.default'")
        results = [json.loads(row["result"]) for row in made]
        assert sum(result.get("deaths", 0) for result in results) == JOBS, "each once"
        told = {row[0] for row in await db.fetch("SELECT DISTINCT job_group FROM sent WHERE reason = 'new'")}
        assert told == {group.group for group in groups}

        # The first cause is known, and being worked on: quiet.
        assert await ann.dead.mute(groups[0].group or 0, for_s=7200)

    async with running(morning, dsn):
        await db.execute("SELECT pgworkd.run_schedule('pgworkd.digest')")
        await until(lambda: sent)
    (digest,) = sent
    assert (digest.dead.groups, digest.dead.dead) == (12, JOBS)
    in_table = dict(await db.fetch("SELECT queue::text, count(*) FROM pgworkd.jobs WHERE status = 'dead' GROUP BY 1"))
    assert {queue: sum(r.dead for r in digest.dead.rows if r.queue == queue) for queue in QUEUES} == in_table
    assert sum(row.muted for row in digest.dead.rows) == 1
    assert f"{JOBS:,} dead jobs in 12 groups of errors" in digest.text()


def digest_app(sent: list[Digest]) -> App:
    """An app that only sends the digest."""
    app = App()

    async def to(digest: Digest) -> None:
        sent.append(digest)

    app.digest(every="0 8 1 1 *", to=to)
    return app
