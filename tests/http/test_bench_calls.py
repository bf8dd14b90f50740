"""`pgworkd bench --url`: what it says of the calls of a gateway, what it refuses, and what it leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.kits.bench import LINE, wait_for
from tests.kits.cli import Shell, clean, shell
from tests.kits.commands import Start, start
from tests.kits.gateway import Scopes, served, token

__all__ = ["clean", "shell", "start"]  # fixtures

pytestmark = pytest.mark.slow("a gateway in a process of its own")

BOTH: Scopes = {"enqueue": ["pgworkd-bench-*"], "operate": ["pgworkd-bench-*"]}
MINE = "SELECT count(*) FROM pgworkd.all_jobs WHERE queue LIKE 'pgworkd-bench-%%'"


@pytest.fixture
def gateway(shell: Shell) -> Iterator[str]:
    """The address of a gateway."""
    with served(shell.dsn) as (_, url):
        yield url


def with_token(shell: Shell, monkeypatch: pytest.MonkeyPatch, scopes: Scopes) -> None:
    """Commands call the gateway with a token of these scopes from now on."""
    monkeypatch.setenv("PGWORKD_TOKEN", asyncio.run(token(shell.dsn, scopes)))


def gone(shell: Shell) -> None:
    """The jobs of runs expire now, and --clean removes the rest."""
    shell.sql("UPDATE pgworkd.jobs SET expires_at = now() - interval '1 s' WHERE queue LIKE 'pgworkd-bench-%%'")
    shell.sql("SELECT count(*) FROM pgworkd.expire_jobs()")
    shell("bench", "--clean")
    assert shell.sql(MINE) == 0
    assert shell.sql(LINE) is False


@pytest.mark.parametrize("bulk", [False, True], ids=["single", "bulk"])
def test_it_creates_what_it_says_and_nothing_of_it_stays(
    shell: Shell, gateway: str, monkeypatch: pytest.MonkeyPatch, bulk: bool
) -> None:
    with_token(shell, monkeypatch, BOTH)
    flags = ("--jobs", "1300", "--concurrency", "2", "--payload-bytes", "300", *(["--bulk"] if bulk else []))
    found = json.loads(shell("bench", "--url", gateway, *flags, "--json").stdout)
    assert (found["jobs"], found["complete"], found["refused"], found["keeps_history"]) == (1300, True, [], False)
    assert found["calls"]["count"] == (1 if bulk else 1298), "the first one of each caller connects"
    assert 0 < found["calls"]["p50_ms"] <= found["calls"]["p95_ms"] <= found["calls"]["p99_ms"]
    assert found["jobs_per_s"] == pytest.approx(1300 / found["seconds"])
    assert found["client_cores"] > 0
    assert shell.sql(MINE) == 1300
    assert shell.sql("SELECT octet_length(payload::text) FROM pgworkd.jobs LIMIT 1") in (300, 301)
    gone(shell)


def test_the_table_says_it_to_people_and_that_it_was_cut(
    shell: Shell, gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_token(shell, monkeypatch, {"enqueue": None})
    result = shell("bench", "--url", gateway, "--jobs", "100000", "--seconds", "1")
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == ["WHAT", "enqueue", "a call of 1 job", "CPU of this process"]
    assert "cut by --seconds" in lines[1]
    assert "lacks the scope operate" in result.stderr
    assert shell.sql(LINE) is False
    assert 0 < shell.sql(MINE) < 100_000


REFUSED: dict[tuple[str, ...], str] = {
    ("--url", "localhost:7433"): "--url must be an address",
    ("--url", "ftp://localhost"): "--url must be an address",
    ("--url", "http://u:p@localhost"): "--url must not contain a password",
    ("--url", "http://localhost", "--clean"): "--clean needs the database",
    ("--url", "http://localhost", "--concurrency", "21"): "a number from 1 to 20",
    ("--url", "http://localhost", "--jobs", "99"): "a number from 100",
    ("--bulk",): "--bulk is for --url",
}


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_what_makes_no_sense_is_refused(shell: Shell, flags: tuple[str, ...]) -> None:
    assert REFUSED[flags] in shell.refused("bench", *flags)


def test_a_token_that_may_not_is_named(shell: Shell, gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = shell("bench", "--url", gateway, code=2).stderr
    assert "HTTP 401" in said
    assert "set PGWORKD_TOKEN to a token with enqueue:pgworkd-bench-*" in said
    monkeypatch.setenv("PGWORKD_TOKEN", "pgw_aaaaaaaaaaaa_" + "x" * 40)
    said = shell("bench", "--url", gateway, code=2).stderr
    assert "unknown, expired or revoked (HTTP 401)" in said
    with_token(shell, monkeypatch, {"enqueue": ["mail"], "operate": ["pgworkd-bench-*"]})
    said = shell("bench", "--url", gateway, code=2).stderr
    assert "enqueue" in said
    assert "pgworkd-bench-" in said
    assert "HTTP 403" in said
    assert shell.sql(MINE) == 0


def test_a_server_that_is_away_or_is_none_of_ours_is_named(shell: Shell) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert "no connection to the gateway" in shell("bench", "--url", away, code=1).stderr

    class Other(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = shell("bench", "--url", f"http://127.0.0.1:{server.server_port}", code=2).stderr
        server.shutdown()
    assert "HTTP 404" in said
    assert "check the token and the address" in said


def test_a_limit_of_rates_is_reported_and_does_not_end_the_run(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with_token(shell, monkeypatch, BOTH)
    with served(shell.dsn, PGWORKD_HTTP_REQUESTS_PER_S="20") as (_, url):
        flags = ("--jobs", "100", "--seconds", "20", "--concurrency", "1")
        found = json.loads(shell("bench", "--url", url, *flags, "--json").stdout)
    assert found["jobs"] == 100
    assert found["complete"]
    assert ["HTTP 429" in each["error"] for each in found["refused"]] == [True] * len(found["refused"])
    assert found["refused"]
    gone(shell)


def test_a_signal_ends_it_and_says_what_is_left(shell: Shell, gateway: str, start: Start) -> None:
    text = asyncio.run(token(shell.dsn, BOTH))
    flags = ("--url", gateway, "--jobs", "100000")
    command = start("bench", *flags, stdout=subprocess.PIPE, PGWORKD_TOKEN=text)
    wait_for(shell, f"SELECT ({MINE}) > 10", 60)
    command.stop(signal.SIGINT)
    assert command.ends() == 1
    assert "stopped; the jobs in pgworkd-bench-" in command.lines[-1]
    assert "expire within 10 min" in command.lines[-1]
    gone(shell)
