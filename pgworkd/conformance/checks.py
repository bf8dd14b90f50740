"""What a right worker does. Each check has a trial of its own; its docstring is its title."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import anyio

from pgworkd.conformance.lost_answers import (
    acknowledges_what_it_has_read,
    admits_what_it_has_begun,
    misses_no_claim,
    repeats_a_settle,
    runs_once_at_most,
    signs_off_from_a_claim,
)
from pgworkd.conformance.trial import BEATS_S, LEASE_S, JobFacts, Trial, equal, require

Check: TypeAlias = Callable[[Trial], Awaitable[None]]
TEXT = "ü \u2028 \u202e שלום \U0001f600 \"quotes\" back\\slash 'single' <tag> $HOME `id` %s\ttab"
LARGE_CHARS = 900_000


def result_of(row: JobFacts) -> Any:
    """What the worker has returned; Unmet if it is no JSON object."""
    found = json.loads(row.result or "null")
    require(isinstance(found, dict), f"a JSON object was due as result, and {row.result} came")
    return found


async def registers(trial: Trial) -> None:
    """registers, with its queue"""
    await trial.start()
    equal(len(await trial.registered()), 1, "registered workers")


async def completes(trial: Trial) -> None:
    """completes a job, with its result"""
    await trial.start()
    row = await trial.ends(await trial.insert("add", {"a": 2, "b": 40}))
    equal(result_of(row), {"sum": 42}, "result")
    equal((row.attempts, row.failures), (1, 0), "attempts and failures")


async def keeps_text(trial: Trial) -> None:
    """passes text on unchanged: Unicode, quotes, what a shell would read"""
    await trial.start()
    row = await trial.ends(await trial.insert("echo", {"text": TEXT, "empty": "", "none": None, "deep": [[{"a": []}]]}))
    equal(result_of(row), {"text": TEXT, "empty": "", "none": None, "deep": [[{"a": []}]]}, "result")


async def takes_large_payloads(trial: Trial) -> None:
    """takes a payload, and returns a result, of nearly 1 MiB"""
    await trial.start()
    row = await trial.ends(await trial.insert("echo", {"text": "x" * LARGE_CHARS}), within_s=30)
    equal(len(result_of(row)["text"]), LARGE_CHARS, "characters of the result")


async def wakes_up(trial: Trial) -> None:
    """begins within three seconds when it was idle"""
    await trial.start()
    await anyio.sleep(4)
    began = time.monotonic()
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}), within_s=10)
    require(time.monotonic() - began < 3, f"it took {time.monotonic() - began:.1f} s")


async def does_each_once(trial: Trial) -> None:
    """does thirty jobs once each"""
    await trial.start()
    jobs = [await trial.insert("add", {"a": n, "b": 0}) for n in range(30)]
    for n, job in enumerate(jobs):
        row = await trial.ends(job, within_s=60)
        equal((row.attempts, result_of(row)), (1, {"sum": n}), "attempts and result")


async def shares_with_others(trial: Trial) -> None:
    """shares a queue with another of its kind"""
    await trial.start()
    await trial.start()
    jobs = [await trial.insert("tick", {"file": str(trial.directory / f"t{n}"), "seconds": 0.3}) for n in range(12)]
    for job in jobs:
        equal((await trial.ends(job, within_s=60)).attempts, 1, "attempts")
    sql = "SELECT count(DISTINCT worker_id) FROM pgworkd.finished_jobs WHERE queue = $1"
    equal(await trial.db.value(sql, trial.queue), 2, "workers that have run some")


async def stays_within_its_slots(trial: Trial) -> None:
    """runs no more jobs at once than it has registered slots for"""
    await trial.start()
    for n in range(10):
        await trial.insert("tick", {"file": str(trial.directory / f"t{n}"), "seconds": 0.5})
    slots = await trial.db.value("SELECT sum(concurrency) FROM pgworkd.pools WHERE queue = $1", trial.queue)
    left = 1
    while left:
        sql = """SELECT count(*) FILTER (WHERE status = 'running'), count(*) FROM pgworkd.jobs WHERE queue = $1"""
        ((running, left),) = await trial.db.fetch(sql, trial.queue)
        require(running <= slots, f"more jobs run than it has registered slots: {running}, {slots}")
        await anyio.sleep(0.05)


async def tells_failures(trial: Trial) -> None:
    """fails a job with its message; it is retried until it is dead"""
    await trial.start()
    job = await trial.insert("fail", {"message": f"broken: {TEXT}"}, max_attempts=2)
    await trial.ends(job, "failed", 30)
    await trial.db.fetch("UPDATE pgworkd.jobs SET run_at = pgworkd.clock() WHERE id = $1", job)
    row = await trial.ends(job, "dead", 30)
    equal(row.attempts, 2, "attempts")
    require("broken: ü" in (row.error or ""), f"its message is not in the job's error: {row.error}")


async def tells_failures_for_good(trial: Trial) -> None:
    """says that a retry would not help"""
    await trial.start()
    row = await trial.ends(await trial.insert("fail_for_good", {"message": "never"}), "dead")
    equal(row.attempts, 1, "attempts")
    require("never" in (row.error or ""), f"its message is not in the job's error: {row.error}")


async def survives_unknown_kinds(trial: Trial) -> None:
    """fails a job of a kind that it does not know, and goes on"""
    await trial.start()
    await trial.ends(await trial.insert("no such kind", max_attempts=1), "dead")
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}))


async def keeps_its_lease(trial: Trial) -> None:
    """beats while a job takes longer than its lease"""
    await trial.start()
    row = await trial.ends(await trial.tick(1.6 * LEASE_S), within_s=3 * LEASE_S)
    equal((row.attempts, row.losses), (1, 0), "attempts and losses")


async def keeps_its_lease_when_idle(trial: Trial) -> None:
    """beats while it has nothing to do"""
    await trial.start()
    (before,) = await trial.registered()
    await anyio.sleep(1.6 * LEASE_S)
    equal(await trial.registered(), [before], "registered workers")
    sql = "SELECT lease_until > pgworkd.clock() FROM pgworkd.workers WHERE id = $1"
    require(await trial.db.value(sql, before), "its lease has ended")


async def survives_a_cut(trial: Trial) -> None:
    """all connections are cut, again and again, while it works"""
    await trial.start()
    jobs = [await trial.insert("tick", {"file": str(trial.directory / f"t{n}"), "seconds": 0.4}) for n in range(10)]
    for _ in range(8):
        await anyio.sleep(0.5)
        trial.network.cut()
    for job in jobs:
        row = await trial.ends(job, within_s=60)
        equal((row.failures, row.losses), (0, 0), "failures and losses")


async def survives_a_gateway(trial: Trial) -> None:
    """the gateway is killed while a job runs, and started again: the job is done once"""
    await trial.start()
    job = await trial.tick(4)
    await trial.gateway.kill()
    await anyio.sleep(1)
    await trial.gateway.start()
    row = await trial.ends(job, within_s=30)
    equal((row.attempts, row.failures), (1, 0), "attempts and failures")
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}), within_s=30)


async def stops_behind_a_frozen_network(trial: Trial) -> None:
    """the network freezes: it stops its own work before its lease ends, and comes back"""
    await trial.start()
    job = await trial.tick(120)
    trial.network.mode = "blackhole"
    await trial.quiet(LEASE_S)
    await anyio.sleep(LEASE_S / 2)
    trial.network.mode = "pass"
    trial.network.cut()
    await trial.db.fetch("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job)
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}), within_s=4 * LEASE_S)


async def registers_again(trial: Trial) -> None:
    """presumed dead, it stops everything, and registers again"""
    await trial.start()
    job = await trial.tick(60)
    (before,) = await trial.registered()
    await trial.db.fetch("UPDATE pgworkd.jobs SET priority = -1 WHERE id = $1", job)
    await trial.db.fetch("INSERT INTO pgworkd.queues (name, paused_until) VALUES ($1, 'infinity')", trial.queue)
    await trial.db.fetch("UPDATE pgworkd.workers SET lost_at = pgworkd.clock() WHERE id = $1", before)
    await trial.quiet(BEATS_S)

    async def another() -> bool:
        return bool(set(await trial.registered()) - {before})

    await trial.until(another, BEATS_S + 5, "it registers again")
    await trial.db.fetch("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job)
    await trial.db.fetch("DELETE FROM pgworkd.queues WHERE name = $1", trial.queue)
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}), within_s=30)


async def leaves_what_is_gone(trial: Trial) -> None:
    """a job is taken from it: it stops that run, and does not settle it"""
    await trial.start()
    job = await trial.tick(60)
    sql = "SELECT pgworkd.settle_released(ARRAY[$1::uuid], ARRAY[1], ARRAY[3600.0::float8], ARRAY[NULL::text])"
    await trial.db.fetch(sql, job)
    await trial.quiet(BEATS_S)
    row = await trial.job(job)
    equal((row.status, row.attempts, row.failures), ("pending", 1, 0), "status, attempts and failures")
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}))


async def cancels(trial: Trial) -> None:
    """a running job is cancelled: it stops"""
    await trial.start()
    job = await trial.tick(60)
    await trial.db.fetch("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job)
    await trial.quiet(BEATS_S)
    await trial.ends(job, "cancelled")
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}))


async def is_quiet_when_asked(trial: Trial) -> None:
    """an operator asks it to be quiet: it claims nothing more, until it is told to go on"""
    await trial.start()
    (worker,) = await trial.registered()
    await trial.db.fetch("SELECT pgworkd.ask_worker($1, 'quiet')", worker)
    await anyio.sleep(BEATS_S + 3)
    job = await trial.insert("add", {"a": 1, "b": 1})
    await anyio.sleep(3)
    equal((await trial.job(job)).status, "pending", "status of a job that came later")
    await trial.db.fetch("SELECT pgworkd.ask_worker($1, NULL)", worker)
    await trial.ends(job, within_s=BEATS_S + 5)


async def stops_when_asked(trial: Trial) -> None:
    """an operator asks it to stop: it signs off, and exits with 0"""
    process = await trial.start()
    (worker,) = await trial.registered()
    await trial.db.fetch("SELECT pgworkd.ask_worker($1, 'stop')", worker)
    equal(await trial.exits(process, 3 * BEATS_S), 0, "exit code")
    equal(await trial.registered(), [], "workers that have not signed off")


async def ends_gracefully(trial: Trial) -> None:
    """SIGTERM: it finishes what runs, signs off, and exits with 0"""
    process = await trial.start()
    job = await trial.tick(3)
    process.send_signal(signal.SIGTERM)
    equal(await trial.exits(process, 20), 0, "exit code")
    row = await trial.job(job)
    equal((row.status, row.attempts), ("completed", 1), "status and attempts")
    equal(await trial.registered(), [], "workers that have not signed off")


async def ends_at_once_when_idle(trial: Trial) -> None:
    """SIGTERM while it waits: it does not wait on"""
    process = await trial.start()
    await anyio.sleep(2)
    process.send_signal(signal.SIGTERM)
    equal(await trial.exits(process, 5), 0, "exit code")
    equal(await trial.registered(), [], "workers that have not signed off")


async def starts_without_a_gateway(trial: Trial) -> None:
    """the gateway is not there when it starts: it waits for it"""
    trial.network.mode = "refuse"
    worker = await trial.launch()
    await anyio.sleep(2)
    trial.network.mode = "pass"
    await trial.registers(worker, set())


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
    signs_off_from_a_claim,
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
