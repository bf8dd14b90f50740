"""python -m tests.sweeps: runs situations of arrivals, or --sizes, drawn from a seed, until the time is up.

A failure prints the situation, which `--only` runs again. Exit code 1 on any failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from pgworkd.database import schema
from tests.kits.server import create_database, create_template, drop_database, start_test_server

from . import arrivals, sizes


async def sweep(kind: ModuleType, dsn: str, minutes: float, seed: int, only: str | None) -> int:
    """Runs situations until the time is up; returns the number of violations."""
    rng, ends, played, failed = random.Random(seed), time.monotonic() + 60 * minutes, 0, 0  # noqa: S311 - repeatable
    while time.monotonic() < ends and (only is None or not played):
        s = kind.Situation(**json.loads(only)) if only else kind.draw(rng)
        name = f"situation_{played}"
        found = await kind.play(s, await create_database(dsn, name))
        await drop_database(dsn, name)
        played += 1
        if found:
            failed += 1
            print(f"FAILED --only '{json.dumps(asdict(s))}': {'; '.join(found)}", flush=True)  # noqa: T201
    print(f"{played} situations, {failed} failed (seed {seed})")  # noqa: T201
    return failed


def main() -> int:
    """Exit code 1 on any violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", action="store_true", help="sizes of payloads and results instead of arrivals")
    parser.add_argument("--only", default=None, help="the one situation that a failure has printed")
    parser.add_argument("--pg-bin", type=Path, default=None)
    options = parser.parse_args()
    server = start_test_server(options.pg_bin)
    try:
        asyncio.run(create_template(server.dsn(), schema.text()))
        kind = sizes if options.sizes else arrivals
        return 1 if asyncio.run(sweep(kind, server.dsn(), options.minutes, options.seed, options.only)) else 0
    finally:
        server.stop("immediate")


if __name__ == "__main__":
    sys.exit(main())
