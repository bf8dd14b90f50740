"""Checks of jobs: what must hold for every job, whatever faults hit the workers that ran it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from tests.chaos.evidence import Change, Evidence, Run
from tests.chaos.fleet import BEARABLE_S
from tests.chaos.verdict import check, kept_away_s
from tests.chaos.workload import CLOCK_STEP_S, TICK_S

FINAL = {"completed", "cancelled", "expired", "dead"}
SLACK_S = 0.05
"""Tolerance between the database's clock and ours, and between an event and its record."""
TOLD_S = 1.0
"""Seconds after its daemon was stopped in which a process may still start a job that it had already received."""


def _is_loss(change: Change, before: Change) -> bool:
    return change.losses > before.losses


def _out_of_running(evidence: Evidence) -> Iterable[tuple[Change, Change]]:
    """Each transition out of `running`, with the claim before it."""
    for changes in evidence.by_job.values():
        for before, change in pairwise(changes):
            if change.was == "running":
                yield before, change


def _frozen_at(evidence: Evidence, name: str, at_s: float) -> bool:
    """Whether the daemon was frozen for longer than its lease at that time, or has only just been resumed."""
    return any(
        span.what == "paused"
        and span.until_s - span.since_s >= BEARABLE_S
        and span.since_s <= at_s <= span.until_s + 1.0
        for span in evidence.spans.get(name, ())
    )


def _given_up(evidence: Evidence, run: Run) -> bool:
    """Whether its daemon had already abandoned it when its process reported success, before it was killed.

    A job already sent to that process may even have started there a little later.
    """
    if run.kind != "process":
        return False
    stopped = [note.at_s for note in evidence.of("lease.fenced") if note.by == run.by]
    at_once = [note for note in evidence.of("terminated") if note.facts["signals"] > 1]
    stopped += [note.at_s for note in at_once if note.facts["name"] == run.by]
    # Its report of the end may still have been on its way.
    return any(run.start_s - TOLD_S <= at_s <= run.end_s + TOLD_S for at_s in stopped)


def _overlap(evidence: Evidence, runs: Iterable[Run]) -> Iterable[str | None]:
    last: Run | None = None
    for run in sorted(runs, key=lambda run: run.start_s):
        if last is not None and run.start_s < last.end_s:
            frozen = _frozen_at(evidence, last.by, run.start_s) or _frozen_at(evidence, last.by, last.end_s)
            yield None if frozen else f"{run} began before {last} had ended"
        else:
            yield None
        if last is None or run.end_s > last.end_s:
            last = run


@check
def acknowledged(evidence: Evidence) -> Iterable[str | None]:
    """Acknowledged minus final: no acknowledged job is lost or duplicated."""
    rows = defaultdict(list)
    for row in evidence.rows:
        if row.token is not None:
            rows[row.token].append(row)
    for token, (plan, known) in evidence.tokens.items():
        statuses = [row.status for row in rows[token]]
        if known and not statuses:
            yield f"{token} ({plan}) was acknowledged and is gone"
        elif len(statuses) > 1:
            yield f"{token} ({plan}) is there {len(statuses)} times"
        else:
            yield None
    for row in evidence.rows:
        if row.status not in FINAL and row.schedule is None:
            yield f"{row} has not come to its end"


@check
def attempted(evidence: Evidence) -> Iterable[str | None]:
    """Executed minus attempted: every run has a claim, and no attempt started twice."""
    claimed = {(c.job, c.attempts): c.worker for c in evidence.changes if c.became == "running"}
    begun = Counter((run.job, run.attempt) for run in evidence.runs)
    for run in evidence.runs:
        worker = claimed.get((run.job, run.attempt))
        if worker != run.by:
            yield f"{run} was claimed by {worker}"
        else:
            yield f"{run} began twice" if begun[run.job, run.attempt] > 1 else None


@check
def one_end(evidence: Evidence) -> Iterable[str | None]:
    """One final transition per job, from the attempt that produced its result."""
    last = {c.job: c.was for c in evidence.changes if c.became is None and c.was != "completed"}
    ends = Counter(c.job for c in evidence.changes if c.became is None and c.was != "completed")
    rows = Counter(row.job for row in evidence.rows)
    for row in evidence.rows:
        if rows[row.job] > 1 or ends[row.job] > 1:
            yield f"{row} ended {ends[row.job]} times and is there {rows[row.job]} times"
        elif row.status == "completed" and row.made_by != row.attempts:
            yield f"{row} has the result of attempt {row.made_by}"
        elif row.status == "completed" and last.get(row.job) != "running":
            yield f"{row} was completed while it was {last.get(row.job)}"
        else:
            yield None
    for job in ends:  # a waiting occurrence makes room for that of a new rule
        if job not in rows and evidence.by_job[job][-1].occurrence is None:
            yield f"{job} is gone without a trace"


