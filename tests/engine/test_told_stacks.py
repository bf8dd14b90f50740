"""SIGUSR1: a daemon logs the stacks of its threads and tasks, and goes on."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.kits.cli import Shell, clean, shell
from tests.kits.commands import Start, start

__all__ = ["clean", "shell", "start"]  # fixtures

pytestmark = pytest.mark.slow("daemons in processes of their own")
APP = """
import sys
import time
import anyio
from pgworkd import App

app = App()

async def inner(secret):
    print("has begun", file=sys.stderr, flush=True)
    await anyio.sleep_forever()

@app.handler("waits")
async def waits(payload: dict):
    await inner(payload["secret"])

@app.handler("blocks")
async def blocks():
    block(time.monotonic() + 3600)

def block(until):
    while time.monotonic() < until:
        pass
"""


@pytest.fixture
def daemon(shell: Shell, start: Start, tmp_path: Any) -> Any:
    """A daemon with that application."""
    (tmp_path / "told.py").write_text(APP)
    command = start("run", "--app", "told:app", "--shutdown-s", "0", PGWORKD_DSN=shell.dsn, PGWORKD_LOG_FORMAT="json")
    command.says("daemon.ready")
    return command


def told(daemon: Any, after: int = 0) -> str:
    """The stacks that the daemon logs at the signal."""
    daemon.process.send_signal(signal.SIGUSR1)
    return str(json.loads(daemon.says("process.stacks", after))["stacks"])


@pytest.mark.parametrize("kind", ["waits", "blocks"])
def test_a_daemon_tells_where_a_handler_is_also_where_it_blocks_the_loop(shell: Shell, daemon: Any, kind: str) -> None:
    job_id = shell("enqueue", kind, '{"secret": "c4n4ry"}').stdout.strip()
    daemon.says("has begun" if kind == "waits" else "loop.blocked")
    text = told(daemon)
    assert f"{kind} (" in text
    assert f"{'inner' if kind == 'waits' else 'block'} (" in text
    assert "c4n4ry" not in text
    assert "thread MainThread\n" in text
    told(daemon, after=len(daemon.lines))
    assert shell.status(job_id) == "running"
