"""Log lines: one per event, from the configured level on, and no job can forge another line."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from pgworkd import log
from pgworkd.core import events

NASTY = "\u202etfel\u2066\u2028\u200fa\nb\rc\0d\x1b[31me\x1b]0;title\x07f\x9b2Jg\x7fh\u0085i"
CONTROLS = set("".join(map(chr, (*range(32), *range(127, 160)))))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(
    monkeypatch: pytest.MonkeyPatch, level: str, form: Any, *facts: tuple[str, dict[str, Any]], terminal: bool = False
) -> list[str]:
    """What is written to standard error for these events."""
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    log.configure(level, form)
    listen = log.listener(level)
    for name, known in facts:
        listen(name, known)
    text = out.getvalue()
    assert text == "" or text.endswith("\n")
    return text.split("\n")[:-1]


EVERY = [value for name, value in vars(events).items() if name.isupper()]


def levels_shown(monkeypatch: pytest.MonkeyPatch, level: str) -> dict[str, str]:
    """The level of each event that is logged from `level` on."""
    lines = lines_of(monkeypatch, level, "json", *((name, {}) for name in EVERY))
    return {line["event"]: line["level"] for line in map(json.loads, lines)}


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical"])
def test_events_below_the_level_are_not_logged(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    everything = levels_shown(monkeypatch, "debug")
    assert everything.keys() == set(EVERY), "with debug there is nothing that is not said"
    numbers = logging.getLevelNamesMapping()
    expected = {name: said for name, said in everything.items() if numbers[said.upper()] >= numbers[level.upper()]}
    assert levels_shown(monkeypatch, level) == expected


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (events.JOB_STARTED, "debug"),
        (events.JOB_COMPLETED, "info"),
        (events.JOB_FAILED, "warning"),
        (events.JOB_DEAD, "error"),
        (events.JOB_STALE, "warning"),
        (events.LEASE_FENCED, "error"),
        (events.DATABASE_UNAVAILABLE, "warning"),
        (events.DATABASE_RECOVERED, "info"),
        (events.DAEMON_READY, "info"),
        ("some.part", "info"),
    ],
)
def test_each_event_is_logged_at_its_level(monkeypatch: pytest.MonkeyPatch, name: str, level: str) -> None:
    (line,) = lines_of(monkeypatch, "debug", "json", (name, {}))
    assert json.loads(line)["level"] == level


def test_the_level_is_case_insensitive_and_an_unknown_one_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(lines_of(monkeypatch, "WARNING", "json", (events.JOB_COMPLETED, {}), (events.JOB_DEAD, {}))) == 1
    with pytest.raises(KeyError):
        log.configure("loud")


@pytest.mark.parametrize(
    ("form", "terminal", "is_json"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("json", True, True),
        ("json", False, True),
        ("console", False, False),
        ("console", True, False),
    ],
)
def test_logs_are_text_on_a_terminal_and_json_otherwise(
    monkeypatch: pytest.MonkeyPatch, form: str, terminal: bool, is_json: bool
) -> None:
    facts = {"queue": "ocr", "running": 3, "nothing": None}
    (line,) = lines_of(monkeypatch, "info", form, (events.DAEMON_STOPPING, facts), terminal=terminal)
    if is_json:
        said = json.loads(line)
        assert said.pop("timestamp").endswith("Z")
        assert said == {"event": "daemon.stopping", "level": "info", **facts}
    else:
        assert "daemon.stopping" in line
        assert "ocr" in line
        assert not line.startswith("{")
        assert ("\x1b[" in line) is terminal, "colours on a terminal only"


@pytest.mark.parametrize(
    "facts",
    [
        {"error": NASTY},
        {"queue": NASTY, "kind": NASTY, "worker": NASTY},
        {"queues": {NASTY: 3}},
        {"errors": [NASTY, {"inner": NASTY}]},
        {"error": ValueError(NASTY)},
        {"error": NASTY.encode("utf-8")},
    ],
    ids=["text", "names", "keys inside", "nested", "exception", "bytes"],
)
@pytest.mark.parametrize("form", ["json", "console"])
def test_control_characters_cannot_forge_a_line_or_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, form: str, facts: dict[str, Any]
) -> None:
    (line,) = lines_of(monkeypatch, "info", form, (events.JOB_FAILED, facts))
    assert (CONTROLS | TURNED).isdisjoint(line)
    assert len(line.splitlines()) == 1
    if form == "json":
        assert json.loads(line)["event"] == events.JOB_FAILED


def test_json_logs_round_trip_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines_of(monkeypatch, "info", "json", (events.JOB_FAILED, {"error": NASTY}))
    assert json.loads(line)["error"] == NASTY


def test_text_logs_escape_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines_of(monkeypatch, "info", "console", (events.JOB_FAILED, {"error": "evil\x1b[2J\nlast line"}))
    assert "x1b[2J" in line
    assert "nlast line" in line


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize(
    "value",
    ["\ud800 half a character", {1, 2}, object(), b"\xff", float("nan"), ["x"] * 3],
    ids=["surrogate", "set", "object", "bytes", "NaN", "list"],
)
def test_unserializable_values_do_not_break_the_log(monkeypatch: pytest.MonkeyPatch, form: str, value: object) -> None:
    lines = lines_of(monkeypatch, "info", form, (events.JOB_FAILED, {"error": value}), (events.JOB_DEAD, {}))
    assert len(lines) == 2
    assert events.JOB_FAILED in lines[0]
    assert events.JOB_DEAD in lines[1]


def test_event_fields_may_be_named_like_the_logs_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines_of(monkeypatch, "info", "json", (events.JOB_FAILED, {"error": "e", "name": "n", "logger": "l"}))
    assert json.loads(line)["name"] == "n"


def test_context_bound_by_a_handler_appears_in_its_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with structlog.contextvars.bound_contextvars(request="r1"):
        (line,) = lines_of(monkeypatch, "info", "json", (events.JOB_COMPLETED, {}))
    assert json.loads(line)["request"] == "r1"


def test_warnings_of_the_drivers_pool_are_not_logged() -> None:
    log.configure()
    assert not logging.getLogger("asyncpg.pool").isEnabledFor(logging.WARNING)
    assert logging.getLogger("asyncpg.pool").isEnabledFor(logging.ERROR)


TURNED = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u2028\u2029")


@pytest.mark.parametrize("form", ["json", "console"])
@given(text=st.text(), more=st.text())
def test_any_text_is_logged_as_one_plain_line(form: str, text: str, more: str) -> None:
    facts = {"error": text, "queues": {more: [text]}, "worker": (text, more.encode("utf-8", "replace"))}
    with pytest.MonkeyPatch.context() as patch:
        (line,) = lines_of(patch, "info", form, (events.JOB_FAILED, facts))
    assert len(line.splitlines()) == 1
    assert (CONTROLS | TURNED).isdisjoint(line)
    line.encode()
    if form == "json":
        assert json.loads(line)["error"] == text


@pytest.mark.parametrize("form", ["json", "console"])
def test_traceback_lines_cannot_be_mistaken_for_events(monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    log.configure("info", form)
    try:
        raise ValueError("first\n2026-11-21T00:00:00Z [error    ] job.dead\r\x1b[2J\u202e postgresql://u:c4n4ry@h/db")
    except ValueError:
        structlog.get_logger().exception("it broke\nbadly")
    said = out.getvalue()
    assert (CONTROLS - {"\n"} | TURNED).isdisjoint(said)
    assert "c4n4ry" not in said
    lines = said.removesuffix("\n").split("\n")
    if form == "json":
        assert len(lines) == 1
    else:
        assert "it broke\\nbadly" in lines[0]
        assert "  Traceback (most recent call last):" in lines
        assert any(line.startswith("  2026-11-21T00:00:00Z [error") for line in lines[1:])
        assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("level", [logging.WARNING, logging.WARNING + 5, logging.CRITICAL, 99])
def test_library_logs_have_the_same_format(monkeypatch: pytest.MonkeyPatch, form: Any, level: int) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(logging.getLogger("somebody"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("somebody"), "propagate", False)
    log.configure("info", form)
    logging.getLogger("somebody").log(level, "lost: %s", "postgresql://u:c4n4ry@h/db\n\x1b[2J")
    said = out.getvalue()
    assert said.count("\n") == 1
    assert "somebody" in said
    assert "postgresql://u:***@h/db" in said
    assert (CONTROLS - {"\n"}).isdisjoint(said)


def test_a_handlers_bound_key_or_event_name_cannot_forge_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    log.configure("info", "console")
    structlog.get_logger().info(NASTY, **{NASTY: NASTY})
    assert (CONTROLS - {"\n"} | TURNED).isdisjoint(out.getvalue())
    assert out.getvalue().count("\n") == 1


JOURNALLED = """
import os, sys
found = os.fstat(2)
os.environ["JOURNAL_STREAM"] = sys.argv[1].format(found.st_dev, found.st_ino)
from pgworkd.cli.output import note
from pgworkd import log
log.configure("debug", sys.argv[2])
import structlog
logger = structlog.get_logger("pgworkd")
for level in ("debug", "info", "warning", "error", "critical"):
    getattr(logger, level)("one", exception="two\\nthree")
note("four")
note("five", "error")
"""


@pytest.mark.slow("each starts a process")
@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize(("stream", "marked"), [("{}:{}", True), ("1{}:{}", False), ("{1}:{0}", False), ("", False)])
def test_lines_for_the_journal_begin_with_their_priority(stream: str, marked: bool, form: str) -> None:
    command = [sys.executable, "-c", JOURNALLED, stream, form]
    lines = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr.splitlines()
    *logged, four, five = lines
    per_line = len(logged) // 5
    assert per_line == (1 if form == "json" else 3)
    wanted = [f"<{priority}>" for priority in (7, 6, 4, 3, 2) for _ in range(per_line)]
    found = [line[:3] for line in logged]
    assert found == wanted if marked else not any(line.startswith("<") for line in lines)
    assert (four, five) == (("<6>pgworkd: four", "<3>pgworkd: five") if marked else ("pgworkd: four", "pgworkd: five"))
