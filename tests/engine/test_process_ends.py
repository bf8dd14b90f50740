"""A child process that exits during a call is noticed, even if it leaves processes behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")


def fork(payload: dict[str, Any]) -> int:
    """By Python, or as a library in C does, which Python's hooks do not hear of: that child keeps every descriptor."""
    return int(ctypes.PyDLL(None).fork()) if payload["in_c"] else os.fork()


def fork_and_die(payload: dict[str, Any]) -> None:
    pid = fork(payload)
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    Path(payload["path"]).write_text(str(pid), encoding="ascii")
    os._exit(3)


def fork_and_answer(payload: dict[str, Any]) -> str:
    pid = fork(payload)
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    Path(payload["path"]).write_text(str(pid), encoding="ascii")
    return "answered"


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("handle", [fork_and_die, fork_and_answer])
async def test_a_child_that_exits_is_noticed_while_its_own_fork_lives(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, handle: Any, in_c: bool
) -> None:
    app, path = App(), tmp_path / "pid"
    app.handler("q", run_in="process", max_attempts=1)(handle)
    try:
        with anyio.fail_after(30):
            async with running(app, dsn):
                job_id = await insert(db, "q", json.dumps({"path": str(path), "in_c": in_c}))
                await until(waits_for_status(db, job_id, "dead" if handle is fork_and_die else "completed"))
    finally:
        if path.exists():
            os.kill(int(path.read_text(encoding="ascii")), signal.SIGKILL)
    if handle is fork_and_die:
        error = await db.fetchval("SELECT error FROM pgworkd.jobs")
        assert error == "ChildDied: the process that ran the handler ended with exit code 3"
