"""A daemon whose jobs die, with alerts, in its own process: python -m tests.kits.dying DSN."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import asyncpg

from pgworkd import App, PermanentError
from pgworkd.alerts.alert import Alert
from pgworkd.alerts.digest import Digest
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.engine.life.kill_timer import KillTimer
from tests.kits.daemon import quick_options

QUEUES = ("mail", "bills", "search", "images")
CAUSES = {
    "refused": "connection to 10.0.0.{n} refused",
    "user": "no such user 'u{n}'",
    "path": "could not read /srv/files/{n}/data",
}
"""Each in each queue makes twelve groups."""
SENT = "CREATE TABLE sent (job_group bigint, reason text)"
LEASE = {"lease_s": 1.5, "heartbeat_s": 0.2}


def app_of(dsn: str) -> App:
    """The app: jobs die of the cause in their payload; each alert becomes a row of `sent`."""
    app = App()

    async def dies(payload: dict[str, Any]) -> None:
        await asyncio.sleep(0.2)
        raise PermanentError(CAUSES[payload["cause"]].format(n=payload["n"] % 250))

    async def to(alert: Alert) -> None:
        connection = await asyncpg.connect(dsn)
        try:
            rows = [(error.group, error.reason) for error in alert.errors]
            await connection.executemany("INSERT INTO sent VALUES ($1, $2)", rows)
        finally:
            await connection.close()

    async def nowhere(_: Digest) -> None:
        return None

    for queue in QUEUES:
        app.handler(queue, concurrency=20, max_attempts=3)(dies)
    app.alert(to=to, cooldown_s=1, bundle_s=1)
    app.digest(every="0 8 1 1 *", to=nowhere)
    return app


@contextlib.contextmanager
def dying_daemon(dsn: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts one; it is killed at the end if it is still alive."""
    process = subprocess.Popen([sys.executable, "-m", "tests.kits.dying", dsn], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def main(dsn: str) -> int:
    """Runs the daemon until SIGTERM."""
    options = quick_options(dsn, worker_name=f"w-{os.getpid()}", **LEASE)
    daemon = Daemon(app_of(dsn), options, end_process=end_process, kill_timer=KillTimer.made())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.request_stop)
    return await daemon.run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
