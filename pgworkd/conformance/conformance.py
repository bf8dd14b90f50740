"""The conformance program: plays what happens in the field to a worker, one check after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio

from pgworkd.conformance.checks import CHECKS, Check, registers
from pgworkd.conformance.trial import Trial, Unmet, trials
from pgworkd.core.validation import closest
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.embedded import EmbeddedPostgres
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process import stop_signals

CHECK_S = 120.0
"""The time limit of a check."""
Say = Callable[[str], None]


def main(command: Sequence[str], only: Sequence[str], say: Say) -> int:
    """Plays all checks, or those of these names, before a worker that this command starts; 1 if one fails, else 0.

    `say` prints a line. Raises UsageError for a name that no check has, PgworkdError if Postgres or the gateway does
    not start.
    """
    chosen = [check for check in CHECKS if not only or check.__name__ in only]
    names = [check.__name__ for check in CHECKS]
    for name in only:
        if name not in names:
            found = closest(name, names)
            hint = f"did you mean {found}?" if found else f"there are: {', '.join(names)}"
            raise UsageError(f"--only {name}: there is no such check; {hint}")
    with EmbeddedPostgres() as server:
        return 0 if stop_signals.run(_until_stopped, ConnectionOptions(server.dsn()), command, chosen, say) else 1


async def _until_stopped(options: ConnectionOptions, command: Sequence[str], checks: Sequence[Check], say: Say) -> bool:
    """Plays these checks; a stop signal ends them, and the workers: it is not raised while one is being started."""
    passed, failure = False, None
    with stop_signals.received() as signals:
        async with anyio.create_task_group() as tasks:

            async def heed() -> None:
                await anext(signals)
                tasks.cancel_scope.cancel()

            tasks.start_soon(heed)
            try:
                passed = await play(options, command, checks, say)
            except PgworkdError as error:
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return passed


async def play(options: ConnectionOptions, command: Sequence[str], checks: Sequence[Check], say: Say) -> bool:
    """Plays these checks on an empty database; whether all pass. A worker that does not register is not tried on."""
    await schema.migrate(options)
    passed = played = 0
    try:
        async with trials(options) as make:
            for check in checks:
                passes = await _passes(check, make(command), say)
                passed, played = passed + passes, played + 1
                if not passes and check is registers:
                    break
    finally:
        left = f"; {len(checks) - played} were not played" if played < len(checks) else ""
        say(f"{passed} of {len(checks)} checks passed{left}")
    return passed == len(checks)


async def _passes(check: Check, trial: Trial, say: Say) -> bool:
    began, fault = time.monotonic(), None
    try:
        with anyio.fail_after(CHECK_S):
            await check(trial)
    except Unmet as error:
        fault = str(error)
    except TimeoutError:
        fault = f"not within {CHECK_S:g} s"
    finally:
        with anyio.CancelScope(shield=True):
            said = await trial.reset()
    say(f"{'ok  ' if fault is None else 'FAIL'}  {check.__doc__}  ({time.monotonic() - began:.1f} s)")
    if fault is not None:
        say(f"      {check.__name__}: {fault}")
        say(f"      the worker printed: {said or 'nothing'}")
    return fault is None
