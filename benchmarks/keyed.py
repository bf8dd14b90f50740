"""The cost of keys and limits: the same jobs with and without them."""

from __future__ import annotations

from functools import partial

from pgworkd.bench.measure import Drain
from pgworkd.database import schema

from .bench import Bench, calm
from .drain import JOBS, drain, race, rates
from .measure import Bar, Line, interleave
from .pressure import executed_all
from .systems import PAYLOAD_SQL, filling, ours

KEYS = 100_000
BLOCKED = 100_000
DAEMONS, MAX_RUNNING = 4, 200
"""Of 100 slots each: with the limit, half of them have nothing to do."""

# Two jobs waiting for their retry hold the keys; behind them are blocked jobs, as claims leave them.
_BLOCKED_SQL = f"""
    INSERT INTO pgworkd.jobs (queue, payload, serialize_key, status, run_at)
    SELECT 'bench', {PAYLOAD_SQL}, 'key-' || i, 'failed', clock_timestamp() + interval '1 day'
    FROM generate_series(0, 1) AS i;
    INSERT INTO pgworkd.jobs (queue, payload, serialize_key, status)
    SELECT 'bench', {PAYLOAD_SQL}, 'key-' || i %% 2, 'blocked' FROM generate_series(1, %d) AS i;
    INSERT INTO pgworkd.jobs (queue, payload) SELECT 'bench', {PAYLOAD_SQL} FROM generate_series(1, %d) AS i"""  # noqa: S608


async def keyed_row(bench: Bench) -> list[Line]:
    """Keys of both sorts, jobs blocked behind a busy key, and a limit over four daemons."""
    return [*await _keys(bench), await _blocked(bench), await _limited(bench)]


async def _keys(bench: Bench) -> list[Line]:
    jobs = bench.jobs(KEYS)
    bench.say(f"keyed: {jobs:,} jobs with a key each and without")
    dedupe = filling("'bench'", columns=", dedupe_key", values=", 'key-' || i")
    serialize = filling("'bench'", columns=", serialize_key", values=", 'key-' || i")
    found = await interleave(
        {
            "plain": partial(drain, bench, ours(), jobs),
            "dedupe_key": partial(drain, bench, ours("dedupe", insert=dedupe), jobs),
            "serialize_key": partial(drain, bench, ours("serialize", insert=serialize), jobs),
        },
        bench.rounds,
        bench.say,
    )
    line = partial(Line, "keyed", unit="jobs/s", reference=rates(found["plain"]), against="no keys")
    return [
        line(what="a dedupe_key on each job", ours=rates(found["dedupe_key"])),
        line(what=f"{jobs:,} distinct serialize_keys", ours=rates(found["serialize_key"]), bar=Bar("at least", 0.5)),
    ]


async def _blocked(bench: Bench) -> Line:
    free, blocked = bench.jobs(JOBS), bench.jobs(BLOCKED)
    bench.say(f"keyed: {free:,} jobs beside {blocked:,} that are blocked behind two keys")
    found = await interleave(
        {"beside": partial(_beside, bench, free, blocked), "alone": partial(_beside, bench, free, 0)},
        bench.rounds,
        bench.say,
    )
    what = f"{free:,} beside {blocked:,} blocked behind two keys"
    return Line("keyed", what, "jobs/s", rates(found["beside"]), rates(found["alone"]), "alone", Bar("at least", 0.7))


async def _beside(bench: Bench, free: int, blocked: int) -> Drain:
    fill = partial(executed_all, schema.text(), _BLOCKED_SQL % (blocked, free), "VACUUM ANALYZE pgworkd.jobs")
    template = bench.template(f"blocked_{blocked}")
    await bench.server.template(template, fill)
    async with bench.server.database(template) as dsn, bench.server.connected(dsn) as connection:
        await calm(connection, "pgworkd.jobs")
        return await race(bench, ours(), dsn, connection, loaded=free + blocked + 2, end=free)


async def _limited(bench: Bench) -> Line:
    jobs = bench.jobs(KEYS)
    bench.say(f"keyed: {jobs:,} jobs, {DAEMONS} daemons, max_running {MAX_RUNNING} and no limit")
    more = f"INSERT INTO pgworkd.queues (name, max_running) VALUES ('bench', {MAX_RUNNING})"  # noqa: S608 - a number
    found = await interleave(
        {
            "limited": partial(drain, bench, ours("limited", more=more), jobs, workers=DAEMONS),
            "free": partial(drain, bench, ours(), jobs, workers=DAEMONS),
        },
        bench.rounds,
        bench.say,
    )
    what, bar = f"max_running {MAX_RUNNING} over {DAEMONS} daemons", Bar("at least", 0.5)
    return Line("keyed", what, "jobs/s", rates(found["limited"]), rates(found["free"]), "no limit", bar)
