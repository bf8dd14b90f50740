"""Commands on jobs by id, `edit`, and the audit of both."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from pgworkd.cli import common
from pgworkd.client import enqueue as drivers_enqueue
from tests.kits.cli import ME, NOBODY, Shell, clean, enqueue, run, shell

__all__ = ["clean", "shell"]  # fixtures

# By id


def test_retry_by_id_reports_the_outcome_of_each_job(shell: Shell) -> None:
    dead, held = shell.die(), shell.die(dedupe_key="k")
    waiting, running = enqueue(shell, "q", "--dedupe-key", "k"), enqueue(shell)
    run(shell, running)
    result = shell("retry", dead, held, waiting, running, NOBODY, code=1)
    assert result.stdout == f"{dead} will run again\n"
    assert (
        f"{held} is dead: a live job has its dedupe key: wait until that job has finished, or cancel it (job {waiting})"
        in (result.stderr)
    )
    assert f"{waiting} is pending: it is already waiting to run" in result.stderr
    assert f"{running} is running: it is running" in result.stderr
    assert f"{NOBODY} is unknown" in result.stderr
    assert [shell.status(job_id) for job_id in (dead, held, waiting)] == ["pending", "dead", "pending"]
    assert shell("retry", shell.die()).exit_code == 0


def test_cancel_ends_waiting_jobs_and_requests_it_for_running_ones(shell: Shell) -> None:
    waiting, running = enqueue(shell), enqueue(shell)
    run(shell, running)
    told = shell("cancel", waiting, running).stdout
    assert told == f"{waiting} cancelled\n{running} is running: its worker is asked to stop it\n"
    assert shell.status(waiting) == "cancelled"
    assert shell.sql("SELECT cancel_requested_at IS NOT NULL FROM pgworkd.jobs WHERE id = %s", running)
    over = shell("cancel", waiting, NOBODY, code=1).stderr
    assert f"{waiting} is cancelled: it has finished: only waiting and running jobs can be cancelled" in over
    assert f"{NOBODY} is unknown" in over


def test_discard_moves_dead_jobs_to_the_history(shell: Shell) -> None:
    dead, waiting = shell.die(), enqueue(shell)
    result = shell("discard", dead, waiting, dead, code=1)
    assert result.stdout == "1 job discarded\n"
    assert f"{waiting} is pending: only dead jobs can be discarded" in result.stderr
    assert shell.status(dead) == "discarded"
    assert json.loads(shell("job", dead, "--json").stdout)["status"] == "discarded"
    assert shell.sql("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'dead'") == 1


def test_json_output_has_an_entry_for_each_id(shell: Shell) -> None:
    waiting, dead = enqueue(shell), shell.die()
    unknown = "check the id; its history may have been deleted"
    assert json.loads(shell("cancel", waiting, NOBODY, "--json", code=1).stdout) == [
        {"id": waiting, "outcome": "cancelled", "done": True},
        {"id": NOBODY, "outcome": "unknown", "done": False, "reason": unknown},
    ]
    over = "it has finished: only dead and failed jobs can be retried, so enqueue a new one"
    assert json.loads(shell("retry", waiting, dead, "--json", code=1).stdout) == [
        {"id": waiting, "outcome": "cancelled", "done": False, "reason": over},
        {"id": dead, "outcome": "retried", "done": True},
    ]
    told = json.loads(shell("discard", dead, "--json", code=1).stdout)
    waits = "only dead jobs can be discarded: cancel it"
    assert told["left"] == [{"id": dead, "outcome": "pending", "done": False, "reason": waits}]
    assert (told["operation"], told["discarded"]) == ("discard", 0)


def test_replay_makes_a_job_that_never_expires_unless_its_time_is_kept(shell: Shell) -> None:
    shell.sql(
        "INSERT INTO pgworkd.jobs (queue, payload, expires_at, dedupe_key) VALUES ('q', '{\"n\": 1.50}', now(), 'k')"
    )
    first = shell.sql("SELECT id::text FROM pgworkd.jobs")
    assert "is pending: it has not ended" in shell.refused("replay", first)
    assert shell.sql("SELECT pgworkd.expire()") == 1
    plain, kept = (shell("replay", first, *flag).stdout.strip() for flag in ((), ("--keep-expires-at",)))
    assert shell.sql("SELECT pgworkd.expire()") == 1
    assert [shell.status(each) for each in (first, plain, kept)] == ["expired", "pending", "expired"]
    assert shell.sql("SELECT payload->>'n' FROM pgworkd.jobs WHERE dedupe_key IS NULL") == "1.50"
    assert "no job has the id" in shell.refused("replay", NOBODY, code=1)


# Edit


def test_edit_changes_only_the_given_fields(shell: Shell) -> None:
    job_id = enqueue(shell, "q", '{"a": 1}')
    assert shell("edit", job_id, "--payload", '{"a": 0.12345678901234567890}').stdout == f"{job_id} edited: payload\n"
    assert shell.sql("SELECT payload->>'a' FROM pgworkd.jobs") == "0.12345678901234567890"
    assert shell("edit", job_id, "--payload", "-", stdin=b'{"b": "\xc3\xa4"}').exit_code == 0
    shell("edit", job_id, "--delay-s", "60", "--priority", "-3")
    assert shell.sql("SELECT run_at BETWEEN now() + '50 s' AND now() + '61 s' AND priority = -3 FROM pgworkd.jobs")
    told = shell("edit", job_id, "--run-at", "2030-01-31T07:00:00+01:00", "--priority", "-3", "--json").stdout
    assert json.loads(told) == {"id": job_id, "changed": ["run_at"]}
    assert shell("edit", job_id, "--priority", "-3").stdout == f"{job_id} unchanged\n"


def test_edit_of_a_job_that_is_not_waiting_is_refused_with_a_remedy(shell: Shell) -> None:
    running, over, dead = enqueue(shell), enqueue(shell), shell.die()
    run(shell, running)
    shell("cancel", over)
    for job_id, told in (
        (running, "is running, only a waiting job can be edited. Cancel it"),
        (over, "is cancelled, only a waiting job can be edited. It has ended"),
        (dead, "is dead, only a waiting job can be edited. Pause its queue"),
        (NOBODY, "is unknown, only a waiting job can be edited. Check the id"),
    ):
        assert told in shell.refused("edit", job_id, "--priority", "1", code=1)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "nothing to edit: give a payload, run_at, delay_s or priority"),
        (("--payload", "[1]"), "payload is a JSON array: an object is needed"),
        (("--payload", "-"), "standard input is empty"),
        (("--payload", '{"a": "\\u0000"}'), "payload.a holds a NUL character"),
        (("--payload", '{"a": "' + "x" * 2**20 + '"}'), "takes more than the 1,048,576 bytes"),
        (("--run-at", "2030-01-01T00:00:00"), "has no time zone"),
        (("--run-at", "2200-01-01T00:00Z"), "run_at must be a datetime from 1970 to 2199"),
        (("--delay-s", "-1"), "delay_s is -1.0: give 0 to 31622400 seconds"),
        (("--delay-s", "-1"), "delay_s is -1"),
        (("--delay-s", "1", "--run-at", "2030-01-01T00:00Z"), "both given"),
    ],
)
def test_edit_refuses_values_out_of_bounds(shell: Shell, args: tuple[str, ...], told: str) -> None:
    job_id = enqueue(shell, "q", '{"a": 1}')
    assert told in shell.refused("edit", job_id, *args)
    assert shell.sql("SELECT count(*) FROM pgworkd.audit") == 0


# The audit


def test_the_audit_shows_who_did_what(shell: Shell) -> None:
    first, second = enqueue(shell, "q", '{"a": 1}'), enqueue(shell, "other")
    shell("edit", first, "--priority", "5", "--payload", '{"a": "\x7f"}')
    shell("cancel", first, second)
    enqueue(shell)
    shell("pause", "q")
    rows = json.loads(shell("audit", "--json").stdout)
    assert [(row["what"], row["queue"], row["job_id"]) for row in rows] == [
        ("queue", "q", None),
        ("cancel", "other", second),
        ("cancel", "q", first),
        ("edit", "q", first),
    ]
    assert {row["who"] for row in rows} == {ME}
    assert rows[3]["before"] == {"payload": {"a": 1}, "priority": 0}
    assert rows[3]["after"] == {"payload": {"a": "\x7f"}, "priority": 5}
    assert rows[0]["at"].startswith("20")
    lines = shell("audit", "--job", first).stdout.splitlines()
    assert lines[0].split() == ["AT", "WHO", "WHAT", "QUEUE", "JOB_ID", "CHANGE"]
    assert lines[1].endswith(f"cancel  q      {first}  status: pending -> cancelled")
    assert lines[2].endswith('payload: {"a": 1} -> {"a": "\\u007f"}, priority: 0 -> 5')
    assert len(lines) == 3
    assert len(json.loads(shell("audit", "--queue", "q", "--limit", "2", "--json").stdout)) == 2
    assert json.loads(shell("audit", "--job", NOBODY, "--json").stdout) == []


def test_a_long_change_is_truncated_in_the_list_only(shell: Shell) -> None:
    job_id = enqueue(shell)
    shell("edit", job_id, "--payload", json.dumps({"a": "x" * 3000}))
    assert shell("audit").stdout.splitlines()[1].endswith("xxx\u2026")
    assert json.loads(shell("audit", "--json").stdout)[0]["after"]["payload"] == {"a": "x" * 3000}


@pytest.mark.parametrize("login", ["ann", "\u00e4\udcff\x1b[31m", None])
def test_any_login_name_can_be_audited(shell: Shell, monkeypatch: pytest.MonkeyPatch, login: str | None) -> None:
    def getuser() -> str:
        if login is None:
            raise OSError("no name for this number")
        return login

    monkeypatch.setattr("getpass.getuser", getuser)
    shell("cancel", enqueue(shell))
    who = shell.sql("SELECT who FROM pgworkd.audit")
    assert who == common.operator()
    assert who.isascii()
    assert who.split("@")[0] == (login or "unknown").encode("ascii", "backslashreplace").decode()
    assert "\x1b" not in shell("audit").stdout


# Dependencies


def test_a_job_shows_its_dependencies_and_can_be_unblocked(shell: Shell) -> None:
    first, other = enqueue(shell), enqueue(shell)
    last = str(drivers_enqueue(shell.db, "q", after=[UUID(first)]))
    assert "waits:         waits for 1 job\n" in shell("job", last).stdout
    result = shell("undepend", last, other, NOBODY, code=1)
    assert result.stdout == f"{last} no longer waits for other jobs\n"
    assert f"{other} is pending: it does not wait for other jobs" in result.stderr
    assert f"{NOBODY} is unknown" in result.stderr
    assert shell.status(last) == "pending"
    assert json.loads(shell("audit", "--json").stdout)[0]["what"] == "undepend"


def test_a_job_shows_its_progress(shell: Shell) -> None:
    job_id = enqueue(shell)
    run(shell, job_id)
    shell.sql("SELECT pgworkd.report_progress(ARRAY[%s::uuid], '{1}', '{0.4}', '{page 12}')", job_id)
    shown = shell("job", job_id).stdout
    assert "progress:      0.4\n" in shown
    assert "doing:         page 12\n" in shown
