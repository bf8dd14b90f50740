"""What a claim and a settle cost the server: CPU of the backend that executes them, per job."""

from __future__ import annotations

import uuid
from pathlib import Path

from .bench import Bench
from .processes import BenchmarkError
from .systems import System

AT_ONCE = 500
CLAIM = f"SELECT * FROM pgworkd.claim($1, 'bench', {AT_ONCE}, p_token => $2) WHERE id IS NOT NULL"  # noqa: S608 - ours
SETTLE = "SELECT pgworkd.settle_completed($1, $2, $3, p_worker => $4, p_token => $5)"


async def claims_and_settles(bench: Bench, system: System, jobs: int) -> tuple[float, float]:
    """CPU of claims and of settles, each in microseconds per job: by one session, in turns, until no job is left."""
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as db:
        await system.load(bench, dsn, jobs)
        await db.execute("VACUUM ANALYZE pgworkd.jobs")
        cpu, token = Path(f"/proc/{db.get_server_pid()}/schedstat"), uuid.uuid4()
        worker = await db.fetchval("SELECT pgworkd.register('verbs', 1, '1', 3600, $1, '{bench}')", token)
        claim, settle = await db.prepare(CLAIM), await db.prepare(SETTLE)
        began, claim_s, settle_s, done = _cpu_s(cpu), 0.0, 0.0, 0
        while rows := await claim.fetch(worker, token):
            claimed = _cpu_s(cpu)
            ids, attempts = [row["id"] for row in rows], [row["attempt"] for row in rows]
            done += len(await settle.fetchval(ids, attempts, [None] * len(rows), worker, token))
            settled = _cpu_s(cpu)
            claim_s, settle_s, began = claim_s + claimed - began, settle_s + settled - claimed, settled
        if done != jobs:
            raise BenchmarkError(f"{done} of {jobs} jobs were settled")
        return claim_s / jobs * 1e6, settle_s / jobs * 1e6


def _cpu_s(schedstat: Path) -> float:
    return int(schedstat.read_text(encoding="ascii").split()[0]) / 1e9
