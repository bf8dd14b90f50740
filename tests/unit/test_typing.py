"""The package is typed for its users: mypy --strict takes a small program of theirs, and the wheel says that it may."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.markdown import NAMES, blocks
from tests.planting import ROOT

PROGRAM = '''
"""What a user may write, with every name that the package offers at its top."""
from datetime import timedelta
from uuid import UUID

import asyncpg
import psycopg
from notes import Note, app

from pgworkd import App, Backoff, DeadJob, Job, LeaseLost, OutcomeUnknown, PermanentError, PgworkdError, RetryAfter
from pgworkd import Snooze, UsageError
from pgworkd.client import Batch, Enqueued, NewJob, Workflow, enqueue, enqueue_many
from pgworkd.results import JobFailed, Results


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
    return made.id if made.created else many[0]


async def work(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    job_id: UUID = await enqueue(connection, "embedding", Note(note=7), delay=30)
    flow = Workflow()
    flow.add("extract", "etl", {"day": 7})
    flow.add("load", "etl", after=["extract"], on_failed_dependency="run")
    ids = await flow.enqueue(connection)
    await Batch(connection, job_id).add({"employee": n} for n in range(3))
    try:
        async with Results(dsn) as results:
            print(await results.result(ids["load"], timeout_s=60))
            async for found in results.of_batch(job_id):
                print(found.payload, found.result)
    except (JobFailed, LeaseLost, OutcomeUnknown, UsageError, PgworkdError) as error:
        print(error)


def dead(other: App) -> None:
    @other.on_dead
    def tell(dead: DeadJob) -> None:
        print(dead.queue, dead.error)
'''


def strict(directory: Path, *files: str) -> subprocess.CompletedProcess[str]:
    """mypy --strict as a user runs it, who knows nothing of our settings."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={directory}/cache", *files]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_a_users_program_passes_mypy_strict(tmp_path: Path) -> None:
    (tour,) = [block for block in blocks("docs/handlers.md") if block.module]
    (tmp_path / "notes.py").write_text(tour.text, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM.lstrip("\n"), encoding="utf-8")
    (tmp_path / "wrong.py").write_text("from pgworkd import App\n\nApp().handler(7)\n", encoding="utf-8")
    found = strict(tmp_path, "notes.py", "program.py", "wrong.py")
    assert [line for line in found.stdout.splitlines() if "error:" in line] == [
        'wrong.py:3: error: Argument 1 to "handler" of "App" has incompatible type "int"; expected "str"  [arg-type]'
    ], found.stdout + found.stderr


def test_the_modules_of_the_docs_pass_mypy_strict(tmp_path: Path) -> None:
    modules = [block for page in NAMES for block in blocks(page) if block.module]
    files = [tmp_path / f"module_{number}.py" for number in range(len(modules))]
    for file, block in zip(files, modules, strict=True):
        file.write_text(block.text, encoding="utf-8")
    found = strict(tmp_path, *(file.name for file in files))
    assert found.returncode == 0, [*map(str, zip(files, modules, strict=True)), found.stdout + found.stderr]


def test_the_wheel_says_that_it_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    chapters = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pgworkd" / "sql").rglob("*.sql")}
    assert {"pgworkd/py.typed", "pgworkd/schema.sql", "pgworkd/sql/grants.sql", *chapters} <= held
