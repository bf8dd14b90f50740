"""The entry of `pgworkd bench`: settings, what it will write, the run, the output, the exit code."""

from __future__ import annotations

from functools import partial

import anyio

from pgworkd.bench import scratch, show
from pgworkd.bench.figures import Figures
from pgworkd.bench.phases import Plan
from pgworkd.bench.scratch import ScratchOptions
from pgworkd.bench.session import COMMAND_S_MAX, BenchSession, Console
from pgworkd.bench.verdict import judge
from pgworkd.cli.common import confirm, hinted, operator, settings_of
from pgworkd.cli.output import note, out
from pgworkd.cli.serve import has_uvloop, spare_collector
from pgworkd.core.validation import counted
from pgworkd.database.connection import Connection
from pgworkd.errors import DatabaseError, DatabaseUnavailable, UsageError
from pgworkd.settings.config import Settings

CONFIRM_ABOVE = 100_000
"""More jobs than this need a confirmation."""
BYTES_MAX = 1024**3
"""Maximum size of all payloads together."""


def main(plan: Plan, dsn: str | None, *, yes: bool, json: bool) -> int:
    """Measures, prints the results, and removes all that it has written; the exit code. Raises PgworkdError."""
    if plan.jobs * plan.payload_bytes > BYTES_MAX:
        most = BYTES_MAX // plan.payload_bytes
        raise UsageError(
            f"--jobs {plan.jobs} with --payload-bytes {plan.payload_bytes} would write more than 1 GiB: give --jobs of "
            f"{most} at most, or smaller payloads"
        )
    settings = settings_of(dsn)
    options = _options(settings, scratch.new_name())
    what = f"write {counted(plan.jobs, 'job')} of {plan.payload_bytes:,} bytes to {settings.dsn_redacted}"
    if plan.jobs > CONFIRM_ABOVE:
        confirm(what, yes=yes)
    note(f"will {what}, in the queue {options.queue}, and remove them at the end; Ctrl-C ends it and does so at once")
    spare_collector()
    with show.progress() as shown:
        run = partial(_run, plan, options, settings, Console(note, shown))
        figures = anyio.run(run, backend_options={"use_uvloop": has_uvloop()})
    (show.json_of if json else show.table_of)(figures, judge(figures))
    return 0


def clean(dsn: str | None) -> int:
    """Removes what dead runs have left, and nothing else; the exit code. Raises PgworkdError."""
    settings = settings_of(dsn)
    removed = anyio.run(_clean, settings)
    for name in removed:
        out(f"removed {name}")
    if not removed:
        out("nothing to remove")
    return 0


def _options(settings: Settings, queue: str) -> ScratchOptions:
    limit_s = min(settings.command_timeout_s, COMMAND_S_MAX)
    return ScratchOptions(settings.dsn_required(), settings.connect_timeout_s, limit_s, by=operator(), queue=queue)


async def _run(plan: Plan, options: ScratchOptions, settings: Settings, console: Console) -> Figures:
    try:
        return await BenchSession(plan, options, console).run()
    except (DatabaseUnavailable, DatabaseError, UsageError) as error:
        raise hinted(error, settings) from None


async def _clean(settings: Settings) -> list[str]:
    connection = Connection(_options(settings, "bench"), "clean")
    try:
        return await scratch.remove_leftovers(connection, note)
    except (DatabaseUnavailable, DatabaseError, UsageError) as error:
        raise hinted(error, settings) from None
    finally:
        await connection.close()
