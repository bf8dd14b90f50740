"""A child process that exits during a call is noticed, even if it leaves processes behind."""

from __future__ import annotations

import atexit
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
from pgworkd.engine.run import process_pool
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


def say_at_exit(payload: dict[str, Any]) -> None:
    """What a library that writes in the background does: its last word comes a moment after the process is to end."""

    def say() -> None:
        time.sleep(payload["after_s"])
        Path(payload["path"]).write_text("the end", encoding="ascii")

    Path(payload["pid"]).write_text(str(os.getpid()), encoding="ascii")
    atexit.register(say)


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


async def test_an_idle_process_says_its_last_word_at_a_stop(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    app, said = App(), tmp_path / "said"
    app.handler("q", run_in="process")(say_at_exit)
    async with running(app, dsn):
        payload = {"path": str(said), "pid": str(tmp_path / "pid"), "after_s": 0.2}
        await until(waits_for_status(db, await insert(db, "q", json.dumps(payload)), "completed"))
        assert not said.exists()
    assert said.read_text(encoding="ascii") == "the end"


@pytest.mark.parametrize("after_s", [0.0, 60.0])
async def test_a_process_that_was_idle_for_too_long_ends_while_the_daemon_works(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    monkeypatch.setattr(process_pool, "IDLE_S_MAX", 0.3)
    app, said, pid = App(), tmp_path / "said", tmp_path / "pid"
    app.handler("q", run_in="process")(say_at_exit)
    payload = json.dumps({"path": str(said), "pid": str(pid), "after_s": after_s})
    async with running(app, dsn):
        await until(waits_for_status(db, await insert(db, "q", payload), "completed"))
        first = int(pid.read_text(encoding="ascii"))
        await until(lambda: not Path(f"/proc/{first}").exists())
        assert said.exists() == (after_s == 0.0)  # what hangs is killed
        await until(waits_for_status(db, await insert(db, "q", payload), "completed"))
        assert int(pid.read_text(encoding="ascii")) != first


def print_without_end(payload: dict[str, Any]) -> None:
    print(payload["text"], end="")  # noqa: T201


async def test_what_a_job_printed_last_is_a_line_before_the_job_ends(
    dsn: str, db: asyncpg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    app, printed = App(), ""
    app.handler("q", run_in="process", concurrency=1)(print_without_end)

    def read() -> str:
        nonlocal printed
        printed += capfd.readouterr().err
        return printed

    async with running(app, dsn):
        for text in ("one", "two"):
            job_id = await insert(db, "q", json.dumps({"text": text}))
            await until(waits_for_status(db, job_id, "completed"))
            await until(lambda text=text: f"{text}\n" in read())
    assert printed.count("one\ntwo\n") == 1
