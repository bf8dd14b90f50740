"""Any command line, without a reachable database: a one-line error and exit code 1 or 2, or help and 0."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.cli.app import app
from tests.kits.cli import invoke
from tests.kits.models import examples, in_time, nowhere

__all__ = ["nowhere"]  # a fixture

NOWHERE = "postgresql://u:c4n4ry@127.0.0.1:1/db"
GOING_ON = {"dev", "demo", "autoscale", "exporter", "push", "serve"}
"""They start servers and programs, or serve on without a database; `run` without an app does not."""


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from parameter.opts


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each command's words and options, except --app, which imports and calls what it names."""
    if path:
        yield path, [name for name in _options(command) if name.startswith("-") and name != "--app"]
    for name, inner in getattr(command, "commands", {}).items():
        if name not in GOING_ON:
            yield from _commands(inner, (*path, name))


COMMANDS = dict(_commands(typer.main.get_command(app)))
TEXT = st.text(max_size=30).map(lambda text: text.replace("\0", ""))
VALUE = st.one_of(
    TEXT,
    st.sampled_from(["", "-", "--", "0", "-1", "1e400", "nan", "inf", "9" * 20, "{}", "[1]", '{"a": NaN}']),
    st.sampled_from(["q", "2027-01-31T07:00Z", "2027-13-01", "dead", "skip", "hold", NOWHERE, "\ud800", "\x1b[2J"]),
    st.just(str(uuid.UUID(int=7))),
    st.integers().map(str),
    st.floats().map(str),
)


@st.composite
def words(draw: st.DrawFn, door: str) -> list[str]:
    """A command line that is valid up to a point."""
    path = draw(st.sampled_from(sorted(path for path in COMMANDS if path[0] == door)))
    found = list(path) if draw(st.integers(0, 9)) else draw(st.lists(VALUE, max_size=2))
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(COMMANDS[path])) if COMMANDS[path] else "--json"
        value = draw(VALUE)
        found += draw(st.sampled_from([[value], [name], [name, value], [f"{name}={value}"]]))
    return [word for word in found if word not in GOING_ON and not word.startswith("--app")]


STDIN = st.one_of(st.just(b""), st.binary(max_size=50))
ENVIRON = {"PGWORKD_DSN": NOWHERE, "PGWORKD_CONNECT_TIMEOUT_S": "1"}


@pytest.mark.parametrize("door", sorted({path[0] for path in COMMANDS}))
def test_any_command_line_gets_help_or_a_one_line_error(door: str) -> None:
    examples(12)(given(words(door), STDIN)(_type))()


def _type(argv: list[str], stdin: bytes) -> None:
    with in_time():
        result = invoke(argv, input=stdin, env=ENVIRON)
    said = result.stdout + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit), (argv, result.exception)
    assert result.exit_code in (0, 1, 2)
    assert "internal error" not in said, (argv, said)
    assert "Traceback" not in said
    assert "c4n4ry" not in said
    assert "\x1b" not in said
    if result.exit_code:
        assert result.stderr or result.stdout, argv
        assert all(line.startswith("pgworkd: ") for line in result.stderr.splitlines()), (argv, result.stderr)
