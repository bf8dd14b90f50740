"""What a right worker does. Each check has a field of its own; its docstring is its title."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tests.conformance.field import BEATS_S, LEASE_S, Field
from tests.conformance.lost_answers import (
    acknowledges_what_it_has_read,
    admits_what_it_has_begun,
    misses_no_claim,
    repeats_a_settle,
    runs_once_at_most,
)

Check: TypeAlias = Callable[[Field], Awaitable[None]]
TEXT = "ü \u2028 \u202e שלום \U0001f600 \"quotes\" back\\slash 'single' <tag> $HOME `id` %s\ttab"
LARGE_CHARS = 900_000


async def registers(field: Field) -> None:
    """registers, with its queue"""
    await field.start()
    assert len(await field.registered()) == 1


async def completes(field: Field) -> None:
    """completes a job, with its result"""
    await field.start()
    row = await field.ends(await field.insert("add", {"a": 2, "b": 40}))
    assert json.loads(row["result"]) == {"sum": 42}, f'a result of {{"sum": 42}} was due, and {row["result"]} came'
    assert (row["attempts"], row["failures"]) == (1, 0)


async def keeps_text(field: Field) -> None:
    """passes text on unchanged: Unicode, quotes, what a shell would read"""
    await field.start()
    row = await field.ends(await field.insert("echo", {"text": TEXT, "empty": "", "none": None, "deep": [[{"a": []}]]}))
    assert json.loads(row["result"]) == {"text": TEXT, "empty": "", "none": None, "deep": [[{"a": []}]]}


async def takes_large_payloads(field: Field) -> None:
    """takes a payload, and returns a result, of nearly 1 MiB"""
    await field.start()
    row = await field.ends(await field.insert("echo", {"text": "x" * LARGE_CHARS}), within_s=30)
    assert len(json.loads(row["result"])["text"]) == LARGE_CHARS


async def wakes_up(field: Field) -> None:
    """begins within three seconds when it was idle"""
    await field.start()
    await asyncio.sleep(4)
    began = time.monotonic()
    await field.ends(await field.insert("add", {"a": 1, "b": 1}), within_s=10)
    assert time.monotonic() - began < 3, f"it took {time.monotonic() - began:.1f} s"


async def does_each_once(field: Field) -> None:
    """does thirty jobs once each"""
    await field.start()
    jobs = [await field.insert("add", {"a": n, "b": 0}) for n in range(30)]
    for n, job in enumerate(jobs):
        row = await field.ends(job, within_s=60)
        assert (row["attempts"], json.loads(row["result"])) == (1, {"sum": n}), f"{dict(row)}"


async def shares_with_others(field: Field) -> None:
    """shares a queue with another of its kind"""
    await field.start()
    await field.start()
    jobs = [await field.insert("tick", {"file": str(field.directory / f"t{n}"), "seconds": 0.3}) for n in range(12)]
    for job in jobs:
        assert (await field.ends(job, within_s=60))["attempts"] == 1
    sql = "SELECT count(DISTINCT worker_id) FROM pgworkd.finished_jobs WHERE queue = $1"
    assert await field.db.fetchval(sql, field.queue) == 2


async def stays_within_its_slots(field: Field) -> None:
    """runs no more jobs at once than it has registered slots for"""
    await field.start()
    for n in range(10):
        await field.insert("tick", {"file": str(field.directory / f"t{n}"), "seconds": 0.5})
    slots = await field.db.fetchval("SELECT sum(concurrency) FROM pgworkd.pools WHERE queue = $1", field.queue)
    left = 1
    while left:
        sql = """SELECT count(*) FILTER (WHERE status = 'running'), count(*) FROM pgworkd.jobs WHERE queue = $1"""
        running, left = await field.db.fetchrow(sql, field.queue)
        assert running <= slots
        await asyncio.sleep(0.05)


async def tells_failures(field: Field) -> None:
    """fails a job with its message; it is retried until it is dead"""
    await field.start()
    job = await field.insert("fail", {"message": f"broken: {TEXT}"}, max_attempts=2)
    await field.ends(job, "failed", 30)
    await field.db.execute("UPDATE pgworkd.jobs SET run_at = pgworkd.clock() WHERE id = $1", job)
    row = await field.ends(job, "dead", 30)
    assert row["attempts"] == 2
    assert "broken: ü" in row["error"]


async def tells_failures_for_good(field: Field) -> None:
    """says that a retry would not help"""
    await field.start()
    row = await field.ends(await field.insert("fail_for_good", {"message": "never"}), "dead")
    assert row["attempts"] == 1
    assert "never" in row["error"]


async def survives_unknown_kinds(field: Field) -> None:
    """fails a job of a kind that it does not know, and goes on"""
    await field.start()
    await field.ends(await field.insert("no such kind", max_attempts=1), "dead")
    await field.ends(await field.insert("add", {"a": 1, "b": 1}))


async def keeps_its_lease(field: Field) -> None:
    """beats while a job takes longer than its lease"""
    await field.start()
    row = await field.ends(await field.tick(1.6 * LEASE_S), within_s=3 * LEASE_S)
    assert (row["attempts"], row["losses"]) == (1, 0)


async def keeps_its_lease_when_idle(field: Field) -> None:
    """beats while it has nothing to do"""
    await field.start()
    (before,) = await field.registered()
    await asyncio.sleep(1.6 * LEASE_S)
    assert await field.registered() == [before]
    sql = "SELECT extract(epoch FROM lease_until - pgworkd.clock()) > 0 FROM pgworkd.workers WHERE id = $1"
    assert await field.db.fetchval(sql, before)


async def survives_a_cut(field: Field) -> None:
    """all connections are cut, again and again, while it works"""
    await field.start()
    jobs = [await field.insert("tick", {"file": str(field.directory / f"t{n}"), "seconds": 0.4}) for n in range(10)]
    for _ in range(8):
        await asyncio.sleep(0.5)
        field.proxy.cut()
    for job in jobs:
        row = await field.ends(job, within_s=60)
        assert (row["failures"], row["losses"]) == (0, 0)


async def survives_a_gateway(field: Field) -> None:
    """the gateway is killed while a job runs, and started again: the job is done once"""
    await field.start()
    job = await field.tick(4)
    field.gateway.kill()
    await asyncio.sleep(1)
    field.gateway.start()
    row = await field.ends(job, within_s=30)
    assert (row["attempts"], row["failures"]) == (1, 0)
    await field.ends(await field.insert("add", {"a": 1, "b": 1}), within_s=30)


async def stops_behind_a_frozen_network(field: Field) -> None:
    """the network freezes: it stops its own work before its lease ends, and comes back"""
    await field.start()
    job = await field.tick(120)
    field.proxy.mode = "blackhole"
    assert await field.quiet(LEASE_S) < LEASE_S
    await asyncio.sleep(LEASE_S / 2)
    field.proxy.mode = "pass"
    field.proxy.cut()
    await field.db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job)
    await field.ends(await field.insert("add", {"a": 1, "b": 1}), within_s=4 * LEASE_S)


async def registers_again(field: Field) -> None:
    """it was presumed dead: it stops everything, and registers again"""
    await field.start()
    job = await field.tick(60)
    (before,) = await field.registered()
    await field.db.execute("UPDATE pgworkd.jobs SET priority = -1 WHERE id = $1", job)
    await field.db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ($1, 'infinity')", field.queue)
    await field.db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock() WHERE id = $1", before)
    await field.quiet(BEATS_S)

    async def another() -> bool:
        return bool(set(await field.registered()) - {before})

    await field.until(another, BEATS_S + 5, "it registers again")
    await field.db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job)
    await field.db.execute("DELETE FROM pgworkd.queues WHERE name = $1", field.queue)
    await field.ends(await field.insert("add", {"a": 1, "b": 1}), within_s=30)


async def leaves_what_is_gone(field: Field) -> None:
    """a job is taken from it: it stops that run, and does not settle it"""
    await field.start()
    job = await field.tick(60)
    sql = "SELECT pgworkd.settle_released(ARRAY[$1::uuid], ARRAY[1], ARRAY[3600.0::float8], ARRAY[NULL::text])"
    await field.db.execute(sql, job)
    await field.quiet(BEATS_S)
    row = await field.job(job)
    assert (row["status"], row["attempts"], row["failures"]) == ("pending", 1, 0)
    await field.ends(await field.insert("add", {"a": 1, "b": 1}))


async def cancels(field: Field) -> None:
    """a running job is cancelled: it stops"""
    await field.start()
    job = await field.tick(60)
    await field.db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job)
    await field.quiet(BEATS_S)
    await field.ends(job, "cancelled")
    await field.ends(await field.insert("add", {"a": 1, "b": 1}))


async def is_quiet_when_asked(field: Field) -> None:
    """an operator asks it to be quiet: it claims nothing more, until it is told to go on"""
    await field.start()
    (worker,) = await field.registered()
    await field.db.execute("SELECT pgworkd.ask_worker($1, 'quiet')", worker)
    await asyncio.sleep(BEATS_S + 3)
    job = await field.insert("add", {"a": 1, "b": 1})
    await asyncio.sleep(3)
    assert (await field.job(job))["status"] == "pending"
    await field.db.execute("SELECT pgworkd.ask_worker($1, NULL)", worker)
    await field.ends(job, within_s=BEATS_S + 5)


async def stops_when_asked(field: Field) -> None:
    """an operator asks it to stop: it signs off, and exits with 0"""
    process = await field.start()
    (worker,) = await field.registered()
    await field.db.execute("SELECT pgworkd.ask_worker($1, 'stop')", worker)
    assert await field.exits(process, 3 * BEATS_S) == 0
    assert await field.registered() == []


async def ends_gracefully(field: Field) -> None:
    """SIGTERM: it finishes what runs, signs off, and exits with 0"""
    process = await field.start()
    job = await field.tick(3)
    process.send_signal(signal.SIGTERM)
    assert await field.exits(process, 20) == 0
    row = await field.job(job)
    assert (row["status"], row["attempts"]) == ("completed", 1)
    assert await field.registered() == []


async def ends_at_once_when_idle(field: Field) -> None:
    """SIGTERM while it waits: it does not wait on"""
    process = await field.start()
    await asyncio.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert await field.exits(process, 5) == 0
    assert await field.registered() == []


async def starts_without_a_gateway(field: Field) -> None:
    """the gateway is not there when it starts: it waits for it"""
    field.proxy.mode = "refuse"
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(2, setattr, field.proxy, "mode", "pass")
    await field.start()
    assert loop.time() - began > 1


CHECKS: tuple[Check, ...] = (
    registers,
    completes,
    keeps_text,
    takes_large_payloads,
    wakes_up,
    does_each_once,
    shares_with_others,
    stays_within_its_slots,
    tells_failures,
    tells_failures_for_good,
    survives_unknown_kinds,
    keeps_its_lease,
    keeps_its_lease_when_idle,
    misses_no_claim,
    acknowledges_what_it_has_read,
    admits_what_it_has_begun,
    repeats_a_settle,
    survives_a_cut,
    survives_a_gateway,
    runs_once_at_most,
    stops_behind_a_frozen_network,
    registers_again,
    leaves_what_is_gone,
    cancels,
    is_quiet_when_asked,
    stops_when_asked,
    ends_gracefully,
    ends_at_once_when_idle,
    starts_without_a_gateway,
)
