"""The package is typed for its users: mypy --strict accepts a program of theirs against the installed wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from django.utils.connection import ConnectionProxy

from tests.kits.docs import NAMES, blocks
from tests.kits.planting import ROOT

pytestmark = pytest.mark.slow("type checks of whole programs")

PROGRAM = '''
"""A user's program, with every top-level name of the package."""
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
from notes import Note, app

from pgworkd import App, Backoff, DeadJob, Job, LeaseLost, OutcomeUnknown, PermanentError, PgworkdError, RetryAfter
from pgworkd import Snooze, UsageError
from pgworkd.admin import Admin
from pgworkd.client import Batch, Enqueued, NewJob, Progress, Workflow, batch, enqueue, enqueue_many
from pgworkd.database.connection import ConnectionOptions
from pgworkd.results import Found, JobFailed, Results


@app.handler("ocr", backoff=Backoff(1, 2, 60), timeout_s=timedelta(minutes=1), run_in="thread")
def ocr(payload: dict[str, int], job: Job) -> dict[str, int]:
    if payload["page"] < 0:
        raise PermanentError("no such page")
    if payload["page"] == 0:
        raise RetryAfter(30) if job.attempt > 1 else Snooze(30)
    job.progress(0.5, "half")
    return payload


@app.stream("payroll", "cheques")
def cheque(given: dict[str, int], result: dict[str, int]) -> dict[str, int]:
    return given | result


def sync(connection: psycopg.Connection[tuple[object, ...]]) -> UUID:
    made: Enqueued = enqueue(connection, "mail", {"to": 7}, dedupe_key="welcome-7", on_duplicate="skip")
    many: list[UUID] = enqueue_many(connection, [NewJob("ocr", {"page": 1}), {"queue": "ocr"}])
    with batch(connection, "payroll", kind="calculate", dedupe_key="2026-11") as payroll:
        cheques = payroll.child("cheques", kind="cheque", stream=True, final=True)
        added: list[UUID] = payroll.add(({"employee": n} for n in range(3)), priority=1)
    progress: list[Progress] = cheques.progress()
    sealed: bool = Batch(connection, payroll.id).seal()
    flow = Workflow()
    flow.add("extract", "etl", {"day": 7}, max_attempts=3)
    ids: dict[str, UUID] = flow.enqueue(connection)
    if sealed and cheques.cancel().more:
        return ids["extract"]
    return made.id if made.created else [*many, *added, progress[0].id][0]


