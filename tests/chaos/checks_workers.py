"""Checks of daemons: when they exit, how soon they recover, and that their resource usage stays flat."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from pgworkd.engine.life.kill_timer import EXIT_CODE
from tests.chaos.evidence import Evidence
from tests.chaos.fleet import BEARABLE_S, RESCUE_S, TIMES
from tests.chaos.verdict import check, kept_away_s, situation

TAKEN_BACK_S_MAX = TIMES["lease_s"] + RESCUE_S + TIMES["poll_s"] + 2.0
RESUMED_S_MAX = 5.0
PROBED_S_MAX = 5.0
UNKNOWN_S_MAX = 15.0
WAITED_S_MAX = TIMES["poll_s"] + 1.0
KILLED_AT_LEASE_END = (-signal.SIGKILL, EXIT_CODE)
"""Exit codes of a daemon that its kill timer has ended: it was frozen, or had no CPU."""
LAST_WORDS = "daemon.aborted"
"""Logged by a daemon whose lease has expired while a handler ignores its cancellation."""
OF_A_JOB = re.compile(r'.*"event": "job\.(failed|dead|raised|lost)"').match
"""Events of expected handler errors, which are logged with a traceback."""
STEADY = {"memory_mb": 24, "files": 15, "threads": 25, "tasks": 130}
"""Allowed growth from a daemon's first seconds to its end: connection pools and threads fill up."""
TRANSACTIONS_MAX = 20
"""Connections for job.transaction(), by default."""


@check
def leases(evidence: Evidence) -> Iterable[str | None]:
    """A daemon loses its lease only if it was blocked for longer than its lease allows."""
    for note in evidence.of("daemon.ready", "lease.lost"):
        kept_s = kept_away_s(evidence, note.by)
        fine = note.event == "daemon.ready" or kept_s >= BEARABLE_S
        yield None if fine else f"{note.by} was away for {kept_s:.2f} s; {situation(evidence, note)}"


@check
def taken_back(evidence: Evidence) -> Iterable[str | None]:
    """Jobs of a dead daemon are rescued within lease + rescue + poll + 2 s, 99 % of the time."""
    times = [note.facts["after_s"] for note in evidence.of("taken_back")]
    late = [time_s for time_s in times if time_s > TAKEN_BACK_S_MAX]
    excess = len(late) > len(times) / 100
    yield from (f"after {time_s:.1f} s" if excess and time_s > TAKEN_BACK_S_MAX else None for time_s in times)


@check
def resumed(evidence: Evidence) -> Iterable[str | None]:
    """Jobs run again within 5 s of Postgres' recovery."""
    for note in evidence.of("resumed"):
        after_s = note.facts["after_s"]
        yield None if after_s <= RESUMED_S_MAX else f"{note.facts['fault']}: after {after_s:.1f} s"


@check
def waits(evidence: Evidence) -> Iterable[str | None]:
    """No due job waits beside an idle slot for longer than poll + 1 s."""
    for note in evidence.of("looked"):
        yield None if note.facts["waited_s"] <= WAITED_S_MAX else f"{note.facts}"


@check
def probed(evidence: Evidence) -> Iterable[str | None]:
    """A job that is due begins after no more than 5 s without a fault."""
    for note in evidence.of("probed"):
        for due, taken in pairwise(evidence.by_job[note.facts["job"]]):
            if due.became == "pending":
                waited_s = _calm_s(evidence, due.at_s + max(0.0, due.due_in_s), taken.at_s)
                yield None if waited_s <= PROBED_S_MAX else f"{note.facts}: {waited_s:.1f} s, attempt {taken.attempts}"


@check
def unknown(evidence: Evidence) -> Iterable[str | None]:
    """An attempt of a probe that never began goes back after no more than 15 s without a fault."""
    for note in evidence.of("probed"):
        for claimed, back in pairwise(evidence.by_job[note.facts["job"]]):
            if claimed.became == "running" and (claimed.job, claimed.attempts) not in evidence.run_of:
                kept_s = _calm_s(evidence, claimed.at_s, back.at_s)
                yield None if kept_s <= UNKNOWN_S_MAX else f"{note.facts}: {claimed.worker} had it for {kept_s:.1f} s"


