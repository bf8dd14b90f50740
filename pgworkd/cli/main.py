"""The entry point of the command `pgworkd`."""

from __future__ import annotations

import sys

from pgworkd.cli import stop_signals

_SERVICES = {"run", "push", "serve", "dev", "autoscale"}


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    try:
        if _SERVICES.intersection(sys.argv[1:2]):
            stop_signals.stand_by()
        from pgworkd.cli.app import app  # takes long enough to be hit by a signal

        app()
    except stop_signals.StopAsked:
        sys.exit(0)
