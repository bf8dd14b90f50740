"""What a right worker does when an answer is lost or late: it loses nothing, and hides nothing that has begun."""

from __future__ import annotations

import signal

import anyio

from pgworkd.conformance.trial import BEATS_S, LEASE_S, Trial, equal, require


async def misses_no_claim(trial: Trial) -> None:
    """a claim's answer is lost: what it had claimed is given back, as its lists show that it has not got it"""
    await trial.start()
    await anyio.sleep(2)
    trial.network.mode = "halfopen"
    job = await trial.insert("add", {"a": 1, "b": 1})
    await trial.ends(job, "running")
    await anyio.sleep(0.3)
    trial.network.mode = "pass"
    trial.network.cut()
    row = await trial.ends(job, within_s=3 * LEASE_S + BEATS_S)
    equal((row.failures, row.losses), (0, 0), "failures and losses")


async def acknowledges_what_it_has_read(trial: Trial) -> None:
    """a claim's answer comes late, while its beats are answered: it does not say before that it has read it"""
    trial.network.hold_answers(b"POST /v1/claims")
    await trial.start()
    job = await trial.insert("add", {"a": 1, "b": 1}, max_attempts=1)
    await trial.ends(job, "running")
    await anyio.sleep(BEATS_S + 2)
    row = await trial.job(job)
    require((row.status, row.attempts) == ("running", 1), "the gateway took it back: no list had it")
    trial.network.pass_http()
    row = await trial.ends(job, within_s=4 * LEASE_S)  # or it is given back first, if it is too late to begin it
    equal((row.failures, row.losses), (0, 0), "failures and losses")


async def admits_what_it_has_begun(trial: Trial) -> None:
    """beats are cut off, a claim is not: it stops in time, and a job that may run only once is not run again"""
    trial.network.cut_requests(b"POST /v1/workers/")
    await trial.start()
    job = await trial.tick(60, max_attempts=1)
    sql = "UPDATE pgworkd.workers SET lease_until = lease_until + interval '20 s' WHERE id = ANY ($1)"
    await trial.db.fetch(sql, await trial.registered())  # as further claims would, each of which counts as a beat
    await trial.quiet(LEASE_S + 2)
    trial.network.pass_http()
    row = await trial.ends(job, "dead", within_s=60)
    equal(row.attempts, 1, "attempts")
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}), within_s=30)


async def runs_once_at_most(trial: Trial) -> None:
    """the gateway is away for longer than a lease: a job that may run only once is not run again"""
    await trial.start()
    job = await trial.tick(120, max_attempts=1)
    await anyio.sleep(BEATS_S)
    await trial.gateway.kill()
    await trial.quiet(LEASE_S + 2)
    await anyio.sleep(LEASE_S / 2)
    await trial.gateway.start()
    row = await trial.ends(job, "dead", within_s=5 * LEASE_S)
    equal(row.attempts, 1, "attempts")
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}), within_s=30)


async def signs_off_from_a_claim(trial: Trial) -> None:
    """SIGTERM before a claim's answer comes: what that has claimed goes back, though it may run only once"""
    trial.network.hold_answers(b"POST /v1/claims")
    process = await trial.start()
    job = await trial.insert("add", {"a": 1, "b": 1}, max_attempts=1)
    await trial.ends(job, "running")
    process.send_signal(signal.SIGTERM)
    equal(await trial.exits(process, 4 * LEASE_S), 0, "exit code")
    row = await trial.job(job)
    equal((row.status, row.failures), ("pending", 0), "status and failures of a job that has not begun")


async def repeats_a_settle(trial: Trial) -> None:
    """a settle's answer is lost: it sends the same again, and goes on"""
    await trial.start()
    job = await trial.tick(1)
    trial.network.mode = "halfopen"
    await anyio.sleep(2)
    trial.network.mode = "pass"
    trial.network.cut()
    equal((await trial.ends(job)).attempts, 1, "attempts")
    await trial.ends(await trial.insert("add", {"a": 1, "b": 1}), within_s=30)
