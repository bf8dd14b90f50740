"""Commands print rows as plain text: no value can control the terminal or add a line (CWE-117, CWE-150)."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.admin.explained import Explanation
from pgworkd.admin.queries import JobDetails
from pgworkd.cli import output
from pgworkd.cli.jobs import _print_job, _told
from tests.kits.cli import Shell, clean, shell
from tests.kits.models import examples

__all__ = ["clean", "shell"]  # fixtures

FORBIDDEN = set(map(chr, (*range(10), *range(11, 32), *range(127, 160)))) | set("\u202e\u2066\u2028\u2029\u200f")


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
    why = _told([Explanation("key", text, text, None, None)])
    said = printed(_print_job, JobDetails(**fields), fields | {"errors": errors}, why)
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
