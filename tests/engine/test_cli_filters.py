"""`pgworkd jobs` by worker, schedule, and what is in payloads."""

from __future__ import annotations

import json

import pytest

from pgworkd.admin import listing, queries
from tests.kits.cli import Shell, clean, enqueue, run, shell

__all__ = ["clean", "shell"]  # fixtures


def listed(shell: Shell, *args: str) -> list[str]:
    return [row["id"] for row in json.loads(shell("jobs", "--json", *args).stdout)]


def test_jobs_are_found_by_what_is_in_their_payloads(shell: Shell) -> None:
    seven = enqueue(shell, "q", '{"a": {"b": 7}, "to": "Ann Lee"}')
    enqueue(shell, "q", '{"a": {"b": "7"}}')
    other = enqueue(shell, "r", '{"a": {"b": 7}}')
    shell("cancel", other)
    assert listed(shell, "--payload", "a.b:7") == [other, seven]
    assert listed(shell, "--payload", "a.b:7", "--queue", "q") == [seven]
    assert listed(shell, "--payload", "a.b:7", "--limit", "1") == [other]
    assert listed(shell, "--payload", "a.b:7", "--payload", 'to:"Ann Lee"') == [seven]
    assert listed(shell, "--payload", "a.b:8") == []
    for wrong in ("a.b", "a.b:", "a:" + "x" * 10_000, "a:\x1b[31m x"):
        assert "payload: " in shell.refused("jobs", "--payload", wrong)
        assert "\x1b" not in shell.refused("jobs", "--payload", wrong)


def test_jobs_are_found_by_worker_and_schedule(shell: Shell) -> None:
    job_id = enqueue(shell)
    run(shell, job_id)
    mine = str(shell.sql("INSERT INTO pgworkd.jobs (queue, schedule) VALUES ('q', 's') RETURNING id"))
    worker = str(shell.sql("SELECT worker_id FROM pgworkd.jobs WHERE status = 'running'"))
    assert listed(shell, "--worker", worker) == [job_id]
    assert listed(shell, "--schedule", "s") == [mine]
    assert listed(shell, "--schedule", "s", "--worker", worker) == []


def test_a_search_goes_on_from_page_to_page_and_says_where_it_ends(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "WALK_ALL_ROWS", 3)
    old = enqueue(shell, "q", '{"a": 7}')
    for _ in range(7):
        enqueue(shell)
    for rows_max, found in ((9, [old]), (6, [])):
        monkeypatch.setattr(queries, "HISTORY_ROWS_MAX", rows_max)
        assert listed(shell, "--payload", "a:7") == found
    assert "only the newest 6 finished jobs were searched" in shell("jobs", "--payload", "a:7").stderr
