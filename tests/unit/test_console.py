"""The log beside an application's own structlog, and on a terminal."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from pgworkd import log
from pgworkd.core import events
from tests.kits import own_structlog


def captured(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard error; not by a fixture, after which pytest replaces it again."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    return out


# Applications that configure structlog.


class Attempt:
    def facts(self) -> dict[str, object]:
        return {"job_id": "j7", "queue": "q", "kind": "k", "attempt": 1}


class Running:
    attempt = Attempt()


@pytest.fixture
def in_a_handler() -> Iterator[None]:
    before = log.RUNNING.set(Running())
    yield
    log.RUNNING.reset(before)


@pytest.mark.parametrize("kind", ["list", "tuple", "has it"])
def test_the_configuration_of_an_application_stays(
    monkeypatch: pytest.MonkeyPatch, in_a_handler: None, kind: str
) -> None:
    out = captured(monkeypatch)
    theirs = io.StringIO()
    own_structlog.set_up(theirs)
    if kind == "tuple":
        structlog.configure(processors=tuple(structlog.get_config()["processors"]))
    elif kind == "has it":
        structlog.get_config()["processors"].insert(1, log.add_job)
    used = structlog.get_logger()
    used.info("before")
    for level in ("info", "error"):  # the second one is a reload
        log.configure(level, "json", "w7")
    structlog.get_logger().info("charged")
    if kind == "list":  # else it has a copy
        used.info("charged")
    log.listener("error")(events.JOB_DEAD, {"error": "e"})
    said = [json.loads(line) for line in theirs.getvalue().splitlines()]
    charged = {"event": "charged", "service": "shop", "job_id": "j7", "queue": "q", "kind": "k", "attempt": 1}
    assert said[1:] == [charged] * (2 if kind == "list" else 1)
    (own,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (own["event"], own["worker"], "service" in own) == ("job.dead", "w7", False)


def test_structlog_through_logging_ends_in_our_lines_if_logging_is_not_configured(
    monkeypatch: pytest.MonkeyPatch, in_a_handler: None
) -> None:
    out = captured(monkeypatch)
    monkeypatch.setattr(logging.getLogger("shop"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("shop"), "propagate", False)
    own_structlog.set_up_as_its_docs_say()
    log.configure("info", "json")
    structlog.get_logger("shop").warning("charged")
    log.listener("info")(events.JOB_DEAD, {})
    first, second = [json.loads(line) for line in out.getvalue().splitlines()]
    assert json.loads(first["message"]) | {"timestamp": ""} == {
        "event": "charged",
        "service": "shop",
        "logger": "shop",
        "level": "warning",
        "timestamp": "",
        **Attempt().facts(),
    }
    assert second["event"] == "job.dead"


def test_an_application_that_configures_later_keeps_that_over_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    captured(monkeypatch)
    log.configure("info", "json")
    theirs = io.StringIO()
    own_structlog.set_up(theirs)
    log.configure("debug", "json")
    structlog.get_logger().info("charged")
    assert json.loads(theirs.getvalue())["service"] == "shop"


def test_without_one_a_reload_changes_the_level_of_what_handlers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    out = captured(monkeypatch)
    for level in ("error", "info"):
        log.configure(level, "json")
        structlog.get_logger().info(level)
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["info"]


# Terminals.

ID = "01939d2e-7c1a-7b3c-8f5d-3c2b1a0f9e8d"
JOB = {"job_id": ID, "queue": "welcome", "kind": "welcome", "attempt": 1}


@pytest.mark.parametrize(
    ("event", "facts", "shown"),
    [
        (events.DAEMON_STARTING, {"queues": {"welcome": 10}, "worker": "till-1"}, "queues=welcome:10 worker=till-1"),
        (events.DAEMON_READY, {"worker_id": 7, "queues": {"welcome": 10}}, "worker_id=7 queues=welcome:10"),
        (events.DAEMON_READY, {"queues": dict.fromkeys(map(str, range(40)), 1)}, "queues=0:1,1:1,2:1,+37"),
        (events.JOB_STARTED, JOB, f"welcome {ID}"),
        (events.JOB_COMPLETED, {**JOB, "duration_s": 4.7e-05}, f"welcome {ID} 47us"),
        (events.JOB_COMPLETED, {**JOB, "duration_s": 0.0123, "attempt": 2}, f"welcome {ID} #2 12.3ms"),
        (events.DAEMON_STOPPING, {"running": 3, "shutdown_s": 30.0}, "running=3 shutdown=30s"),
        (events.DAEMON_STOPPED, {"exit_code": 0}, "exit_code=0"),
        ("metrics.listening", {"address": "127.0.0.1:9464"}, "address=127.0.0.1:9464"),
    ],
)
def test_a_line_of_a_terminal_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, event: str, facts: dict[str, Any], shown: str
) -> None:
    out = captured(monkeypatch)
    log.configure("debug", "console")
    log.listener("debug")(event, facts)
    (line,) = out.getvalue().splitlines()
    at, said, more = line.split(" ", 2)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", at)
    assert (said, more) == (event, shown)
    assert len(line) <= 80


def test_a_terminal_shows_the_level_that_matters_and_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    out = captured(monkeypatch)
    log.configure("debug", "console")
    log.listener("debug")(events.JOB_DEAD, {**JOB, "error": "ValueError: " + "no " * 99})
    said = out.getvalue().splitlines()
    assert said[0].split(" ", 1)[1].startswith(f'ERROR job.dead welcome {ID} error="ValueError: no no')
    assert said[0].endswith('no "')


@pytest.mark.parametrize(("name", "shown"), [("till-1", True), (socket.gethostname(), False)])
def test_a_terminal_names_the_worker_unless_that_is_the_host(
    monkeypatch: pytest.MonkeyPatch, name: str, shown: bool
) -> None:
    out = captured(monkeypatch)
    log.configure("info", "console", name)
    log.listener("info")(events.JOB_DEAD, {})
    assert (f"worker={name}" in out.getvalue()) is shown