@check
def at_most_once(evidence: Evidence) -> Iterable[str | None]:
    """A job with max_attempts=1 starts at most once."""
    begun = Counter(run.job for run in evidence.runs if run.kind == "charge")
    yield from (None if count == 1 else f"{job} began {count} times" for job, count in begun.items())


@check
def fenced(evidence: Evidence) -> Iterable[str | None]:
    """Only its own run settles an attempt: none is settled early, and a successful run is not repeated."""
    stale = {(n.facts["job_id"], n.facts["attempt"]) for n in evidence.of("job.stale")}
    for before, change in _out_of_running(evidence):
        run = evidence.run_of.get((change.job, before.attempts))
        loss = _is_loss(change, before)
        if run is None or loss or (run.pushed and change.became is not None):
            yield None
        elif change.at_s < run.end_s - SLACK_S and run.kind != "transact":
            yield f"{run} was settled ({change.became}) {run.end_s - change.at_s:.2f} s before it ended"
        elif run.how == "ok" and change.became is not None and (run.job, run.attempt) not in stale:
            yield None if _given_up(evidence, run) else f"{run} ended well, and became {change.became}"
        else:
            yield None


@check
def alone(evidence: Evidence) -> Iterable[str | None]:
    """Runs of one job never overlap, except for a daemon frozen for longer than its lease."""
    by_job = defaultdict(list)
    for run in evidence.runs:
        if not run.pushed:
            by_job[run.job].append(run)
    for runs in by_job.values():
        yield from _overlap(evidence, runs)


@check
def serialized(evidence: Evidence) -> Iterable[str | None]:
    """Runs of one serialize_key never overlap."""
    by_key = defaultdict(list)
    for run in evidence.runs:
        if run.key is not None:
            by_key[run.key].append(run)
    for runs in by_key.values():
        yield from _overlap(evidence, runs)


@check
def kept_place(evidence: Evidence) -> Iterable[str | None]:
    """No other job of a serialize_key begins between two runs of one that waits for its retry, or was given back."""
    by_key = defaultdict(list)
    for run in evidence.runs:
        if run.key is not None:
            by_key[run.key].append(run)
    for runs in by_key.values():
        begun: dict[str, Run] = {}
        last: Run | None = None
        for run in runs:
            before, passed = begun.get(run.job), last is not None and last.job != run.job
            freed = before is not None and (before.how == "Snooze" or _died_after(evidence, before))
            if before is None or not passed or freed or _frozen_at(evidence, run.by, run.start_s):
                yield None
            else:
                yield f"{last} began between {before} and {run}"
            begun[run.job] = last = run


def _died_after(evidence: Evidence, run: Run) -> bool:
    """Whether its job was dead after this run, from where operators retry it, behind the others."""
    return any(c.was == "dead" and c.attempts == run.attempt for c in evidence.by_job.get(run.job, ()))


@check
def losses(evidence: Evidence) -> Iterable[str | None]:
    """Every lost attempt is explained by a daemon that ended, or was blocked for longer than its lease allows."""
    for before, change in _out_of_running(evidence):
        if _is_loss(change, before):
            name = before.worker or "?"
            ended = evidence.exits.get(name, float("inf")) < change.at_s
            kept_s = kept_away_s(evidence, name)
            yield None if ended or kept_s >= BEARABLE_S else f"{change}: {name} was there, and away for {kept_s:.2f} s"


@check
def failures(evidence: Evidence) -> Iterable[str | None]:
    """Every failure is explained by its handler's exception, or by the death of its process."""
    unreadable = {row.job for row in evidence.rows if evidence.tokens.get(row.token or "", ("",))[0] == "unreadable"}
    for before, change in _out_of_running(evidence):
        if change.failures == before.failures or _is_loss(change, before):
            continue
        run = evidence.run_of.get((change.job, change.attempts))
        how = None if run is None else run.how
        if run is None:
            yield None if change.job in unreadable else f"{change} failed without a run"
        elif run.kind == "process":
            yield None if how in (None, "MemoryError") and run.attempt == 1 else f"{run} failed"
        elif run.kind == "charge":
            yield None if how in (None, "CancelledError") or run.pushed else f"{run} failed"
        elif run.kind == "transact":
            yield f"{run} failed" if how in (None, "ok", "CancelledError") else None  # whatever the driver raises
        else:
            yield None if how in ("RuntimeError", "PermanentError") else f"{run} failed"


