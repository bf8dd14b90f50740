"""The command `pgworkd`: the doors to everything. Exit codes: 0 done or stopped as asked, 1 failed, 2 wrong usage.

cli_app    the commands together, and how errors are told
cli_run    run, migrate, dev, demo          cli_serve   a daemon as a process: signals, reload, exit code
                                            supervisor  several of them, as one
cli_autoscale  autoscale: so many of them as a queue needs
cli_jobs   enqueue, jobs, job
cli_acts   retry, cancel, discard, undepend, edit, audit         cli_bulk    the same on all jobs that match
cli_queues  queues (list, show, set, pause, resume)
cli_batches  batches (list, show, seal, cancel, delete)
cli_schedules  schedules (list, enable, disable, remove, run-now)
cli_look   workers, stats, config show                  cli_doctor   doctor
cli_ask    what commands share: settings, database, ids          cli_text    tables, JSON, escaping
"""

from __future__ import annotations

import sys

from pgworkd.cli import signals

_SERVICES = {"run", "dev", "autoscale"}


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    try:
        if _SERVICES.intersection(sys.argv[1:2]):
            signals.stand_by()
        from pgworkd.cli.app import app  # takes long enough to be hit by a signal

        app()
    except signals.StopAsked:
        sys.exit(0)


if __name__ == "__main__":
    main()
