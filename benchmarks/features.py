"""What each feature costs: the rate of a drain in which every job uses it, beside a drain of plain jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from pgworkd.bench.measure import Drain

from .batches import batched
from .bench import Bench, calm, daemon
from .drain import JOBS, drain, race, rates
from .gateway import serving
from .measure import Line, Rates, interleave, middle
from .push import delivered
from .scrape import free_port, scraped
from .systems import PAYLOAD_SQL, System, filling, ours

KEYS = 1_000
PLAIN = "plain"
_TENANTS = filling("'bench'", columns=", limit_key", values=f", 'key-' || i % {KEYS}")
# Half of the jobs wait for one job of the other half each, as depend() leaves them.
_DEPEND = f"""
    WITH pairs AS MATERIALIZED (
        SELECT i, pgworkd.new_id() AS before, pgworkd.new_id() AS after FROM generate_series(1, $1::int / 2) AS i
    ), jobs AS (
        INSERT INTO pgworkd.jobs (id, queue, payload, status, waiting_on)
        SELECT before, 'bench', {PAYLOAD_SQL}, 'pending'::pgworkd.job_status, 0 FROM pairs
        UNION ALL SELECT after, 'bench', {PAYLOAD_SQL}, 'blocked', 1 FROM pairs)
    INSERT INTO pgworkd.job_dependencies (job_id, depends_on) SELECT after, before FROM pairs"""  # noqa: S608 - ours
_AWAITED = f"""
    WITH jobs AS ({filling("'bench'")} RETURNING id)
    INSERT INTO pgworkd.result_waiters (job_id, until, channel)
    SELECT id, clock_timestamp() + interval '1 hour', 'pgworkd_results' FROM jobs"""  # noqa: S608 - ours
Drained = Callable[[], Awaitable[Drain]]


def _queue(columns: str, values: str) -> str:
    return f"INSERT INTO pgworkd.queues (name, {columns}) VALUES ('bench', {values})"  # noqa: S608 - ours


def _systems() -> dict[str, System]:
    """Workers and their jobs by feature. No limit is ever reached: what is measured is that it is counted."""
    own_key = ", 'key-' || i"
    return {
        PLAIN: ours(),
        "a dedupe_key each": ours(insert=filling("'bench'", columns=", dedupe_key", values=own_key)),
        "a serialize_key each": ours(insert=filling("'bench'", columns=", serialize_key", values=own_key)),
        "max_running": ours(more=_queue("max_running", "1000000")),
        f"limit_per_key, {KEYS:,} keys": ours(insert=_TENANTS, more=_queue("limit_per_key", "1000000")),
        "rate": ours(more=_queue("rate, rate_period_s", "1000000, 1")),
        f"rate_per_key, {KEYS:,} keys": ours(
            insert=_TENANTS, more=_queue("rate_per_key, rate_per_key_period_s", "1000000, 1")
        ),
        f"fair, {KEYS:,} keys": ours(insert=_TENANTS, more=_queue("fair", "true")),
        "one batch": batched(),
        "half wait for the other half": ours(insert=_DEPEND),
        "results waited for": ours(insert=_AWAITED),
        "traces": replace(ours(), command=daemon("bench=100", module="benchmarks.spans")),
    }


async def features_row(bench: Bench) -> list[Line]:
    """Each feature beside plain jobs; metrics scraped each second; through a gateway; pushed to a service."""
    jobs, took_ms = bench.jobs(JOBS), list[float]()
    bench.say(f"features: {jobs:,} jobs with each, and plain ones")
    contenders: dict[str, Drained] = {name: partial(drain, bench, system, jobs) for name, system in _systems().items()}
    contenders["metrics, scraped each second"] = partial(_scraped, bench, jobs, took_ms)
    contenders["run --remote"] = partial(_remote, bench, jobs)
    found = {name: rates(each) for name, each in (await interleave(contenders, bench.rounds, bench.say)).items()}
    pushed = {"push": partial(delivered, bench, bench.jobs(JOBS // 5))}
    found |= await interleave(pushed, bench.rounds, bench.say)
    plain = found[PLAIN]
    shares = {name: [each / middle(plain) for each in samples] for name, samples in found.items()}
    bench.rates.append(Rates("a drain in which each job uses a feature", "of plain jobs", dict(shares)))
    return [Line("features", name, "jobs/s", each, plain, PLAIN) for name, each in found.items() if each is not plain]


async def _scraped(bench: Bench, jobs: int, took_ms: list[float]) -> Drain:
    port = free_port()
    system = replace(ours(), command=[*daemon("bench=100"), f"--metrics-listen=127.0.0.1:{port}"])
    async with scraped(port, took_ms):
        return await drain(bench, system, jobs)


async def _remote(bench: Bench, jobs: int) -> Drain:
    system = ours()
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await system.load(bench, dsn, jobs)
        await calm(connection, system.table)
        async with serving(bench, dsn) as (url, token, _):
            command = [*daemon("bench=100"), "--remote", url]
            remote = replace(system, command=command, environ={"PGWORKD_TOKEN": token})
            return await race(bench, remote, "", connection, loaded=jobs)
