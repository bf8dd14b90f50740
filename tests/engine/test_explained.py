"""`pgworkd explain` and GET /v1/jobs/{id}/explain say what explain() says; tests/sql/test_explain.py proves it."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import asyncpg

from tests.kits.cli import Shell, clean, shell
from tests.kits.gateway import also, calling, token

__all__ = ["clean", "shell"]  # fixtures

PAUSED = "INSERT INTO pgworkd.queues (name, paused_until) VALUES ('mail', 'infinity')"
INSERTED = "INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('mail', '2100-01-01 00:00Z') RETURNING id"


def test_each_reason_is_told_with_what_ends_it(shell: Shell) -> None:
    shell.sql(PAUSED)
    job = shell.sql(INSERTED)
    said = shell("explain", str(job)).stdout
    assert said.splitlines() == [
        f"job {job}",
        "  future: it is not due yet",
        "      ends with: its run_at, at 2100-01-01 00:00:00Z",
        "  paused: its queue is paused",
        "      ends with: pgworkd resume mail",
        "  no_worker: no worker serves its queue",
        "      ends with: pgworkd run --queue mail",
    ]
    assert shell("explain", "--queue", "mail").stdout == said
    assert shell("job", str(job)).stdout.endswith("\n\nwhy it waits:" + said.partition(str(job))[2])
    found = json.loads(shell("explain", str(job), "--json").stdout)
    assert json.loads(shell("job", str(job), "--json").stdout)["reasons"] == found["reasons"]
    assert (found["job"], [each["reason"] for each in found["reasons"]]) == (
        str(job),
        ["future", "paused", "no_worker"],
    )


def test_the_first_of_a_queue_is_one_that_is_due(shell: Shell) -> None:
    later = shell.sql("INSERT INTO pgworkd.jobs (queue, priority, run_at) VALUES ('q', 9, '2100-01-01Z') RETURNING id")
    assert str(later) in shell("explain", "--queue", "q").stdout
    due = shell.sql("INSERT INTO pgworkd.jobs (queue, limit_key) VALUES ('q', 'k') RETURNING id")
    assert str(due) in shell("explain", "--queue", "q").stdout


def test_what_cannot_be_explained_is_refused(shell: Shell) -> None:
    unknown = str(UUID(int=7))
    for args, code, text in (
        ([unknown], 1, f"no job has the id {unknown}"),
        (["--queue", "empty"], 1, "no job of queue 'empty' waits"),
        ([], 2, "give the id of a job, or --queue"),
        ([unknown, "--queue", "q"], 2, "give the id of a job, or --queue"),
        (["x"], 2, "must be a UUID"),
    ):
        assert text in shell.refused("explain", *args, code=code)


async def test_over_http_the_same_is_told_to_those_who_may_read_the_queue(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    await db.execute(PAUSED)
    job = await db.fetchval(INSERTED)
    async with calling(dsn) as call:
        found = await call.ok("GET", f"/v1/jobs/{job}/explain")
        assert found["id"] == str(job)
        assert found["reasons"][0] == {
            "reason": "future",
            "says": "it is not due yet",
            "ends": "its run_at",
            "ends_at": "2100-01-01T00:00:00+00:00",
            "jobs": None,
        }
        assert (await call.problem("GET", f"/v1/jobs/{UUID(int=7)}/explain"))[:2] == (404, "not-found")
        other = also(call, await token(dsn, {"read": ["other"]}))
        assert (await other.problem("GET", f"/v1/jobs/{job}/explain"))[:2] == (404, "not-found")
