"""Lists: as wide as needed in a pipe, fitted to a terminal, complete as JSON."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from pgworkd.cli import output
from pgworkd.cli.app import app
from pgworkd.cli.table import terminal_table
from tests.kits.cli import Shell, clean, shell
from tests.kits.models import examples

__all__ = ["clean", "shell"]  # fixtures


def test_a_pipe_gets_full_width_columns_and_truncated_texts(shell: Shell) -> None:
    shell.die("q", error="x" * 3000)
    line = shell("jobs").stdout.splitlines()[1]
    assert line.endswith(" " + "x" * (output.CELL_CHARS_MAX - 1) + "\u2026")
    assert json.loads(shell("jobs", "--json").stdout)[0]["error"] == "x" * 3000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(columns: int, command: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        command()
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()]


def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("[red]a", 3, 0, "x" * 100), ("b", None, None, "short")]

    def shown(columns: int, rows: Any = rows, **how: bool) -> list[str]:
        return on_terminal(columns, lambda: output.table(("id", "count", "none", "error"), rows, **how), monkeypatch)

    line = "[red]a      3     0  "
    assert shown(60) == ["id      count  none  error", line + "x" * 38 + "\u2026", "b           -     -  short"]
    assert shown(60, whole=True)[1:3] == [line + "x" * 39, " " * len(line) + "x" * 39], "all of it, in several lines"
    assert shown(30)[1] == "[red]a      3  " + "x" * 14 + "\u2026", "what says nothing is left out"
    assert not capsys.readouterr().err
    assert shown(20)[1] == "[red]a  " + "x" * 11 + "\u2026"
    assert capsys.readouterr().err == "pgworkd: the terminal is too narrow for count: widen it, or use --json\n"
    assert shown(80, []) == ["no rows"]


@examples(100)
@given(data=st.data(), width=st.integers(30, 200))
def test_any_table_fits_any_terminal(data: st.DataObject, width: int) -> None:
    """One line per row, never wider than the terminal; the first and the last column are always shown."""
    value = st.none() | st.integers(0, 10**6) | st.text("x\u4e00 ", max_size=300) | st.booleans() | st.floats(0, 9)
    columns = data.draw(st.lists(st.sampled_from(["id", "due", "oldest_due_s", "error"]), min_size=2, max_size=14))
    rows = data.draw(st.lists(st.tuples(*(value for _ in columns)), min_size=1, max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        text, left_out = terminal_table(columns, rows, output.cell)
    lines = text.split("\n")
    assert len(lines) == 1 + len(rows)
    assert max(map(cell_len, lines)) <= width
    assert len(left_out) <= len(columns) - 2


@pytest.mark.slow("each list at each width")
@pytest.mark.parametrize("width", [80, 100, 132])
def test_every_list_fits_a_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    shell.die("embedding-of-the-notes", error="x" * 4096)
    shell.sql(
        "INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)"
        " VALUES ('a-host-with-a-long-name-1', 12345, '0.1.0', 30, now() + interval '1 min')"
    )
    shell.sql(
        "INSERT INTO pgworkd.pools (worker_id, queue, concurrency) SELECT id, 'embedding-of-the-notes', 10"
        " FROM pgworkd.workers"
    )
    shell.sql(
        "INSERT INTO pgworkd.schedules (name, queue, cron, error) VALUES ('nightly', 'reports', '* * * * *', %s)",
        "e" * 4096,
    )
    shell("queues", "pause", "embedding-of-the-notes")
    shell("retry", "--queue", "embedding-of-the-notes", "--yes")
    monkeypatch.setenv("PGWORKD_DSN", shell.dsn)
    for words in ("queues", "jobs", "workers", "schedules", "audit", "batches", "keys", "stats"):
        command = typer.main.get_command(app)
        lines = on_terminal(width, lambda: command.main([words], standalone_mode=False), monkeypatch)  # noqa: B023
        assert lines
        assert max(map(len, lines)) <= width, lines
    paused = on_terminal(width, lambda: command.main(["queues"], standalone_mode=False), monkeypatch)
    assert paused[0].split()[1] == "paused"


def test_a_narrow_list_of_batches_has_what_became_of_them(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.sql("SELECT pgworkd.create_batch('payroll-of-november', 'calculate', 'a-queue-with-a-long-name')")
    shell.sql("UPDATE pgworkd.batches SET added = 1000, completed = 300, dead = 7")
    monkeypatch.setenv("PGWORKD_DSN", shell.dsn)
    command = typer.main.get_command(app)
    lines = on_terminal(80, lambda: command.main(["batches"], standalone_mode=False), monkeypatch)
    assert lines[0].split()[:4] == ["id", "state", "name", "done"]
    assert lines[0].split()[-1] == "dead"
    assert lines[1].split()[1] == "running"
    wide = on_terminal(200, lambda: command.main(["batches"], standalone_mode=False), monkeypatch)
    assert {"total", "queue", "created_at"} <= set(wide[0].split())


def test_a_narrow_list_of_dead_jobs_has_their_messages(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        "pgworkd.errors.UsageError": "the queue is closed",
        "shop.payments.cards.CardError": "no such card",
        "ZeroDivisionError": "division by zero",
    }
    for kind, message in errors.items():
        job = shell.die(
            "mail-shots",
            kind="invoice",
            error=f"{kind}: {message}",
            errors=json.dumps([{"type": kind, "message": message}]),
        )
        shell.sql("SELECT pgworkd.note_deaths(ARRAY[%s::uuid])", job)
    shell.sql("SELECT pgworkd.count_deaths(1000)")
    monkeypatch.setenv("PGWORKD_DSN", shell.dsn)
    command = typer.main.get_command(app)
    lines = on_terminal(80, lambda: command.main(["dead"], standalone_mode=False), monkeypatch)
    shown = "\n".join(lines)
    for kind, message in errors.items():
        assert f"{kind.rpartition('.')[2]}: {message}" in shown
    assert max(map(len, lines)) <= 80
    assert {row["error"] for row in json.loads(shell("dead", "--json").stdout)} == {
        f"{k}: {m}" for k, m in errors.items()
    }
    assert "CardError: no such card" in shell("jobs").stdout
    assert "shop.payments" not in shell("jobs").stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.b.Error: c.d.e: f", "Error: c.d.e: f"),
        ("a.b.Error", "Error"),
        ("Error: a.b.c", "Error: a.b.c"),
        ("lost: worker w (id 7, pid 1) has ended", "lost: worker w (id 7, pid 1) has ended"),
        ("www.example.com is down", "www.example.com is down"),
        ("a.b.Outer.Inner: x", "Inner: x"),
        ("", ""),
        (None, None),
    ],
)
def test_an_error_in_a_table_has_no_module(text: str | None, shown: str | None) -> None:
    assert output.brief_error(text) == shown
