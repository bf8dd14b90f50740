"""What a right worker does when an answer is lost or late: it loses nothing, and hides nothing that has begun."""

from __future__ import annotations

import asyncio

from tests.conformance.field import BEATS_S, LEASE_S, Field


async def misses_no_claim(field: Field) -> None:
    """a claim's answer is lost: what it had claimed is given back, as its lists show that it has not got it"""
    await field.start()
    await asyncio.sleep(2)
    field.proxy.mode = "halfopen"
    job = await field.insert("add", {"a": 1, "b": 1})
    await field.ends(job, "running")
    await asyncio.sleep(0.3)
    field.proxy.mode = "pass"
    field.proxy.cut()
    row = await field.ends(job, within_s=3 * LEASE_S + BEATS_S)
    assert (row["failures"], row["losses"]) == (0, 0)


async def acknowledges_what_it_has_read(field: Field) -> None:
    """a claim's answer comes late, while its beats are answered: it does not say before that it has read it"""
    field.proxy.hold_answers(b"POST /v1/claims")
    await field.start()
    job = await field.insert("add", {"a": 1, "b": 1}, max_attempts=1)
    await field.ends(job, "running")
    await asyncio.sleep(BEATS_S + 2)
    row = await field.job(job)
    assert (row["status"], row["attempts"]) == ("running", 1), "the gateway took it back: no list had it"
    field.proxy.pass_http()
    row = await field.ends(job, within_s=4 * LEASE_S)  # or it is given back first, if it is too late to begin it
    assert (row["failures"], row["losses"]) == (0, 0)


async def admits_what_it_has_begun(field: Field) -> None:
    """its beats are cut off, a claim is not: it stops in time, and a job that may run only once is not run again"""
    field.proxy.cut_requests(b"POST /v1/workers/")
    await field.start()
    job = await field.tick(60, max_attempts=1)
    sql = "UPDATE pgworkd.workers SET lease_until = lease_until + interval '20 s' WHERE id = ANY ($1)"
    await field.db.execute(sql, await field.registered())  # as further claims would, each of which counts as a beat
    await field.quiet(LEASE_S + 2)
    field.proxy.pass_http()
    row = await field.ends(job, "dead", within_s=60)
    assert row["attempts"] == 1
    await field.ends(await field.insert("add", {"a": 1, "b": 1}), within_s=30)


async def runs_once_at_most(field: Field) -> None:
    """the gateway is away for longer than a lease: a job that may run only once is not run again"""
    await field.start()
    job = await field.tick(120, max_attempts=1)
    await asyncio.sleep(BEATS_S)
    field.gateway.kill()
    await field.quiet(LEASE_S + 2)
    await asyncio.sleep(LEASE_S / 2)
    field.gateway.start()
    row = await field.ends(job, "dead", within_s=5 * LEASE_S)
    assert row["attempts"] == 1
    await field.ends(await field.insert("add", {"a": 1, "b": 1}), within_s=30)


async def repeats_a_settle(field: Field) -> None:
    """a settle's answer is lost: it sends the same again, and goes on"""
    await field.start()
    job = await field.tick(1)
    field.proxy.mode = "halfopen"
    await asyncio.sleep(2)
    field.proxy.mode = "pass"
    field.proxy.cut()
    assert (await field.ends(job))["attempts"] == 1
    await field.ends(await field.insert("add", {"a": 1, "b": 1}), within_s=30)
