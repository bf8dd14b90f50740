"""Jobs that run in the transactions that claim them, beside the ordinary way.

    python -m benchmarks.one_transaction     (the database is PGWORKD_BENCH_DSN's)

That is the ordinary way one at a time, as the reference: one loop that claims a job, commits, runs it, completes it,
commits. A daemon's ordinary way claims and completes many at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

import uvloop

from pgworkd.core.claims import ClaimOrder
from pgworkd.core.fence import Fence, Settlement
from pgworkd.core.job import DONE
from pgworkd.core.payload import decode
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.store import Store

from .bare import DSN
from .bench import Bench
from .drain import drain, rates
from .measure import Line, interleave
from .systems import System, filling, ours
from .tally import Tally, from_environment

JOBS = 1_000
_AGED = "ALTER TABLE pgworkd.workers ALTER COLUMN started_at SET DEFAULT pgworkd.clock() - interval '1 h'"
"""Workers younger than their lease claim first."""


def _own(slots: int) -> System:
    return ours(f"transaction=True, slots {slots}", queue="own", slots=slots, more=_AGED)


def _one_by_one() -> System:
    command = [sys.executable, "-m", "benchmarks.one_transaction"]
    return replace(ours("one at a time", insert=filling("'bench'")), command=command, ours=False)


async def transaction_row(bench: Bench) -> list[Line]:
    """One slot beside the ordinary way one at a time; ten slots beside ten of the ordinary way."""
    jobs = bench.jobs(JOBS)
    bench.say(f"transaction: {jobs:,} jobs in one transaction each, and in the ordinary way")
    systems = {"one": _own(1), "by one": _one_by_one(), "ten": _own(10), "ordinary": ours(slots=10)}
    contenders = {name: partial(drain, bench, system, jobs) for name, system in systems.items()}
    found = {name: rates(each) for name, each in (await interleave(contenders, bench.rounds, bench.say)).items()}
    return [
        Line("transaction", "no-op, 1 slot", "jobs/s", found["one"], found["by one"], "claim, run, complete by one"),
        Line("transaction", "no-op, 10 slots", "jobs/s", found["ten"], found["ordinary"], "the ordinary way, 10 slots"),
    ]


async def one_by_one(dsn: str, tally: Tally) -> None:
    """Claims, runs and completes one job after the other, each call a transaction of its own, until killed."""
    store = Store(ConnectionOptions(dsn))
    worker = await store.register("one by one", os.getpid(), "", 3600, ["bench"])
    while True:
        for row in await store.claim(ClaimOrder(worker, "bench", 1)):
            decode(row.payload or "")
            tally.called()
            await store.settle(DONE.ending, [Settlement(Fence.of(row.id, row.attempt, worker), DONE)])


if __name__ == "__main__":
    uvloop.run(one_by_one(os.environ[DSN], from_environment()))
