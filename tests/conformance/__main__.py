"""`python -m tests.conformance [--only NAME] -- COMMAND`: the checks, one after the other; exit code 1 if one fails."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence

from pgworkd.database import schema
from tests.conformance.checks import CHECKS, Check
from tests.conformance.field import Field, fields
from tests.kits.server import create_database, create_template, start_test_server

CHECK_S = 120.0


async def passes(check: Check, field: Field) -> bool:
    """Plays one check, and prints what came of it."""
    began, title = time.monotonic(), check.__doc__ or check.__name__
    fault: str | None = None
    try:
        async with asyncio.timeout(CHECK_S):
            await check(field)
    except AssertionError as error:
        fault = str(error) or "it does not"
    except TimeoutError:
        fault = f"not within {CHECK_S:g} s"
    finally:
        said = field.reset()
    print(f"{'ok  ' if fault is None else 'FAIL'}  {title}  ({time.monotonic() - began:.1f} s)", flush=True)
    if fault is not None:
        print(f"      {check.__name__}: {fault}\n      the worker printed: {said or 'nothing'}", flush=True)
    return fault is None


async def play(command: Sequence[str], only: Sequence[str] = ()) -> int:
    """Plays all checks, or those of these names; how many fail."""
    server = start_test_server()
    failed = 0
    try:
        await create_template(server.dsn(), schema.text())
        async with fields(await create_database(server.dsn(), "conformance")) as make:
            for check in CHECKS:
                if not only or check.__name__ in only:
                    failed += not await passes(check, make(command))
    finally:
        server.stop()
    return failed


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a check (repeatable)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the worker, after --")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does: the workers are ended
    failed = asyncio.run(play(given.command, given.only))
    count = len(given.only) or len(CHECKS)
    print(f"{count - failed} of {count} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
