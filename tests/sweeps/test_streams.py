"""Standard input, output and error that are closed, broken, full or stuck end, block or slow no program."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.programs import Launch, Program, launch
from tests.sweeps.subjects import SUBJECTS, Stage, Subject

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

__all__ = ["launch"]  # a fixture
STOP_S = 20.0
CLOSED = {"closed 0": "0<&-", "closed 1": "1>&-", "closed 2": "2>&-", "all closed": "0<&- 1>&- 2>&-"}
LATER = ("broken at work", "stuck at work", "broken at the stop", "stuck at the stop")
STATES = (*CLOSED, "broken", "full", "stuck", *LATER)
MAIN = ("run", "run --processes")
CASES = [(name, state) for name in SUBJECTS for state in STATES if name in MAIN or state not in (*CLOSED, *LATER[2:])]
CASES += [(name, "all closed") for name in SUBJECTS if name not in MAIN]
RELOADS = ("run", "run --processes", "push")


@pytest.fixture
def stage(launch: Launch, dsn: str, tmp_path: Path) -> Iterator[Stage]:
    data = Path(tempfile.mkdtemp(prefix="pgworkd-test-"))
    data.chmod(0o755)
    yield Stage(launch, dsn, tmp_path, data)
    shutil.rmtree(data, ignore_errors=True)


class Pipe:
    """A small pipe as standard output and error."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        fcntl.fcntl(self.write, fcntl.F_SETPIPE_SZ, 4096)
        self._reading: threading.Thread | None = None
        self._stop, self._wake = os.pipe()

    def fill(self) -> None:
        """As after a reader that has stopped."""
        os.set_blocking(self.write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.write, b"x" * 4096)
        os.set_blocking(self.write, True)

    def follow(self) -> None:
        """Reads until `stick` or `snap`."""

        def read() -> None:
            import select

            while self._stop not in (ready := select.select([self.read, self._stop], [], [])[0]):
                if not os.read(ready[0], 4096):
                    return

        self._reading = threading.Thread(target=read, daemon=True)
        self._reading.start()

    def stick(self) -> None:
        """Reads no more."""
        os.write(self._wake, b"x")
        if self._reading is not None:
            self._reading.join()

    def snap(self) -> None:
        """Closes the reader's end."""
        if self._reading is not None:
            self.stick()
        os.close(self.read)

    def streams(self) -> dict[str, Any]:
        """For the program; the test keeps only the reader's end."""
        return {"stdout": self.write, "stderr": self.write}


def begun(subject: Subject, stage: Stage, state: str, pipe: Pipe, **popen: Any) -> Program:
    """The program, in the state if that is one to begin with; `popen`: streams that are not in it."""
    if state in CLOSED:
        return subject.start(stage, prefix=["sh", "-c", f'exec "$@" {CLOSED[state]}', "sh"], popen=popen)
    if state == "full":
        with Path("/dev/full").open("wb") as full:
            return subject.start(stage, popen={"stdout": full, "stderr": full} | popen)
    if state == "broken":
        pipe.snap()
    elif state == "stuck":
        pipe.fill()
    else:
        pipe.follow()
    program = subject.start(stage, popen=pipe.streams() | popen)
    os.close(pipe.write)
    return program


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["close-loop", "close-process"])
def test_a_handler_that_closes_its_streams_harms_itself_alone(stage: Stage, kind: str) -> None:
    """What it has closed it cannot print to, nor can others; the log goes on."""
    program = SUBJECTS["run"].start(stage)
    program.logs("daemon.ready")
    with stage.db() as db:
        sql = "INSERT INTO pgworkd.jobs (queue, kind, max_attempts) VALUES (%s, %s, 1)"
        db.execute(sql, (kind.removeprefix("close-"), kind))
        program.logs("job.completed")
        db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'slow' FROM generate_series(1, 20)")
    program.logs("job.completed", 21)
    program.send(signal.SIGHUP)
    program.logs("settings.reloaded")
    program.send(signal.SIGTERM)
    assert program.ends(STOP_S) == 0
    program.logs("daemon.stopped")


@pytest.mark.parametrize("state", ["closed 2", "broken", "full", "stuck"])
def test_a_bench_measures_although_nobody_sees_its_progress(stage: Stage, state: str) -> None:
    pipe, result = Pipe(), stage.place / "result.json"
    bench = Subject("bench", lambda _: ["bench", "--jobs", "300", "--seconds", "5", "--json"], bool, bool)
    with result.open("wb") as stdout:
        program = begun(bench, stage, state, pipe, stdout=stdout)
        assert program.ends(60) == 0
    assert json.loads(result.read_text())["drain"]["complete"] is True


def change(pipe: Pipe, state: str) -> None:
    if state.startswith("broken"):
        pipe.snap()
    else:
        pipe.stick()


@pytest.mark.parametrize(("name", "state"), CASES)
def test_a_program_starts_works_reloads_and_stops(stage: Stage, name: str, state: str) -> None:
    subject, pipe = SUBJECTS[name], Pipe()
    program = begun(subject, stage, state, pipe)
    if name == "demo" and state in ("broken", "full"):  # from its first line on nobody is there to show it to
        assert program.ends() == 0
        return
    program.until(lambda: subject.ready(stage), f"{name} is ready")
    program.until(subject.work(stage), f"{name} works")
    if state.endswith("at work"):
        change(pipe, state)
    for _ in range(2):
        program.until(subject.work(stage), f"{name} goes on")
        if name in RELOADS:
            program.send(signal.SIGHUP)
    program.until(subject.work(stage), f"{name} goes on")
    if state.endswith("at the stop"):
        change(pipe, state)
    program.send(signal.SIGTERM)
    assert program.ends(STOP_S) == 0


NOWHERE_TO_WRITE = """
import builtins, os, tempfile

def refuse(*_, **__):
    raise OSError(30, "Read-only file system")

tempfile.mkdtemp = tempfile.mkstemp = tempfile.TemporaryDirectory = os.mkdir = os.unlink = refuse
"""


@pytest.mark.parametrize("name", [*MAIN, "exporter", "autoscale"])
def test_no_directory_is_needed(stage: Stage, name: str) -> None:
    """As on a read-only file system without /tmp; with metrics, for which processes report to their parent."""
    (stage.place / "sitecustomize.py").write_text(NOWHERE_TO_WRITE)
    paths = os.pathsep.join(filter(None, (str(stage.place), os.environ.get("PYTHONPATH"))))
    subject, more = SUBJECTS[name], {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    if name != "exporter":
        more["PGWORKD_METRICS_LISTEN"] = f"127.0.0.1:{stage.port}"
    program = subject.start(stage, **more)
    program.until(lambda: subject.ready(stage), f"{name} is ready")
    program.until(lambda: stage.answers("/metrics"))
    program.until(subject.work(stage), f"{name} works")
    if name in MAIN:
        program.until(lambda: stage.answers("/readyz"), "all processes report")
    program.send(signal.SIGTERM)
    assert program.ends(STOP_S) == 0