@check
def deaths(evidence: Evidence) -> Iterable[str | None]:
    """Every dead job failed permanently, was unreadable, was lost three times, or was interrupted in its only run."""
    for row in evidence.rows:
        if row.status == "dead":
            plan = evidence.tokens.get(row.token or "", ("",))[0]
            run = evidence.run_of.get((row.job, row.attempts))
            hopeless = run is not None and run.how == "PermanentError"
            cut = run is not None and (run.how != "ok" or run.pushed)
            hopeless = hopeless or (row.kind == "charge" and (row.losses > 0 or cut))
            yield None if row.losses >= 3 or hopeless or plan == "unreadable" else f"{row} is dead"
    for row in evidence.rows:
        if evidence.tokens.get(row.token or "", ("",))[0] == "unreadable" and row.status != "dead":
            yield f"{row} cannot be read and is not dead"


@check
def limits(evidence: Evidence) -> Iterable[str | None]:
    """A limit is never exceeded, in any snapshot of the table."""
    running: dict[str, set[str]] = {queue: set() for queue in evidence.limits}
    for change in evidence.changes:
        if change.queue not in running:
            continue
        if change.became == "running":
            running[change.queue].add(change.job)
            count = len(running[change.queue])
            yield f"{change}: {count} run" if count > evidence.limits[change.queue] else None
        else:
            running[change.queue].discard(change.job)


@check
def occurrences(evidence: Evidence) -> Iterable[str | None]:
    """One job per occurrence, one live job per schedule, and each is the schedule's next occurrence.

    A rule that changes while the clock is back may repeat what it had before: nothing else tells which have been.
    """
    seen: set[str] = set()
    back = [note.at_s for note in evidence.of("clock_put_back")]
    for change in evidence.changes:
        if change.was is None and change.occurrence is not None:
            late = change.due_in_s > 2 * TICK_S + CLOCK_STEP_S
            twice = change.occurrence in seen and not any(
                0 <= change.at_s - at_s <= CLOCK_STEP_S + TICK_S for at_s in back
            )
            yield f"{change} is there twice" if twice else f"{change} is far away" if late else None
            seen.add(change.occurrence)
        elif (change.was, change.became, change.attempts) == ("pending", None, 0) and change.occurrence is not None:
            seen.discard(change.occurrence)  # it makes room for that of a new rule, before it has begun
    live: dict[str, set[str]] = defaultdict(set)
    for change in evidence.changes:
        if change.occurrence is not None:
            of_schedule = live[change.occurrence.split(" ")[0]]
            (of_schedule.discard if change.became in (None, "dead") else of_schedule.add)(change.job)
            yield f"{change}: {len(of_schedule)} are live" if len(of_schedule) > 1 else None


@check
def trees(evidence: Evidence) -> Iterable[str | None]:
    """Every job of a batch tree is counted once; each tree is finished, and its callback ran once."""
    for tree in evidence.trees.values():
        right = tree.finished and tree.added == tree.over == tree.rows
        if tree.parent is None:
            right = right and tree.callbacks == 1
        else:
            right = right and tree.added == evidence.trees[tree.parent].completed
        yield None if right else f"{tree}"


@check
def dependencies(evidence: Evidence) -> Iterable[str | None]:
    """A job with dependencies is claimed only after they have finished."""
    jobs = {row.token: row.job for row in evidence.rows}
    for note in evidence.of("invoked"):
        if note.facts["plan"] != "flow" or note.facts["tokens"][2] not in jobs:
            continue
        *first, last = (jobs.get(token, "") for token in note.facts["tokens"])
        over = max((evidence.by_job[job][-1].seq for job in first if evidence.by_job.get(job)), default=0)
        claims = [change.seq for change in evidence.by_job[last] if change.became == "running"]
        yield f"{last} was claimed before {first} were over" if claims and claims[0] < over else None


@check
def effects(evidence: Evidence) -> Iterable[str | None]:
    """Writes in job.transaction() are present exactly once if the job has completed, and otherwise absent."""
    for row in evidence.rows:
        if row.kind == "transact":
            found, wanted = evidence.effects.get(row.job, 0), int(row.status == "completed")
            yield None if found == wanted else f"{row}: {found} effects"
