"""Commands print rows as plain text: no value can control the terminal or add a line (CWE-117, CWE-150)."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.admin.queries import JobDetails
from pgworkd.cli import output
from pgworkd.cli.jobs import _print_job
from tests.kits.cli import Shell, clean, invoke, shell
from tests.kits.models import examples

__all__ = ["clean", "shell"]  # fixtures

NASTY = "a\x1b[2J\x1b]0;title\x07b\nforged  row\r\x7f\x85\u009bc\u202etfel\u2066\u2028d"
FORBIDDEN = set(map(chr, (*range(10), *range(11, 32), *range(127, 160)))) | set("\u202e\u2066\u2028\u2029\u200f")
LOOKS = [["jobs"], ["queues"], ["workers"], ["schedules"], ["audit"], ["batches"], ["doctor"], ["stats"]]


def fill(shell: Shell) -> tuple[str, str]:
    """Rows with hostile text in every text column; the ids of a job and a batch."""
    name = NASTY[:100]
    error = json.dumps(
        [{"type": name, "message": name, "traceback": name, "worker": name, "at": name, "attempt": name}]
    )
    job = shell.sql(
        "INSERT INTO pgworkd.jobs (queue, kind, payload, dedupe_key, serialize_key, limit_key, meta) "
        "VALUES (%s, %s, jsonb_build_object(%s::text, %s::text), %s, %s, %s, jsonb_build_object('m', %s::text)) "
        "RETURNING id",
        *([name] * 8),
    )
    shell.sql(
        "UPDATE pgworkd.jobs SET status = 'dead', failures = 3, failed_at = now(), error = %s, errors = %s "
        "WHERE id = %s",
        name,
        error,
        job,
    )
    shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES (%s)", name)
    shell.sql(
        "INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until) VALUES (%s, 1, %s, 30, now() + '1 h')",
        name,
        name,
    )
    shell.sql("INSERT INTO pgworkd.queues (name, concurrency) VALUES (%s, 3)", name)
    shell.sql("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES (%s, %s, 60)", name, name)
    batch = shell.sql("SELECT id FROM pgworkd.create_batch(%s, %s)", name, name)
    shell.sql("SELECT pgworkd.create_batch(%s, %s, p_parent => %s)", name, name, batch)
    return str(job), str(batch)


def test_rows_are_printed_as_plain_text(shell: Shell) -> None:
    job, batch = fill(shell)
    for command in [*LOOKS, ["job", job], ["batches", "show", batch], ["queues", "show", NASTY[:100]]]:
        for flags in ([], ["--json"]):
            result = invoke([*command, *flags], env={"PGWORKD_DSN": shell.dsn})
            assert result.exit_code in (0, 1), result.stderr
            said = result.stdout + result.stderr
            assert FORBIDDEN.isdisjoint(said), command
            assert not [line for line in said.splitlines() if line.startswith("forged")], command
            assert said.isascii() or not flags, command
    assert "forged  row" in shell("jobs").stdout
    assert "forged  row" in shell("job", job).stdout


def test_refusals_are_printed_as_plain_text(shell: Shell) -> None:
    for args in (
        ["enqueue", NASTY, "{"],
        ["enqueue", "q", NASTY],
        ["jobs", "--status", NASTY],
        ["edit", NASTY],
        [NASTY],
        ["jobs", f"--{NASTY}"],
        ["queues", "set", NASTY, "--rate", NASTY],
    ):
        result = invoke(args, env={"PGWORKD_DSN": shell.dsn})
        assert result.exit_code in (1, 2), args
        assert FORBIDDEN.isdisjoint(result.stdout + result.stderr), args
        assert result.stderr.count("\n") == 1, args


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a function and returns what it printed."""

    def printed_(function: Any, *args: Any, terminal: bool = False) -> str:
        out = io.StringIO()
        out.isatty = lambda: terminal  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            function(*args)
        return out.getvalue()

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return printed_


@pytest.mark.parametrize("terminal", [False, True])
@examples(50)
@given(texts=st.lists(st.text(max_size=30), min_size=2, max_size=2), names=st.lists(st.text(max_size=9), max_size=3))
def test_any_text_in_a_table_is_one_row(printed: Any, terminal: bool, texts: list[str], names: list[str]) -> None:
    said = printed(output.table, ("a", "b", "c"), [(*texts, names)], terminal=terminal)
    assert FORBIDDEN.isdisjoint(said)
    assert said.count("\n") == 2
    said.encode()


@examples(50)
@given(text=st.text())
def test_any_text_in_a_job_stays_in_its_field(printed: Any, text: str) -> None:
    fields = dict.fromkeys(JobDetails._fields, text)
    errors = [{"type": text, "message": text, "traceback": text, "worker": text}]
    said = printed(_print_job, JobDetails(**fields), fields | {"errors": errors})
    assert FORBIDDEN.isdisjoint(said)
    said.encode()
    assert json.loads(printed(output.as_json, fields)) == fields
    assert FORBIDDEN.isdisjoint(printed(output.as_json, fields))


@pytest.mark.parametrize(
    ("kind", "message", "line"),
    [
        ("lost", "lost: worker w (id 1, pid 1) has ended", "  lost: worker w (id 1, pid 1) has ended"),
        ("ValueError", "no card", "  ValueError: no card"),
    ],
)
def test_a_job_shows_each_error_once_with_its_type(shell: Shell, kind: str, message: str, line: str) -> None:
    entry = json.dumps([{"attempt": 1, "type": kind, "message": message}])
    job = shell.die("q", errors=entry)
    assert line in shell("job", job).stdout.splitlines()