def _calm_s(evidence: Evidence, since_s: float, until_s: float) -> float:
    """How much of that time was without a fault."""
    faults = [(fault.at_s, over.at_s) for fault, over in pairwise(evidence.of("fault", "fault_over"))][::2]
    return until_s - since_s - sum(max(0.0, min(end_s, until_s) - max(at_s, since_s)) for at_s, end_s in faults)


@check
def ends(evidence: Evidence) -> Iterable[str | None]:
    """A daemon exits in time when stopped, at the end of the run with 0; by itself only after its lease expired."""
    told = {note.facts["name"] for note in evidence.of("killed", "terminated")}
    gently = {note.facts["name"] for note in evidence.of("terminated") if note.facts["signals"] == 1} - {
        note.facts["name"] for note in evidence.of("killed")
    }
    fell = {note.by for note in evidence.of("dies", "lease.fenced")}
    fell |= {name for name, text in evidence.logs.items() if LAST_WORDS in text}  # its loop may not have run again
    left = {note.by: f": {note.facts['reason']}" for note in evidence.of("shutdown.incomplete")}
    for note in evidence.of("exit"):
        name, code, expected = note.facts["name"], note.facts["code"], note.facts["expected"]
        if expected is not None:
            yield None if code == expected else f"{name} ended with {code}, not {expected}{left.get(name, '')}"
        elif name in gently:
            yield None if code == 0 else f"{name} was told to end, and ended with {code}{left.get(name, '')}"
        elif code in KILLED_AT_LEASE_END and kept_away_s(evidence, name) >= BEARABLE_S:
            yield None
        else:
            yield None if name in told | fell else f"{name} ended by itself, with {code}"
    yield from (f"{note.facts['name']} did not end" for note in evidence.of("hangs"))


@check
def gateways(evidence: Evidence) -> Iterable[str | None]:
    """A gateway ends only when it is killed or told to, and then with 0."""
    fell = {note.facts["name"] for note in evidence.of("gateway_killed")} | {note.by for note in evidence.of("dies")}
    for note in evidence.of("gateway_exit"):
        name, code, expected = note.facts["name"], note.facts["code"], note.facts["expected"]
        fine = code == expected if expected is not None else name in fell and code == -9
        yield None if fine else f"{name} ended with {code}, not {expected}"


@check
def steady(evidence: Evidence) -> Iterable[str | None]:
    """Memory, open files, threads and tasks of a daemon stay flat."""
    beats = defaultdict(list)
    slots, processes = (sum(note.facts[name] for note in evidence.of("application")) for name in ("slots", "processes"))
    more_of = {
        "memory_mb": slots,
        "files": 4 * processes + min(slots, TRANSACTIONS_MAX),
        "threads": slots,
        "tasks": 4 * slots,
    }
    ready = {note.by: note.at_s for note in reversed(evidence.of("daemon.ready"))}
    for note in evidence.of("beat"):
        if note.at_s >= ready.get(note.by, 0.0):  # before, while there is no database, it has hardly anything
            beats[note.by].append(note.facts)
    for name, taken in beats.items():
        if len(taken) >= 20:
            for what, more in STEADY.items():
                # The lowest at the end: what is left behind is in each beat, pipes to a handler's children are not.
                first, last = sorted(beat[what] for beat in taken[2:7])[2], min(beat[what] for beat in taken[-5:])
                yield None if last <= first + more + more_of[what] else f"{name}: {what} from {first} to {last}"


@check
def quiet(evidence: Evidence) -> Iterable[str | None]:
    """No unexpected traceback, no rejected outcome, no failed maintenance."""
    for name, text in evidence.logs.items():
        wrong = [
            line for line in text.splitlines() if "Traceback (most recent call last)" in line and not OF_A_JOB(line)
        ]
        yield f"{name}: {wrong[0][:2000]}; {text[-1000:]}" if wrong else None
    yield from (f"{note}" for note in evidence.of("outcome.rejected", "maintenance.failed", "hook.failed"))
