"""The operations that must survive a cut before any of their messages, and the command that checks it:

python -m tests.chaos.wire [--pg-bin=DIR]      # a table; exit code 1 if there is a violation
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from pgworkd.database import schema
from tests.chaos import (
    wire_client,
    wire_daemon,
    wire_engine,
    wire_operators,
    wire_push,
    wire_remote,
    wire_routes,
    wire_settle,
    wire_signals,
    wire_workers,
)
from tests.chaos.wire_kit import HEAD, Figures, Operation, sweep
from tests.kits.server import create_database, create_template, start_test_server

OPERATIONS: list[type[Operation]] = [
    wire_client.Enqueue,
    wire_client.EnqueueInTransaction,
    wire_client.EnqueueOnPool,
    wire_client.EnqueueMany,
    wire_client.EnqueueByPsycopg,
    wire_client.EnqueueByAdmin,
    wire_engine.Claim,
    wire_engine.ClaimOfLost,
    wire_engine.Renewals,
    wire_settle.SettleCold,
    wire_settle.Settle,
    wire_settle.Fail,
    wire_settle.Die,
    wire_settle.Release,
    wire_settle.Cancel,
    wire_settle.SettleOccurrence,
    wire_engine.RestoreSchedule,
    wire_engine.Rescue,
    wire_daemon.OneJob,
    wire_daemon.Transaction,
    wire_daemon.OneTransaction,
    wire_signals.CountDeaths,
    wire_signals.Append,
    wire_signals.Sample,
    wire_remote.RemoteClaim,
    wire_remote.RemoteComplete,
    wire_remote.RemoteCompleteOwn,
    wire_remote.RemoteFail,
    wire_remote.RemoteRelease,
    wire_remote.RemoteBeat,
    wire_remote.RemoteExtend,
    wire_remote.RemoteAbandon,
    *wire_routes.ROUTES,
    *wire_operators.ROUTES,
    *wire_workers.ROUTES,
    *wire_push.OPERATIONS,
    wire_client.Migrate,
]


async def _tell(server_dsn: str) -> int:
    await create_template(server_dsn, schema.text())
    print(HEAD)  # noqa: T201
    total = Figures("in all")
    for number, operation in enumerate(OPERATIONS):
        figures = await sweep(operation, await create_database(server_dsn, f"wire_{number}"))
        print(figures.row, *figures.violations, sep="\n    ", flush=True)  # noqa: T201
        total.cuts += figures.cuts
        total.told += figures.told
        total.violations += figures.violations
    print(total.row)  # noqa: T201
    return 1 if total.violations else 0


def main() -> int:
    """Sweeps all operations on a server of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.wire")
    parser.add_argument("--pg-bin", type=Path, default=None, help="run on the Postgres in this bin directory")
    server = start_test_server(parser.parse_args().pg_bin)
    try:
        return asyncio.run(_tell(server.dsn()))
    finally:
        server.stop("immediate")


if __name__ == "__main__":
    sys.exit(main())