async def work(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    job_id: UUID = await enqueue(connection, "embedding", Note(note=7), delay=30)
    flow = Workflow()
    flow.add("extract", "etl", {"day": 7})
    flow.add("load", "etl", after=["extract"], on_failed_dependency="run")
    ids: dict[str, UUID] = await flow.enqueue(connection)
    added: list[UUID] = await Batch(connection, job_id).add({"employee": n} for n in range(3))
    async with app.batch(connection, "payroll", kind="calculate", on_complete={"queue": "report"}) as payroll:
        cheques = await payroll.child("cheques", kind="cheque", stream=True)
        await payroll.add([{"employee": len(added)}])
    progress: list[Progress] = await cheques.progress()
    if not await payroll.seal():
        print(progress[0].done, (await payroll.cancel()).cancelled)
    try:
        async with Results(dsn, poll_s=5) as results:
            print(await results.result(ids["load"], timeout_s=60))
            async for found in results.of_batch(job_id):
                each: Found = found
                print(each.payload, each.result)
    except (JobFailed, LeaseLost, OutcomeUnknown, UsageError, PgworkdError) as error:
        print(error)


async def operate(dsn: str, job_id: UUID) -> None:
    async with Admin(ConnectionOptions(dsn, by="ann@desk")) as admin:
        changed: list[UUID] = (await admin.jobs.retry([job_id])).changed
        outcome: str = (await admin.jobs.cancel(changed))[job_id]
        await admin.queues.pause("mail", for_s=60)
        await admin.queues.set("mail", {"concurrency": 4})
        created: bool = (await admin.jobs.enqueue("mail", '{"to": 7}', dedupe_key="k", on_duplicate="skip")).created
        freed: bool = await admin.keys.free("mail", "k")
        trees = await admin.batches.find("payroll")
        enabled: bool = await admin.schedules.enable("nightly")
        print(outcome, created, freed, enabled, trees[0].done, (await admin.stats("mail")).depth)


def untyped(connection: Any, batch_id: UUID) -> object:
    """A connection of unknown type is accepted as either kind."""
    with batch(connection, "pages") as pages:
        pages.add([{"page": 1}])
    return Batch(connection, batch_id).seal()


class Proxy:
    """As django.db.connection is to a checker that reads Django: what it has is not known."""

    def __getattr__(self, item: str) -> Any:
        return item

    def __contains__(self, key: str) -> bool:
        return bool(key)


def proxied(connection: Proxy) -> UUID:
    with batch(connection, "pages") as pages:
        pages.add([{"page": 1}])
    job_id: UUID = enqueue(connection, "mail", {"to": 7})
    return job_id


def dead(other: App) -> None:
    @other.on_dead
    def tell(dead: DeadJob) -> None:
        print(dead.queue, dead.error)
'''


WRONG = """
import psycopg

from pgworkd import App
from pgworkd.client import Workflow, batch, enqueue

App().handler(7)
Workflow().add("a", "q", priorty=1)
with psycopg.connect("") as connection:
    batch(connection, "b", max_failure=1)
    seal: str = batch(connection, "b").seal()
enqueue({}, "q")
"""
ERRORS = {"6": "arg-type", "7": "call-arg", "9": "call-overload", "10": "assignment", "11": "call-overload"}
"""The codes of the errors in WRONG by line."""


def strict(directory: Path, *files: str) -> subprocess.CompletedProcess[str]:
    """mypy --strict as a user runs it, without this project's settings, in an environment with the wheel installed."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={directory}/cache"]
    command += [f"--python-executable={_installed(directory)}", *files]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def _wheel(directory: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


def _installed(directory: Path) -> Path:
    """The Python of an environment with the wheel, and the dependencies of the one that runs the tests."""
    venv.create(directory / "venv")
    names = {"base": str(directory / "venv"), "platbase": str(directory / "venv")}
    site = Path(sysconfig.get_path("purelib", "venv", names))
    with zipfile.ZipFile(_wheel(directory)) as wheel:
        wheel.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + os.linesep, encoding="utf-8")
    return directory / "venv" / "bin" / "python"


def test_a_users_program_passes_mypy_strict(tmp_path: Path) -> None:
    (tour,) = [block for block in blocks("docs/handlers.md") if block.module]
    (tmp_path / "notes.py").write_text(tour.text, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM.lstrip("\n"), encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG.lstrip("\n"), encoding="utf-8")
    found = strict(tmp_path, "notes.py", "program.py", "wrong.py")
    errors = re.findall(r"^(\S+?)\.py:(\d+): error: .* \[([a-z-]+)\]$", found.stdout, re.MULTILINE)
    assert {(file, line): code for file, line, code in errors} == {("wrong", n): code for n, code in ERRORS.items()}, (
        found.stdout + found.stderr
    )


def test_the_modules_of_the_docs_pass_mypy_strict(tmp_path: Path) -> None:
    modules = [block for page in NAMES for block in blocks(page) if block.module]
    files = [tmp_path / f"module_{number}.py" for number in range(len(modules))]
    for file, block in zip(files, modules, strict=True):
        file.write_text(block.text, encoding="utf-8")
    found = strict(tmp_path, *(file.name for file in files))
    assert found.returncode == 0, [*map(str, zip(files, modules, strict=True)), found.stdout + found.stderr]


def test_djangos_proxy_is_what_the_client_takes_for_one() -> None:
    assert {"__getattr__", "__contains__"} <= vars(ConnectionProxy).keys()


def test_the_wheel_contains_py_typed(tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(_wheel(tmp_path)).namelist())
    chapters = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pgworkd" / "sql").rglob("*.sql")}
    assert {"pgworkd/py.typed", "pgworkd/schema.sql", "pgworkd/sql/grants.sql", *chapters} <= names
