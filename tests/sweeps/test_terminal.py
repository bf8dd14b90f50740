"""A terminal that closes stops each program, gracefully and once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import tempfile
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.programs import Launch, Program, launch
from tests.sweeps.subjects import SUBJECTS, Stage

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

__all__ = ["launch"]  # a fixture
STOP_S = 20.0
WORKERS = ("run", "run --processes", "run --remote")


class Terminal:
    """A terminal, which a program that is started on it controls; what it shows is thrown away."""

    def __init__(self) -> None:
        self.master, slave = os.openpty()
        self._name = os.ttyname(slave)
        self._slave = slave
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._closing.is_set():
            if select.select([self.master], [], [], 0.05)[0]:
                os.read(self.master, 4096)

    def popen(self, *, output: bool = True) -> dict[str, object]:
        """For a program in it; without `output`, its streams lead elsewhere."""

        def control() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
            fcntl.ioctl(os.open(self._name, os.O_RDWR), termios.TIOCSCTTY, 0)

        streams = {"stdin": self._slave, "stdout": self._slave, "stderr": self._slave} if output else {}
        return streams | {"preexec_fn": control}

    def close(self) -> None:
        """As when its window is closed, or the connection breaks."""
        self._closing.set()
        self._reader.join()  # a read under way would keep it open
        os.close(self._slave)
        os.close(self.master)


@pytest.fixture
def stage(launch: Launch, dsn: str, tmp_path: Path) -> Iterator[Stage]:
    data = Path(tempfile.mkdtemp(prefix="pgworkd-test-"))
    data.chmod(0o755)
    yield Stage(launch, dsn, tmp_path, data)
    shutil.rmtree(data, ignore_errors=True)


def ends_gracefully(stage: Stage, program: Program) -> None:
    assert program.ends(STOP_S) == 0
    found = stage.value("SELECT count(*) FROM pgworkd.workers WHERE kind = 'daemon' OR kind = 'remote'")
    assert found == 0, "what it had was given back"


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a signal was sent to the process that it has not taken yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_loss_of_the_terminal_is_a_graceful_stop(stage: Stage, name: str) -> None:
    subject, terminal = SUBJECTS[name], Terminal()
    program = subject.start(stage, popen=terminal.popen())
    program.until(lambda: subject.ready(stage), f"{name} is ready")
    program.until(subject.work(stage), f"{name} works")
    if name in WORKERS:
        with stage.db() as db:
            db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('slow')")
        program.until((stage.place / "slow.began").exists)
    terminal.close()
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        program.until(lambda: not is_pending(program.pid, signal.SIGHUP))  # the kernel's: two at once would be one
        program.send(signal.SIGHUP)  # as shells do, beside the kernel
    ends_gracefully(stage, program)
    if name in WORKERS:
        assert stage.value("SELECT count(*) FROM pgworkd.finished_jobs WHERE queue = 'slow' AND attempts = 1") == 1


@pytest.mark.parametrize("name", ["run", "serve"])
def test_it_counts_where_the_streams_lead_elsewhere(stage: Stage, name: str) -> None:
    subject, terminal = SUBJECTS[name], Terminal()
    program = subject.start(stage, popen=terminal.popen(output=False))
    program.until(lambda: subject.ready(stage), f"{name} is ready")
    program.send(signal.SIGHUP)  # the terminal is there: nothing but a reload
    program.until(subject.work(stage), f"{name} goes on")
    terminal.close()
    ends_gracefully(stage, program)


def test_it_counts_while_the_application_is_imported(stage: Stage) -> None:
    (stage.place / "plays.py").write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(60)\n")
    terminal = Terminal()
    program = SUBJECTS["run"].start(stage, popen=terminal.popen())
    program.until((stage.place / "began").exists)
    terminal.close()
    assert program.ends(STOP_S) == 0


def test_under_nohup_it_does_not(stage: Stage) -> None:
    subject, terminal = SUBJECTS["run"], Terminal()
    program = subject.start(stage, prefix=["nohup"], popen=terminal.popen(output=False))
    program.until(lambda: subject.ready(stage))
    terminal.close()
    program.send(signal.SIGHUP)
    program.logs("settings.reloaded")
    program.until(subject.work(stage), "it goes on")
    program.send(signal.SIGTERM)
    assert program.ends(STOP_S) == 0


def test_a_stop_signal_after_it_is_a_second_one(stage: Stage) -> None:
    subject, terminal = SUBJECTS["run"], Terminal()
    program = subject.start(stage, popen=terminal.popen(output=False))
    program.until(lambda: subject.ready(stage))
    with stage.db() as db:
        db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('slow')")
    program.until((stage.place / "slow.began").exists)
    terminal.close()
    program.logs("daemon.stopping")
    program.send(signal.SIGTERM)
    ends_gracefully(stage, program)
    assert stage.value("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending' AND failures = 0") == 1
