"""`pgworkd schedules`: the list, operations on a schedule, their audit, and refusals."""

from __future__ import annotations

import json

import pytest

from tests.kits.cli import ME, UUID_LINE, WORKER, Shell, clean, shell

__all__ = ["clean", "shell"]  # fixtures

AUDIT = "SELECT jsonb_agg(jsonb_build_array(who, what, queue, before, after) ORDER BY id) FROM pgworkd.audit"


def put(shell: Shell, name: str = "nightly", source: str = "sql") -> None:
    shell.sql(
        "INSERT INTO pgworkd.schedules (name, queue, kind, payload, every_s, source)"
        " VALUES (%s, 'reports', 'sum', '{\"n\": 1}', 3600, %s)",
        name,
        source,
    )


def enabled(shell: Shell) -> bool:
    return bool(shell.sql("SELECT enabled FROM pgworkd.schedules"))


def test_the_list_shows_the_rule_and_whether_it_is_disabled(shell: Shell) -> None:
    assert json.loads(shell("schedules", "--json").stdout) == []
    put(shell)
    (row,) = json.loads(shell("schedules", "--json").stdout)
    assert (row["name"], row["queue"], row["kind"], row["every_s"], row["enabled"]) == (
        "nightly",
        "reports",
        "sum",
        3600,
        True,
    )
    assert "every 3600 s" in shell("schedules").stdout
    shell("schedules", "disable", "nightly")
    assert "disabled" in shell("schedules").stdout


def test_disable_and_enable_report_the_change_and_are_audited(shell: Shell) -> None:
    put(shell)
    assert shell("schedules", "disable", "nightly").stdout == "schedule nightly is disabled\n"
    assert not enabled(shell)
    assert shell("schedules", "disable", "nightly").stdout == "schedule nightly was disabled already\n"
    assert shell("schedules", "enable", "nightly").stdout == "schedule nightly is enabled\n"
    assert enabled(shell)
    assert shell("schedules", "enable", "nightly").stdout == "schedule nightly was enabled already\n"
    notes = shell.sql(AUDIT)
    assert [(who, what, queue) for who, what, queue, _, _ in notes] == [(ME, "schedule", "reports")] * 2
    assert [(before["enabled"], after["enabled"]) for *_, before, after in notes] == [(True, False), (False, True)]


def test_remove_deletes_the_schedule_and_keeps_due_jobs(shell: Shell) -> None:
    put(shell)
    due = shell("schedules", "run-now", "nightly").stdout.strip()
    assert shell("schedules", "remove", "nightly").stdout == "schedule nightly is removed\n"
    assert shell.sql("SELECT count(*) FROM pgworkd.schedules") == 0
    assert shell.status(due) == "pending"
    who, what, queue, before, after = shell.sql(AUDIT)[-1]
    assert (who, what, queue) == (ME, "schedule", "reports")
    assert before != after


def test_remove_is_refused_while_a_live_worker_declares_the_schedule(shell: Shell) -> None:
    put(shell, source="code")
    worker = shell.sql(WORKER, "w", "1 min")
    shell.sql("UPDATE pgworkd.workers SET schedules = '{nightly}' WHERE id = %s", worker)
    said = shell.refused("schedules", "remove", "nightly", code=1)
    assert 'schedule "nightly" is declared in the code of worker w' in said
    assert "disable it, or take it out of the code first" in said
    assert shell.sql(AUDIT) is None
    shell.sql("UPDATE pgworkd.workers SET lease_until = now() - interval '1 s'")
    shell("schedules", "remove", "nightly")


def test_run_now_inserts_a_separate_job_even_while_disabled(shell: Shell) -> None:
    put(shell)
    shell("schedules", "disable", "nightly")
    said = shell("schedules", "run-now", "nightly").stdout
    assert UUID_LINE.fullmatch(said)
    job = json.loads(shell("job", said.strip(), "--json").stdout)
    assert (job["queue"], job["kind"], job["payload"], job["schedule"], job["status"]) == (
        "reports",
        "sum",
        {"n": 1},
        None,
        "pending",
    )
    assert json.loads(shell("schedules", "run-now", "nightly", "--json").stdout)["id"] != said.strip()
    rows = json.loads(shell("audit", "--job", said.strip(), "--json").stdout)
    assert [(row["who"], row["what"], row["after"]["schedule"]) for row in rows] == [(ME, "schedule", "nightly")]


@pytest.mark.parametrize("command", ["enable", "disable", "remove", "run-now"])
def test_an_unknown_schedule_is_refused_with_a_hint(shell: Shell, command: str) -> None:
    said = shell.refused("schedules", command, "nigthly", code=1)
    assert 'schedule "nigthly" does not exist' in said
    assert "pgworkd schedules lists them all" in said
    wanted = "give the name of a schedule, or --all" if command in ("enable", "disable") else "Missing argument 'NAME'"
    assert wanted in shell.refused("schedules", command)
    assert "name must be text of 1 to" in shell.refused("schedules", command, "")
    assert "put --json and --dsn after" in shell.refused("schedules", "--json", command, "x")
    assert shell.sql(AUDIT) is None
