"""`pgworkd stack`: asks the worker of a running job where in its code that is, and waits for the answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.kits.cli import ME, NOBODY, Shell, clean, enqueue, run, shell
from tests.kits.commands import Start, start

__all__ = ["clean", "shell", "start"]  # fixtures

OPEN = "SELECT count(*) FROM pgworkd.stack_requests WHERE answered_at IS NULL"


@contextmanager
def meanwhile(dsn: str, statement: str) -> Iterator[None]:
    """Executes this from a thread, once somebody has asked for a stack."""

    def does() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            row: tuple[int] | None = (0,)
            while not over.wait(0.02) and row == (0,):
                row = connection.execute(OPEN).fetchone()
            connection.execute(statement)

    over = threading.Event()
    thread = threading.Thread(target=does)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


ANSWER = """SELECT pgworkd.answer_stack(r.job_id, r.attempt, r.worker_id, w.token, E'waits:\n  in \x1b[31mhandle\n')
    FROM pgworkd.stack_requests r JOIN pgworkd.workers w ON w.id = r.worker_id"""


def test_it_prints_what_the_worker_answers(shell: Shell) -> None:
    job_id = enqueue(shell)
    run(shell, job_id)
    worker_id = shell.sql("UPDATE pgworkd.workers SET token = gen_random_uuid(), name = 'w7' RETURNING id")
    with meanwhile(shell.dsn, ANSWER):
        said = shell("stack", job_id).stdout
    assert said == f"job {job_id}, attempt 1, worker w7 (id {worker_id})\nwaits:\n  in \\x1b[31mhandle\n"
    with meanwhile(shell.dsn, ANSWER):
        told = json.loads(shell("stack", job_id, "--json", "--wait-s", "20").stdout)
    assert (told["id"], told["attempt"], told["running"], told["asked_by"]) == (job_id, 1, True, ME)
    assert told["stack"] == "waits:\n  in \x1b[31mhandle\n"
    assert shell.sql("SELECT count(*) FROM pgworkd.stack_requests") == 1


def test_a_worker_that_does_not_answer_in_time_is_named(shell: Shell) -> None:
    job_id = enqueue(shell)
    run(shell, job_id)
    assert "worker w (id 1) has not answered within 0 s" in shell.refused("stack", job_id, "--wait-s", "0", code=1)


def test_a_job_that_ends_before_the_answer_is_told(shell: Shell) -> None:
    job_id = enqueue(shell)
    run(shell, job_id)
    ends = f"SELECT pgworkd.settle_completed(ARRAY['{job_id}'::uuid], ARRAY[1], ARRAY[NULL])"
    with meanwhile(shell.dsn, ends):
        assert f"job {job_id} ended before its worker answered" in shell.refused("stack", job_id, code=1)


def test_what_cannot_be_asked_is_refused_with_the_reason(shell: Shell) -> None:
    assert f"job {NOBODY} is unknown: only a running job has a stack" in shell.refused("stack", NOBODY, code=1)
    assert "is pending: only a running job" in shell.refused("stack", enqueue(shell), code=1)
    job_id = enqueue(shell)
    run(shell, job_id)
    for change, said in {
        "UPDATE pgworkd.workers SET kind = 'remote', name = 'r'": "run by the remote worker r, which works through",
        "UPDATE pgworkd.workers SET kind = 'daemon', lease_until = now()": "run by a worker whose lease has ended",
        "DELETE FROM pgworkd.workers": "run by a worker whose lease has ended",
        "INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('e', 'https://x.test/', true);"
        " INSERT INTO pgworkd.queues (name, endpoint) VALUES ('q', 'e')": "sent by HTTP to what runs it, which cannot",
    }.items():
        shell.db.execute(change)  # type: ignore[call-overload]
        assert f"job {job_id} is {said}" in shell.refused("stack", job_id, code=1)
    assert shell.sql("SELECT count(*) FROM pgworkd.stack_requests") == 0


@pytest.mark.parametrize("given", ["soon", "-1", "2h", ""])
def test_a_wrong_time_is_named(shell: Shell, given: str) -> None:
    assert "--wait-s" in shell.refused("stack", NOBODY, "--wait-s", given)


APP = """
import asyncio
import sys
from pgworkd import App

app = App()

def spin():
    print("has begun", file=sys.stderr, flush=True)
    while True:
        pass

@app.handler("waits")
async def waits():
    print("has begun", file=sys.stderr, flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(3600))

@app.handler("blocks")
async def blocks():
    spin()

@app.handler("thread")
def thread():
    spin()

@app.handler("process", run_in="process")
def process():
    spin()
"""
WHERE = {
    "waits": ["in the event loop, waiting:", ", in waits", "in a task that it has started, waiting:", ", in sleep"],
    "blocks": ["in the event loop, running now", ", in blocks", ", in spin"],
    "thread": ["in a thread:", ", in thread", ", in spin"],
    "process": ["in process ", ", in process\n", ", in spin\n"],
}


@pytest.mark.slow("daemons in processes of their own")
@pytest.mark.parametrize("kind", WHERE)
def test_a_daemon_of_its_own_answers(shell: Shell, start: Start, tmp_path: Path, kind: str) -> None:
    """With the event loop that daemons have, which is not asyncio's own."""
    (tmp_path / "told.py").write_text(APP)
    flags = ("--app", "told:app", "--shutdown-s", "0", "--heartbeat-s", "1")
    daemon = start("run", *flags, PGWORKD_DSN=shell.dsn, PGWORKD_LOG_FORMAT="json")
    daemon.says("daemon.ready")
    job_id = enqueue(shell, kind)
    daemon.says("has begun")
    said = shell("stack", job_id).stdout
    places = [said.find(each) for each in WHERE[kind]]
    assert -1 not in places, said
    assert places == sorted(places), said
    assert "/pgworkd/engine/" not in said
    daemon.process.kill()
