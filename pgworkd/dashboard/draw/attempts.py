"""What a job has lived through, to scale: a lane for each attempt, and in it what came before it, and its run.

Nothing is guessed. Each piece is between two instants that the database has kept:

- A run that failed ends at `at` of its entry in `errors`, and began `ran_s` before. Without `ran_s`, as after a loss,
  its length is known for the last attempt only: from `claimed_at` on.
- The run of a completed job is from `started_at` to `finished_at`; that of a running one from `claimed_at` until now.
- When an attempt was due (`run_at`) is known for the last one only, and not if it has failed since: then `run_at` is
  that of the next one. Until it the job was not due, and then it waited. Elsewhere both are one piece, `between`.
- `errors` keeps the last 20 failures, and nothing of an attempt that was given back: that is `unknown`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from pgworkd.admin.queries import JobDetails
from pgworkd.dashboard.draw.charts import duration

NAMES = {
    "held": ("not due", "not due, or blocked"),
    "backoff": ("backoff", "backoff, until its retry was due"),
    "blocked": ("blocked", "blocked"),
    "wait": ("wait", "wait, from due to claimed"),
    "between": ("before", "before it: not due, or waiting"),
    "claimed": ("claimed", "claimed, not begun"),
    "run": ("run", "run"),
    "unknown": ("not kept", "not kept"),
}
"""What a piece is, by its class in the style sheet: in a word, and for the legend."""


class Piece(NamedTuple):
    """A piece of a lane, in per cent of the whole; `kind`: a key of NAMES; `says`: that with its length."""

    kind: str
    x: float
    width: float
    says: str


class Lane(NamedTuple):
    """One attempt, or several of which nothing else is known; `outcome`: how it ended, or nothing."""

    name: str
    outcome: str
    pieces: Sequence[Piece]


class Timeline(NamedTuple):
    """The lanes of a job between two instants; `kinds`: the pieces that are there, each with its name."""

    lanes: Sequence[Lane]
    since: datetime
    until: datetime
    kinds: Sequence[tuple[str, str]]


class _Lived(NamedTuple):
    """What is known of one attempt."""

    number: int
    outcome: str
    due: datetime | None = None
    claimed: datetime | None = None
    began: datetime | None = None
    ended: datetime | None = None

    @property
    def first(self) -> datetime | None:
        """The first instant that is known of the attempt itself."""
        return self.claimed or self.began or self.ended


_Span = tuple[str, datetime, datetime]


def timeline(job: JobDetails, now: datetime) -> Timeline | None:
    """The life of a job until `now`, which is rounded, so that a drawing lasts; None if it cannot be shown."""
    at, until = job.created_at, _rounded(job, now)
    if at is None or until is None:
        return None
    lanes, number = list[tuple[str, str, list[_Span]]](), 0
    for each in _attempts(job, until):
        if each.number > number + 1 and each.first is not None:
            lanes.append((_names(number + 1, each.number - 1), "", [("unknown", at, each.first)]))
            at = max(at, each.first)
        spans = [span for span in _spans(each, at, "backoff" if number else "held") if span[2] > span[1]]
        lanes.append((_names(each.number, each.number), each.outcome, spans))
        number, at = each.number, max([at, each.first or at, *(end for _, _, end in spans)])
    if rest := [span for span in _rest(job, at, until) if span[2] > span[1]]:
        lanes.append(("then", job.status, rest) if job.finished_at else ("next", "", rest))
    end = max([until] + [end for _, _, spans in lanes for _, _, end in spans])
    return _drawn(lanes, job.created_at or at, end)


def _rounded(job: JobDetails, now: datetime) -> datetime | None:
    """The end of the drawing: that of the job; or now, rounded down to a hundredth or so, but after what has been."""
    if job.created_at is None or job.finished_at is not None:
        return job.finished_at
    length_s = max((now - job.created_at).total_seconds(), 1.0)
    unit_s = max(2.0 ** math.ceil(math.log2(length_s / 100)), 4.0)
    rounded = job.created_at + timedelta(seconds=length_s // unit_s * unit_s)
    if job.status == "dead":  # nothing happens to it
        return job.failed_at
    return max(each for each in (rounded, job.created_at, job.claimed_at, job.failed_at) if each is not None)


def _attempts(job: JobDetails, until: datetime) -> list[_Lived]:
    """The attempts of which anything is known, in order."""
    found = {}
    for number, at, ran_s, kind in _failures(job.errors):
        is_last, is_dead = number == job.attempts, job.status in ("dead", "discarded")
        found[number] = _Lived(
            number,
            "lost" if kind == "lost" else "dead" if is_last and is_dead else "failed",
            job.run_at if is_last and is_dead else None,
            job.claimed_at if is_last else None,
            None if ran_s is None else at - timedelta(seconds=ran_s),
            at,
        )
    last = job.attempts
    if last and last not in found and job.claimed_at is not None:
        if job.status == "completed":
            found[last] = _Lived(last, "completed", job.run_at, job.claimed_at, job.started_at, job.finished_at)
        elif job.status == "running":
            found[last] = _Lived(last, "running", job.run_at, job.claimed_at, None, until)
        else:  # when it was given back, or cancelled, is not kept
            found[last] = _Lived(last, "", None, job.claimed_at)
    return [found[number] for number in sorted(found)]


def _failures(text: str) -> list[tuple[int, datetime, float | None, Any]]:
    """Attempt, end, seconds that it ran, and type of each failure; entries of other programs may be anything."""
    found = []
    entries = json.loads(text)
    for entry in entries if isinstance(entries, list) else []:
        try:
            number, at = int(entry["attempt"]), datetime.fromisoformat(entry["at"]).astimezone(UTC)
            ran_s = float(entry["ran_s"]) if entry.get("ran_s") is not None else None
            if number > 0 and (ran_s is None or 0 <= ran_s < 1e9):
                found.append((number, at, ran_s, entry.get("type")))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
    return found


def _spans(each: _Lived, at: datetime, before: str) -> list[_Span]:
    """The pieces of an attempt, from `at` on; `before`: what the time until it was due is."""
    found, first = list[_Span](), each.first
    if first is not None and each.due is not None:
        due = min(max(each.due, at), first)
        found += [(before, at, due), ("wait", due, first)]
    elif first is not None:
        found.append(("between", at, first))
    began = each.began or each.claimed
    if each.claimed is not None and each.began is not None:
        found.append(("claimed", each.claimed, each.began))
    if began is not None and each.ended is not None:
        found.append(("run", began, each.ended))
    return found


def _rest(job: JobDetails, at: datetime, until: datetime) -> list[_Span]:
    """What came, or comes, after the last attempt."""
    if job.status == "blocked":
        return [("blocked", at, until)]
    if job.status in ("pending", "failed") and job.run_at is not None:
        before = "backoff" if job.attempts else "held"
        return [(before, at, job.run_at), ("wait", max(at, job.run_at), until)]
    if job.status in ("cancelled", "expired"):
        return [("unknown" if job.attempts else "between", at, until)]
    return []


def _drawn(lanes: Sequence[tuple[str, str, list[_Span]]], since: datetime, until: datetime) -> Timeline:
    whole_s = max((until - since).total_seconds(), 0.001)
    drawn, kinds = [], dict[str, str]()
    for name, outcome, spans in lanes:
        pieces = []
        for kind, begin, end in spans:
            length_s = (end - begin).total_seconds()
            x, width = 100 * (begin - since).total_seconds() / whole_s, max(100 * length_s / whole_s, 0.4)
            pieces.append(Piece(kind, min(max(x, 0.0), 100 - width), width, f"{NAMES[kind][0]} {duration(length_s)}"))
            kinds[kind] = NAMES[kind][1]
        drawn.append(Lane(name, outcome, pieces))
    return Timeline(drawn, since, until, sorted(kinds.items(), key=lambda each: list(NAMES).index(each[0])))


def _names(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"
