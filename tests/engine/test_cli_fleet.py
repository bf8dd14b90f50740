"""Commands on queues and the fleet."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pgworkd.admin.doctor_database import ServerFacts
from pgworkd.admin.examination import _judge_clock, _judge_notifications, _judge_server
from pgworkd.cli.gateway import dashboard_of
from tests.kits.cli import WORKER, Shell, clean, run_bare, shell

__all__ = ["clean", "shell"]  # fixtures


# Queues and the fleet


def test_pause_and_resume(shell: Shell) -> None:
    shell("enqueue", "mail")
    assert "did you mean 'mail'?" in shell.refused("pause", "mial")
    assert shell("pause", "mail").stdout == "queue mail is paused until resumed\n"
    assert json.loads(shell("queues", "--json").stdout)[0]["paused"] is True
    assert shell("resume", "mail").stdout == "queue mail is resumed\n"
    assert shell("resume", "mail").stdout == "queue mail was not paused\n"
    assert shell("pause", "mail", "--for-s", "90").stdout == "queue mail is paused for 90 s\n"
    assert shell.sql("SELECT paused_until BETWEEN now() + '80 s' AND now() + '91 s' FROM pgworkd.queues")
    assert "unknown queue 'nowhere'" in shell.refused("resume", "nowhere")
    assert "give 0 to 31622400 seconds" in shell.refused("pause", "mail", "--for-s", "367d")


def test_a_pause_takes_effect_in_the_queues_workers_at_once(shell: Shell) -> None:
    worker = shell.sql(WORKER, "w", "1 min")
    shell.sql("INSERT INTO pgworkd.pools (worker_id, queue, concurrency) VALUES (%s, 'q', 1)", worker)
    shell.sql("LISTEN pgworkd")
    shell("pause", "q")
    shell("resume", "q")
    heard = [json.loads(notice.payload) for notice in shell.db.notifies(timeout=5, stop_after=2)]
    assert heard == [{"queues": True}] * 2


def test_stats_prints_exactly_one_number_for_an_autoscaler(shell: Shell) -> None:
    for _ in range(3):
        shell("enqueue", "q")
    shell("enqueue", "q", "--delay-s", "60")
    shell("enqueue", "other")
    shell.die()
    shell.sql("UPDATE pgworkd.jobs SET run_at = now() - interval '100 s' WHERE queue = 'other'")

    def number(metric: str, *queue: str) -> float:
        return float(shell("stats", "--metric", metric, *queue).stdout)

    assert shell("stats", "--metric", "depth").stdout == "4\n"
    assert (number("depth", "-q", "q"), number("dead"), number("running")) == (3, 1, 0)
    assert 100 <= number("oldest_due_s") < 130
    assert number("oldest_due_s", "-q", "nowhere") == number("depth", "-q", "nowhere") == 0
    assert json.loads(shell("stats", "-q", "q", "--json").stdout)["scheduled"] == 1
    assert shell("stats").stdout.split()[:2] == ["DEPTH", "SCHEDULED"]


def test_workers_and_schedules(shell: Shell) -> None:
    shell.sql(WORKER, "fresh", "1 min"), shell.sql(WORKER, "gone", "-1 min")
    states = {row["name"]: row["state"] for row in json.loads(shell("workers", "--json").stdout)}
    assert states == {"fresh": "running", "gone": "lost"}
    shell.sql("INSERT INTO pgworkd.schedules (name, queue, cron, error) VALUES ('s', 'q', '0 0 30 2 *', 'never due')")
    shell.sql("INSERT INTO pgworkd.schedules (name, queue, every_s, enabled) VALUES ('t', 'q', 60, false)")
    shell.sql(
        "INSERT INTO pgworkd.jobs (queue, schedule, occurrence, run_at) VALUES ('q', 's', %s, %s)", *["2030-01-01"] * 2
    )
    lines = shell("schedules").stdout.splitlines()
    assert "0 0 30 2 *" in lines[1]
    assert "2030-01-01 00:00:00Z  pending" in lines[1]
    assert lines[1].endswith("never due")
    assert "every 60 s" in lines[2]
    assert "disabled" in lines[2]


def test_config_show_names_origins_and_hides_the_password(shell: Shell) -> None:
    shown = shell("config", "show").stdout
    assert "environment PGWORKD_DSN" in shown
    assert "postgresql://postgres:***@" in shown
    assert run_bare("config", "show").exit_code == 0


# Doctor


def test_doctor_reports_problems_with_remedies(shell: Shell) -> None:
    assert "warn  workers        none is up: start one with pgworkd run" in shell("doctor").stdout
    shell.die()
    shell.sql(WORKER, "gone", "-1 min")
    shell.sql("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('late', now() - interval '2 min')")
    shell.sql("SELECT 1 FROM pgworkd.ensure_partitions(0)")
    tomorrow = shell.sql("SELECT to_char(now() AT TIME ZONE 'UTC' + interval '1 day', 'YYYYMMDD')")
    shell.sql(f"DROP TABLE pgworkd.finished_jobs_{tomorrow}")
    shell.sql("ALTER TABLE pgworkd.jobs SET (autovacuum_enabled = false)")
    findings = {f["subject"]: f for f in json.loads(shell("doctor", "--json", code=1).stdout)}
    levels = {subject: finding["level"] for subject, finding in findings.items()}
    ok = dict.fromkeys(("connection", "server", "clock", "schema", "transactions", "notifications"), "ok")
    ok |= dict.fromkeys(("endpoints", "kinds", "schedules", "dependencies", "effects", "runs"), "ok")
    ok |= dict.fromkeys(("locks", "rows", "sessions"), "ok")
    warn = dict.fromkeys(("workers", "dead jobs", "history"), "warn")
    assert levels == {**ok, **warn, "autovacuum": "bad", "queues": "bad"}
    assert "'late'" in findings["queues"]["finding"]
    assert findings["workers"]["remedy"].startswith("the next one that starts rescues their jobs")  # none is up
    assert all(finding["remedy"] for finding in findings.values() if finding["level"] != "ok")


def test_doctor_reports_a_database_it_cannot_reach(shell: Shell, empty_dsn: str) -> None:
    line = shell("doctor", "--dsn", "postgresql://u:secret@127.0.0.1:1/d", code=1).stdout
    assert line.startswith("bad   connection     no connection to the database")
    assert "secret" not in line
    assert "bad   schema         this database has no pgworkd schema: run pgworkd migrate" in shell(
        "doctor", "--dsn", empty_dsn, code=1
    ).stdout.replace("  \n", "\n")


def test_an_old_transaction_is_reported(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgworkd.admin.examination.TRANSACTION_WARN_S", 0.0)
    with shell.db.transaction():
        shell.sql("SELECT 1")
        assert f"pid {shell.db.info.backend_pid} (" in shell("doctor").stdout


@pytest.mark.parametrize(("skew_s", "level"), [(0, "ok"), (-1.9, "ok"), (3, "warn"), (-3, "warn"), (61, "bad")])
def test_doctor_reports_clock_skew(skew_s: float, level: str) -> None:
    assert _judge_clock(skew_s).level == level


def test_servers_and_notifications_are_checked() -> None:
    assert _judge_server(ServerFacts("13.9", 130009, read_only=False, clock_s=0))[0].level == "bad"
    assert _judge_server(ServerFacts("19.0", 190000, read_only=False, clock_s=0))[0].level == "warn"
    assert _judge_server(ServerFacts("17.0", 170000, read_only=True, clock_s=0))[1].level == "bad"
    assert [_judge_notifications(filled).level for filled in (0.0, 0.2, 0.9)] == ["ok", "warn", "bad"]


# The demo


def test_demo_gets_its_arguments_and_returns_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def main(**arguments: Any) -> int:
        calls.append(arguments)
        return 3

    monkeypatch.setitem(sys.modules, "pgworkd.demo.demo", SimpleNamespace(main=main))
    assert run_bare("demo", "--seconds", "5", "--path", "x").exit_code == 3
    assert run_bare("demo", "--data", "d", "--keep").exit_code == 3
    assert calls == [
        {"seconds": 5.0, "data_dir": None, "path": Path("x"), "keep": False, "dashboard": dashboard_of},
        {"seconds": None, "data_dir": Path("d"), "path": None, "keep": True, "dashboard": dashboard_of},
    ]


@pytest.mark.parametrize("metric", ["depth", "running", "oldest_due_s"])
def test_the_numbers_of_an_unknown_queue_are_0_with_a_warning(shell: Shell, metric: str) -> None:
    shell("enqueue", "mail")
    result = shell("stats", "--metric", metric, "--queue", "mial")
    assert float(result.stdout) == 0, "autoscalers need a number"
    assert result.stderr.startswith("pgworkd: unknown queue 'mial': did you mean 'mail'?: no live job, worker, setting")
    assert result.stderr.count("\n") == 1
    shell("queues", "set", "idle", "--concurrency", "2", "--create")
    for queue in ("mail", "idle"):
        assert not shell("stats", "--metric", metric, "--queue", queue).stderr


def test_a_queue_shows_the_backoff_that_applies_without_a_setting(shell: Shell) -> None:
    shown = shell("queues", "set", "q", "--concurrency", "2", "--create") and shell("queues", "show", "q").stdout
    assert "none (code)" not in shown
    assert re.search(r"backoff_factor +10, unless the handler declares its own backoff \(code\)", shown)
