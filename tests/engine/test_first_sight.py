"""The first sight of `pgworkd demo` and `pgworkd dev`: the dashboard, with jobs on it, and what ends it."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import httpx
import pytest

from pgworkd.admin.admin import Admin
from pgworkd.cli.gateway import dashboard_of
from pgworkd.database.connection import ConnectionOptions
from pgworkd.demo import demo
from pgworkd.demo.view import DemoTally
from tests.kits.commands import Command, Start, start, waits_until
from tests.kits.pages import Forms

pytestmark = pytest.mark.slow("whole demos, each with a server of its own")

__all__ = ["start"]  # fixtures
DEFAULT = ("127.0.0.1", 7433)


def told(command: Command, until: str) -> list[str]:
    """The lines that a command prints up to the first one with that text."""
    assert command.process.stdout is not None
    lines: list[str] = []
    while not lines or until not in lines[-1]:
        lines.append(command.process.stdout.readline())
        assert lines[-1], (until, lines, command.lines)
    return lines


@contextlib.contextmanager
def signed_in(lines: list[str]) -> Iterator[httpx.Client]:
    """A browser that has opened the address which was printed."""
    (address,) = re.findall(r"dashboard, for you and ten minutes: (http://127\.0\.0\.1:\d+/\S+)", "".join(lines))
    with httpx.Client(base_url=address.partition("/sign-in")[0], timeout=30) as client:
        assert "<h1>Overview</h1>" in client.get(address, follow_redirects=True).text
        yield client


def test_the_demo_shows_its_jobs_on_the_pages_and_keeps_these_up(start: Start) -> None:
    command = start("demo", "--seconds", "5", "--path", str(Path(demo.__file__).parent), "--keep", stdout=PIPE)
    with signed_in(told(command, "sign-in?once=")) as client:
        waits_until(lambda: "completed</span>" in client.get("/jobs?status=completed").text)
        dead = "/jobs?status=dead"
        waits_until(lambda: "crash" in client.get(dead).text)
        lines = told(command, "stays up")
        assert any(line.startswith("it adds up: ") for line in lines), lines
        (fields,) = [each for _, path, each in Forms(client.get(dead).text).found if path == "/jobs/retry/matching"]
        assert client.post("/jobs/retry/matching", data=fields).status_code == 303
        with client.stream("GET", "/", headers={"Accept": "text/event-stream"}) as stream:
            assert next(stream.iter_text())
            command.stop(signal.SIGINT)
            assert command.ends() == 0
        with pytest.raises(httpx.ConnectError):
            client.get("/")


def test_a_demo_that_is_stopped_keeps_nothing_up(start: Start) -> None:
    command = start("demo", "--path", str(Path(demo.__file__).parent), "--keep", stdout=PIPE)
    told(command, "sign-in?once=")
    command.stop(signal.SIGINT)
    lines = told(command, "it adds up: ")
    assert command.ends() == 0, lines


def test_dev_serves_the_pages_beside_its_postgres_on_another_port_if_one_is_taken(start: Start) -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # it is taken already
            other.bind(DEFAULT)
            other.listen()
        command = start("dev", stdout=PIPE)
        lines = told(command, "export ")
        assert "(127.0.0.1:7433 is taken by another program)" in "".join(lines)
        with signed_in(lines) as client:
            assert client.get("/jobs").status_code == 200
            command.stop()
            assert command.ends() == 0


@pytest.mark.fast
async def test_without_the_extra_one_line_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.setitem(sys.modules, "pgworkd.gateway.api.server", None)
    async with dashboard_of(dsn) as said:
        assert said == "The dashboard needs the extra http: pip install 'pgworkd[http]'"


async def test_what_is_done_by_hand_does_not_spoil_the_sum(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    insert = demo.Demo._insert

    async def by_hand(found: demo.Demo, tick: int) -> None:
        await insert(found, tick)
        async with Admin(ConnectionOptions(dsn)) as admin:
            await admin.queues.pause("notify", 60)

    monkeypatch.setattr(demo.Demo, "_insert", by_hand)
    monkeypatch.setattr(DemoTally, "__call__", lambda *_: None)  # which it would find, but for the pause
    monkeypatch.setattr(demo, "DRAIN_S", 0.0)
    (tmp_path / "text").write_text("some text")
    assert await demo.Demo(dsn, [tmp_path / "text"], 2.0).run() == 0
    assert "were changed by hand" in capsys.readouterr().out
