"""Helpers for tests of the commands on jobs."""

from __future__ import annotations

import getpass
import socket

from tests.engine.test_cli import Shell
from tests.engine.test_cli_fleet import WORKER

ME = f"{getpass.getuser()}@{socket.gethostname()}"


def enqueue(shell: Shell, queue: str = "q", *args: str) -> str:
    return shell("enqueue", queue, *args).stdout.strip()


def run(shell: Shell, *ids: str) -> None:
    """Lets a worker claim these jobs."""
    worker = shell.sql(WORKER, "w", "1 min")
    for job_id in ids:
        shell.sql(
            "UPDATE pgworkd.jobs SET status = 'running', attempts = 1, worker_id = %s WHERE id = %s", worker, job_id
        )


def many(shell: Shell, count: int, status: str = "pending", queue: str = "q") -> None:
    shell.sql(
        "INSERT INTO pgworkd.jobs (queue, status, failed_at) SELECT %s, %s, now() FROM generate_series(1, %s)",
        *(queue, status, count),
    )


def count(shell: Shell, status: str) -> int:
    return int(shell.sql("SELECT count(*) FROM pgworkd.all_jobs WHERE status::text = %s", status))
