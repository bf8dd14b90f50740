"""`python -m tests.simulation`: runs many schedules of every invariant, or replays one with its trace."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from .invariants import INVARIANTS, Failure, Tally, check

BLOCK = 50
SHOWN_MAX = 5


def say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


def play_block(first_seed: int, name: str, count: int) -> tuple[str, Tally]:
    """Runs `count` schedules, starting with that seed."""
    tally, began = Tally(schedules=count), time.perf_counter()
    for seed in range(first_seed, first_seed + count):
        played = check(name, seed)
        if isinstance(played, Failure):
            tally.failures += (played,)
        else:
            tally.steps += played.steps
            tally.virtual_s += played.virtual_s
    tally.seconds = time.perf_counter() - began
    return name, tally


def play_all(names: list[str], schedules: int, processes: int) -> bool:
    """Prints the table; True if everything held."""
    began = time.perf_counter()
    first_of = {INVARIANTS[name].kind: name for name in reversed(names)}
    tallies = {name: Tally() for name in first_of.values()}
    blocks = [(first, name) for name in tallies for first in range(0, schedules, BLOCK)]
    with ProcessPoolExecutor(processes) as pool:
        waits = [pool.submit(play_block, first, name, min(BLOCK, schedules - first)) for first, name in blocks]
        for wait in waits:
            name, tally = wait.result()
            tallies[name].add(tally)
    row = "{:15} {:>9} {:>11} {:>13} {:>8} {:>8}".format
    say(row("invariant", "schedules", "steps", "virtual hours", "seconds", "failures"))
    for name in names:
        first = first_of[INVARIANTS[name].kind]
        tally = tallies[first]
        of = (tally.steps, f"{tally.virtual_s / 3600:.2f}", f"{tally.seconds:.1f}", len(tally.failures))
        say(row(name, tally.schedules, *(of if name == first else (f"of {first}", "", "", ""))))
    failures = [failure for tally in tallies.values() for failure in tally.failures]
    total = sum(tally.schedules for tally in tallies.values())
    say(f"{total} schedules in {time.perf_counter() - began:.1f} s with {processes} processes, {len(failures)} failed")
    for failure in failures[:SHOWN_MAX]:
        say(f"{failure.said}\n  replay: {failure.replay}")
    return not failures


def replay(name: str, seed: int) -> bool:
    """Prints the trace of one schedule and its result; True if everything held."""
    say(f"{name}: {INVARIANTS[name].says}")
    played = check(name, seed, keeps_trace=True)
    if isinstance(played, Failure):
        say(played.trace, played.said, f"replay: {played.replay}")
        return False
    say(*played.trace)
    say(f"held; {played.steps} steps, trace {played.trace_hash}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--invariant", choices=list(INVARIANTS), help="only this one")
    parser.add_argument("--seed", type=int, help="play only the schedule of this seed, and print its trace")
    parser.add_argument("--schedules", type=int, default=2_000, help="per invariant (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="(default: one per core)")
    asked = parser.parse_args()
    names = [asked.invariant] if asked.invariant else list(INVARIANTS)
    if asked.seed is not None:
        held = [replay(name, asked.seed) for name in names]
        return 0 if all(held) else 1
    return 0 if play_all(names, asked.schedules, asked.processes) else 1


if __name__ == "__main__":
    sys.exit(main())
