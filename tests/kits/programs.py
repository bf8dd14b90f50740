"""Long-running commands whose streams, terminal and process group a test takes into its own hands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 40.0
"""Of every wait: some of these programs start several processes."""


class Program:
    """A `pgworkd` command in a session of its own.

    Standard error is a file by default, not a pipe, which what the command leaves behind would hold open.
    """

    def __init__(
        self, directory: Path, args: Sequence[str], environ: dict[str, str], prefix: Sequence[str] = (), **popen: Any
    ) -> None:
        self.log = directory / f"log.{time.monotonic_ns()}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PGWORKD_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "pgworkd.cli", *args],
                cwd=directory,
                env=clean | {"PGWORKD_LOG_FORMAT": "json"} | environ,
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True} | popen,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The facts of the log lines of this name, or of all."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                facts = json.loads(line)
                if isinstance(facts, dict) and name in ("", facts.get("event")):
                    found.append(facts)
        return found

    def logs(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """The first `count` log lines of this name; waits for them."""
        self.until(lambda: len(self.events(name)) >= count, f"{name} x{count}")
        return self.events(name)[:count]

    def until(self, fact: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
        """Waits for a fact, as long as the program lives."""
        until = time.monotonic() + limit_s
        while not (found := fact()):
            alive = self.process.poll() is None
            state = f"{what or fact} within {limit_s} s; exit code {self.process.returncode}; {self.tail()}"
            assert time.monotonic() < until, f"not {state}"
            assert alive or fact(), f"not {state}"
            time.sleep(0.02)
        return found

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_group(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def ends(self, limit_s: float = LIMIT_S) -> int:
        """The exit code; waits for it."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {limit_s} s; {self.tail()}") from None

    def tail(self) -> str:
        """The last lines of the log, without those of jobs that went well."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([each for each in lines if "job.completed" not in each and "job.started" not in each][-30:])


Launch = Callable[..., Program]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts commands in the test's directory; ends them, and all in their process groups, after it."""
    with contextlib.ExitStack() as stack:

        def launch_(
            *args: str, prefix: Sequence[str] = (), popen: dict[str, Any] | None = None, **environ: str
        ) -> Program:
            program = Program(tmp_path, args, environ, prefix, **popen or {})
            stack.callback(_clear, program)
            return program

        yield launch_


def _clear(program: Program) -> None:
    for end in (lambda: os.killpg(program.pid, signal.SIGKILL), program.process.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end()
    program.process.wait()
