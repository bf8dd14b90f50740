"""`pgworkd push` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 30.0


@contextlib.contextmanager
def pushing_process(
    dsn: str, *flags: str, log_to: Path | None = None, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that is ready; stopped gracefully at the end, if it is still there. `log_to`: a file for its log."""
    command = [sys.executable, "-m", "pgworkd.cli", "push", *flags]
    env = os.environ | {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json", "PGWORKD_SHUTDOWN_S": "5"} | environ
    with log_to.open("w+b") if log_to else tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=log)
        try:
            _wait_until_ready(process, Path(log.name))
            yield process
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(LIMIT_S) == 0, Path(log.name).read_text(encoding="utf-8")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(LIMIT_S)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while "daemon.ready" not in (text := log.read_text(encoding="utf-8")):
        assert process.poll() is None, text
        assert time.monotonic() < until, text
        time.sleep(0.02)
