"""Jobs that an operation refuses are reported with the reason: singly by id, in groups by filter."""

from __future__ import annotations

import json
import uuid
from typing import Any

import anyio
import pytest

from pgworkd.admin import Admin
from pgworkd.admin.refusals import grouped
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import UsageError
from tests.kits.cli import NOBODY, Shell, clean, enqueue, run, shell

__all__ = ["clean", "shell"]  # fixtures

BATCH = "INSERT INTO pgworkd.batches (name, queue) VALUES ('b', 'q') RETURNING id"


def every_state(shell: Shell) -> dict[str, str]:
    """A job in each status, by status."""
    jobs = {status: enqueue(shell) for status in ("pending", "failed", "running", "blocked", "cancelled")}
    shell.sql("UPDATE pgworkd.jobs SET status = 'failed' WHERE id = %s", jobs["failed"])
    shell.sql("UPDATE pgworkd.jobs SET status = 'blocked', waiting_on = 1 WHERE id = %s", jobs["blocked"])
    run(shell, jobs["running"])
    shell("cancel", jobs["cancelled"])
    jobs["dead"], jobs["discarded"] = shell.die(), shell.die()
    shell("discard", jobs["discarded"])
    return jobs | {"unknown": NOBODY}


DOES = {
    "cancel": {"pending", "failed", "blocked", "running"},
    "retry": {"dead", "failed"},
    "discard": {"dead"},
}


@pytest.mark.slow("each status with each command")
@pytest.mark.parametrize("act", list(DOES))
def test_each_refused_status_is_reported_with_its_reason(shell: Shell, act: str) -> None:
    jobs = every_state(shell)
    result = shell(act, *jobs.values(), code=1)
    lines = [line.removeprefix("pgworkd: ") for line in result.stderr.splitlines()]
    refused = {status: job_id for status, job_id in jobs.items() if status not in DOES[act]}
    assert len(lines) == len(refused)
    for status, job_id in refused.items():
        (line,) = [line for line in lines if line.startswith(f"{job_id} is {status}: ")]
        assert len(line) > len(f"{job_id} is {status}: "), "with a reason"
    answer = json.loads(shell(act, *refused.values(), "--json", code=1).stdout)
    told = answer["left"] if act == "discard" else answer
    assert all(one["reason"] for one in told)


def test_cancelling_a_dead_job_is_refused_with_both_alternatives(shell: Shell) -> None:
    dead = shell.die()
    said = shell("cancel", dead, code=1).stderr
    assert f"{dead} is dead: a dead job cannot be cancelled" in said
    assert "pgworkd discard" in said
    assert "pgworkd retry" in said
    assert shell.status(dead) == "dead"
    assert shell.sql("SELECT count(*) FROM pgworkd.audit") == 0


def test_bulk_refusals_are_counted_by_reason(shell: Shell) -> None:
    batch = shell.sql(BATCH)
    for key in ("a", "b"):
        shell.die(dedupe_key=key), enqueue(shell, "q", "--dedupe-key", key)
    for _ in range(3):
        shell.die(batch_id=batch)
    shell.die()
    shell.sql("UPDATE pgworkd.batches SET cancelled_at = now(), sealed_at = now(), finished_at = now()")
    told = json.loads(shell("retry", "--queue", "q", "--json", code=1).stdout)
    assert (told["matched"], told["retried"]) == (6, 1)
    groups = [(one["jobs"], one["status"]) for one in told["refused"]]
    assert groups == [(3, "dead"), (2, "dead")]
    assert "its batch was cancelled" in told["refused"][0]["reason"]
    assert "a live job has its dedupe key" in told["refused"][1]["reason"]
    said = shell("retry", "--queue", "q", code=1).stderr.splitlines()
    assert [line.split(":")[1].strip() for line in said] == ["3 jobs left dead", "2 jobs left dead"]


def test_the_reasons_are_available_in_python(shell: Shell) -> None:
    dead, live = shell.die(dedupe_key="k"), enqueue(shell, "q", "--dedupe-key", "k")

    async def question() -> Any:
        async with Admin(ConnectionOptions(shell.dsn)) as admin:
            with pytest.raises(UsageError, match="give cancel, retry or discard"):
                await admin.jobs.refusals("edit", [])
            return await admin.jobs.refusals("retry", [uuid.UUID(dead), uuid.UUID(live), uuid.UUID(NOBODY)])

    found = anyio.run(question)
    assert found[uuid.UUID(dead)].holder == uuid.UUID(live)
    assert {one.status for one in found.values()} == {"dead", "pending", "unknown"}
    assert sorted(count for count, _, _ in grouped(found.values())) == [1, 1, 1]


CALLED = "SELECT count(*) FROM pgworkd.jobs WHERE queue = 'after'"


@pytest.mark.parametrize("by", ["id", "filter"])
def test_retry_with_call_back_repeats_the_callback_of_a_finished_tree(shell: Shell, by: str) -> None:
    batch = shell.sql("SELECT c.id FROM pgworkd.create_batch('b', 'q', p_on_complete => '{\"queue\": \"after\"}') AS c")
    job = shell.sql("INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('q', %s) RETURNING id", batch)
    shell.sql("SELECT pgworkd.seal_batch(%s)", batch)
    which = [str(job)] if by == "id" else ["--batch", str(batch)]

    def dies() -> None:
        run(shell, str(job))
        shell.sql(
            "SELECT count(*) FROM pgworkd.settle_failed(ARRAY[%s::uuid],"
            " ARRAY(SELECT attempts FROM pgworkd.jobs WHERE id = %s),"
            " '{NULL}', '{true}', '{no}', ARRAY['{\"message\": \"no\"}'])",
            job,
            job,
        )

    dies()
    assert shell.sql(CALLED) == 1
    shell("retry", *which)
    dies()
    assert shell.sql(CALLED) == 1, "not again unless asked"
    shell("retry", "--call-back", *which)
    dies()
    assert shell.sql(CALLED) == 2
