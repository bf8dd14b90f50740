"""The command bench: what this database and machine can do, measured in a scratch queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgworkd.cli.common import Dsn, Json, Yes, confirm, duration, hinted, operator, settings_of
from pgworkd.cli.output import as_json, note, out, table
from pgworkd.core.validation import counted
from pgworkd.errors import AccessRefused, DatabaseError, DatabaseUnavailable, UsageError
from pgworkd.process import stop_signals

if TYPE_CHECKING:
    from pgworkd.bench.calls import CallFigures, CallPlan
    from pgworkd.bench.measure import Times
    from pgworkd.bench.run import Plan
    from pgworkd.bench.scratch import ScratchOptions
    from pgworkd.bench.verdict import Figures
    from pgworkd.settings.config import Settings

RANGES = {"jobs": (100, 1_000_000), "seconds": (1, 50), "payload-bytes": (50, 1024 * 1024), "concurrency": (1, 1_000)}
"""The accepted values of each option, both ends included. The time of all phases is bounded, because a worker that is
up for long, and alone, disables the schedules that other daemons would declare."""
CONFIRM_ABOVE = 100_000
"""More jobs than this need a confirmation."""
BYTES_MAX = 1024**3
"""The most bytes of all payloads together."""
UNAUTHENTICATED = 401
CLIENT_BUSY = 0.9
"""A share of a core, above which this process may be what limits the calls of a gateway."""


def bench(
    *,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", help="Jobs to write, all phases together: 100 to 1,000,000.")
    ] = 20_000,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Create the jobs through this gateway, with PGWORKD_TOKEN."),
    ] = None,
    bulk: Annotated[bool, typer.Option("--bulk", help="With --url: many jobs to a call.")] = False,
    seconds: Annotated[float, duration("--seconds", text="Time limit of each phase: 1 to 50 s.")] = 30.0,
    payload_bytes: Annotated[
        int, typer.Option("--payload-bytes", metavar="N", help="Size of each payload: 50 to 1,048,576.")
    ] = 200,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", metavar="N", help="Slots of the worker: 1 to 1,000; with --url, calls at once: 1 to 20."
        ),
    ] = 10,
    clean: Annotated[
        bool, typer.Option("--clean", help="Only remove what runs that were killed have left; measure nothing.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> int:
    """Measure enqueue, drain and latency of your own database and machine, and say what limits them.

    It writes jobs to a scratch queue, runs them in this process, and removes them at the end, also after Ctrl-C.
    """
    _check(jobs, seconds, payload_bytes, concurrency)
    if url is not None:
        if clean or dsn is not None:
            raise UsageError("--url has neither --clean nor --dsn: pgworkd bench --clean needs the database itself")
        return _through_gateway(url, jobs, seconds, payload_bytes, concurrency, bulk=bulk, yes=yes, json=json)
    if bulk:
        raise UsageError("--bulk is for --url: without it, jobs are enqueued in both ways")
    import anyio

    from pgworkd.bench import scratch
    from pgworkd.bench.run import COMMAND_S_MAX, Plan
    from pgworkd.bench.scratch import ScratchOptions
    from pgworkd.cli.serve import has_uvloop, spare_collector

    settings = settings_of(dsn)
    timeouts = settings.connect_timeout_s, min(settings.command_timeout_s, COMMAND_S_MAX)
    options = ScratchOptions(settings.dsn_required(), *timeouts, by=operator(), queue=scratch.new_name())
    if clean:
        anyio.run(_clean, options, settings)
        return 0
    what = f"write {counted(jobs, 'job')} of {payload_bytes:,} bytes to {settings.database}"
    if jobs > CONFIRM_ABOVE:
        confirm(what, yes=yes)
    note(f"will {what}, in the queue {options.queue}, and remove them at the end; Ctrl-C ends it and does so at once")
    spare_collector()
    plan = Plan(jobs, seconds, payload_bytes, concurrency)
    found = stop_signals.run(_measure, plan, options, settings, backend_options={"use_uvloop": has_uvloop()})
    (_json if json else _table)(found)
    return 0


def _check(jobs: int, seconds: float, payload_bytes: int, concurrency: int) -> None:
    for name, value in zip(RANGES, (jobs, seconds, payload_bytes, concurrency), strict=True):
        low, high = RANGES[name]
        if not low <= value <= high:  # true of NaN, too
            raise UsageError(f"--{name} {value}: give a number from {low:,} to {high:,}")
    if jobs * payload_bytes > BYTES_MAX:
        raise UsageError(
            f"--jobs {jobs} with --payload-bytes {payload_bytes} would write more than 1 GiB: give --jobs of "
            f"{BYTES_MAX // payload_bytes} at most, or smaller payloads"
        )


def _through_gateway(
    url: str, jobs: int, seconds: float, payload_bytes: int, callers: int, *, bulk: bool, yes: bool, json: bool
) -> int:
    from pgworkd.bench import scratch
    from pgworkd.core.address import url_fault
    from pgworkd.settings.config import load

    try:
        from pgworkd.bench.calls import CALLERS_MAX, EXPIRE_S, CallPlan, CallRun
        from pgworkd.remote.client import GatewayAddress
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'pgworkd[remote]'") from None
    if fault := url_fault(url):
        raise UsageError(f"--url {fault}")
    if callers > CALLERS_MAX:
        raise UsageError(f"--concurrency {callers}: with --url, give a number from 1 to {CALLERS_MAX}")
    settings, queue = load(remote=url), scratch.new_name()
    for line in settings.notes:
        note(line)
    what = f"create {counted(jobs, 'job')} of {payload_bytes:,} bytes at {url}"
    if jobs > CONFIRM_ABOVE:
        confirm(what, yes=yes)
    note(f"will {what}, in the queue {queue}, where they expire within {EXPIRE_S / 60:g} min")
    token = settings.token.get_secret_value() if settings.token else ""  # a gateway may need none
    plan = CallPlan(jobs, seconds, payload_bytes, callers, bulk)
    run = CallRun(plan, GatewayAddress(url, token, settings.command_timeout_s), queue, note)
    try:
        found = stop_signals.run(run.run)
    except AccessRefused as error:
        if not token and error.status == UNAUTHENTICATED:
            raise AccessRefused(f"{error}: set PGWORKD_TOKEN to a token with enqueue:{scratch.PREFIX}*") from None
        raise
    _calls(found, plan, queue, as_text=not json)
    return 0


def _calls(found: CallFigures, plan: CallPlan, queue: str, *, as_text: bool) -> None:
    share, is_cut = found.client_s / found.seconds, found.jobs < plan.jobs
    if not as_text:
        return as_json(
            {
                "queue": queue,
                "jobs": found.jobs,
                "seconds": found.seconds,
                "jobs_per_s": found.rate,
                "complete": not is_cut,
                "calls": _spread(found.calls),
                "refused": [{"calls": calls, "error": error} for error, calls in found.refused.items()],
                "client_cores": share,
                "keeps_history": found.keeps_history,
            }
        )
    cut = ", cut by --seconds" if is_cut else ""
    refused = [("refused", f"{counted(calls, 'call')}: {error}") for error, calls in found.refused.items()]
    rows = [
        ("enqueue", f"{found.rate:,.0f} jobs/s ({counted(found.jobs, 'job')} in {found.seconds:.2f} s{cut})"),
        (f"a call of {counted(plan.chunk, 'job')}", f"{found.calls}, {plan.callers} at a time"),
        ("CPU of this process", _share(found.client_s, found.seconds)),
    ]
    table(("what", "result"), [*rows, *refused], whole=True)
    if share > CLIENT_BUSY:
        out("\nThis process was busy: it may be what limits the rate, not the gateway.")
    if found.keeps_history:
        note(f"the token lacks the scope operate for {queue}: expired jobs stay in the history as long as others do")
    return None


async def _measure(plan: Plan, options: ScratchOptions, settings: Settings) -> Figures:
    from pgworkd.bench.run import BenchRun

    try:
        return await BenchRun(plan, options, note).run()
    except (DatabaseUnavailable, DatabaseError, UsageError) as error:
        raise hinted(error, settings) from None


async def _clean(options: ScratchOptions, settings: Settings) -> None:
    from pgworkd.bench.scratch import remove_leftovers
    from pgworkd.database.connection import Connection

    connection = Connection(options, "clean")
    try:
        removed, alive = await remove_leftovers(connection)
    except (DatabaseUnavailable, DatabaseError, UsageError) as error:
        raise hinted(error, settings) from None
    finally:
        await connection.close()
    for name in alive:
        note(f"{name} is left: its run goes on, or was killed just now; try again in 15 s")
    out("\n".join(f"removed {name}" for name in removed) or "nothing to remove")


def _table(figures: Figures) -> None:
    from pgworkd.bench.verdict import judge

    bulk, drain, latency = figures.bulk, figures.drain, figures.latency
    cut = "" if figures.complete else ", cut by --seconds"
    server = f"{drain.server_us or 0.0:.1f} us per job, its busiest session {_share(figures.busiest_s, drain.seconds)}"
    table(
        ("what", "result"),
        [
            ("round trip", figures.round_trip),
            ("enqueue one by one", f"{figures.single} (p50 without fsync: {figures.unsynced.at(50):.2f} ms)"),
            ("enqueue in bulk", f"{bulk.rate:,.0f} jobs/s ({counted(bulk.jobs, 'job')} in {bulk.seconds:.2f} s)"),
            ("drain", f"{drain.rate:,.0f} jobs/s ({counted(drain.jobs, 'job')} in {drain.seconds:.2f} s{cut})"),
            ("worker CPU", f"{drain.worker_us:.1f} us per job, {_share(drain.worker_s, drain.seconds)}"),
            ("server CPU", "not visible from this host" if drain.server_us is None else server),
            ("insert to handler, idle", latency or "not measured: --seconds was too short for the backlog"),
        ],
        whole=True,
    )
    out(f"\n{judge(figures)[1]}")


def _share(cpu_s: float | None, seconds: float) -> str:
    return f"{(cpu_s or 0.0) / seconds:.0%} of a core"


def _json(figures: Figures) -> None:
    from pgworkd.bench.verdict import judge

    bulk, drain, (limit, sentence) = figures.bulk, figures.drain, judge(figures)
    as_json(
        {
            "round_trip": _spread(figures.round_trip),
            "enqueue_single": _spread(figures.single),
            "enqueue_single_without_fsync": _spread(figures.unsynced),
            "enqueue_bulk": {"jobs": bulk.jobs, "seconds": bulk.seconds, "jobs_per_s": bulk.rate},
            "drain": {
                "jobs": drain.jobs,
                "seconds": drain.seconds,
                "jobs_per_s": drain.rate,
                "complete": figures.complete,
                "worker_us_per_job": drain.worker_us,
                "server_us_per_job": drain.server_us,
            },
            "latency": figures.latency and _spread(figures.latency),
            "verdict": {"limit": limit, "sentence": sentence},
        }
    )


def _spread(waits: Times) -> dict[str, Any]:
    return {f"p{percent}_ms": waits.at(percent) for percent in (50, 95, 99)} | {"count": len(waits.all_ms)}
