"""The entry point of the command `pgworkd`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

from pgworkd.process import output, stop_signals

EXIT_S = 5.0
"""How long the interpreter may take to end: it waits for what the application has registered and started."""
_SERVICES = {"run", "push", "serve", "dev", "demo", "autoscale", "exporter"}
_TRIALS = {"bench", "conformance"}


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    output.open_missing()
    is_service, is_trial = (bool(names.intersection(sys.argv[1:2])) for names in (_SERVICES, _TRIALS))
    try:
        if is_service or is_trial:
            # what these find goes to standard output, and must arrive there
            output.install(*["stderr"] if is_trial else [])
            stop_signals.stand_by()
        from pgworkd.cli.app import called  # takes long enough to be hit by a signal

        called(sys.argv[1:])()
    except stop_signals.StopAsked:
        stop_signals.ignore()
        _leave(0 if is_service else 1, is_service=is_service)
    except SystemExit as leaving:
        _leave(leaving.code if isinstance(leaving.code, int) else bool(leaving.code), is_service=is_service)


def _leave(code: int, *, is_service: bool) -> NoReturn:
    """Ends the process with this exit code: a service soon, whatever the application has left to be waited for."""
    if is_service:
        with contextlib.suppress(RuntimeError):  # there are too many threads
            threading.Thread(target=_force_exit, args=(code,), daemon=True).start()
    sys.exit(code)


def _force_exit(code: int) -> None:
    time.sleep(EXIT_S)
    try:
        from pgworkd import log
        from pgworkd.core import events

        reason = f"exit hooks, threads or processes of the application did not end within {EXIT_S:g} s"
        log.tell(events.EXIT_FORCED, exit_code=code, reason=reason)
        output.drain()
    finally:
        os._exit(code)
