"""Everything that a run leaves behind, in the form that the checks read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
from anyio.to_thread import run_sync

from tests.chaos.history import Note, load
from tests.chaos.others import RECEIVER
from tests.chaos.workload import MAX_RUNNING


def role(kind: str) -> str:
    """The role of a kind: those of a generated application are named "role-queue-number"."""
    return kind.split("-")[0]


class Change(NamedTuple):
    """One change of a job's status, as recorded by the database; `was` None: inserted, `became` None: finished."""

    seq: int
    at_s: float
    job: str
    queue: str
    was: str | None
    became: str | None
    attempts: int
    failures: int
    losses: int
    worker: str | None
    occurrence: str | None
    due_in_s: float


class Row(NamedTuple):
    """A job's row at the end of the run."""

    job: str
    queue: str
    kind: str
    status: str
    attempts: int
    failures: int
    losses: int
    token: str | None
    made_by: int | None
    dedupe_key: str | None
    schedule: str | None
    error: str | None = None


class Run(NamedTuple):
    """One call of a handler; `how` is None if its process died during the call, at `end_s`."""

    job: str
    attempt: int
    by: str
    kind: str
    start_s: float
    end_s: float
    how: str | None
    key: str | None
    pushed: bool = False
    """The receiver's: it ends its runs, whatever becomes of the daemon that has sent it the job."""


class Span(NamedTuple):
    """A span in which a daemon was frozen, or could not reach the database."""

    name: str
    what: str
    since_s: float
    until_s: float


class Tree(NamedTuple):
    """One batch; `callbacks`: how often the root's callback ran."""

    name: str
    parent: str | None
    added: int
    completed: int
    over: int
    finished: bool
    callbacks: int
    rows: int


@dataclass
class Evidence:
    """The record of a run."""

    notes: Sequence[Note]
    changes: Sequence[Change] = ()
    rows: Sequence[Row] = ()
    effects: Mapping[str, int] = field(default_factory=dict)
    trees: Mapping[str, Tree] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=lambda: {"limited": MAX_RUNNING})

    def of(self, *events: str) -> list[Note]:
        """The records of these events."""
        return [note for note in self.notes if note.event in events]

    @cached_property
    def exits(self) -> dict[str, float]:
        """When each daemon exited."""
        return {note.facts["name"]: note.at_s for note in self.of("exit")}

    @cached_property
    def runs(self) -> list[Run]:
        """All handler calls, ordered by their start."""
        ends = {(n.facts["job"], n.facts["attempt"], n.by): n for n in self.of("end")}
        claimed = {(c.job, c.attempts): c.worker for c in self.changes if c.became == "running"}
        runs = []
        for n in self.of("start"):
            end = ends.get((n.facts["job"], n.facts["attempt"], n.by))
            if end is not None:
                end_s, how = end.at_s, end.facts["how"]
            else:  # a child that kills itself does so at once
                end_s, how = self.exits.get(n.by, n.at_s if "." in n.by else float("inf")), None
            job, attempt, kind = n.facts["job"], n.facts["attempt"], role(n.facts["kind"])
            by = str(claimed.get((job, attempt))) if n.by == RECEIVER else n.by.split(".")[0]
            runs.append(Run(job, attempt, by, kind, n.at_s, end_s, how, n.facts.get("key"), n.by == RECEIVER))
        return runs

    @cached_property
    def run_of(self) -> dict[tuple[str, int], Run]:
        """Runs by job and attempt."""
        return {(run.job, run.attempt): run for run in self.runs}

    @cached_property
    def by_job(self) -> dict[str, list[Change]]:
        """The changes of each job, in order."""
        found: dict[str, list[Change]] = defaultdict(list)
        for change in self.changes:
            found[change.job].append(change)
        return found

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        """Spans in which each daemon was blocked."""
        found: dict[str, list[Span]] = defaultdict(list)
        for n in self.of("paused", "isolated"):
            found[n.facts["name"]].append(Span(n.facts["name"], n.event, n.facts["since_s"], n.facts["until_s"]))
        return found

    @cached_property
    def tokens(self) -> dict[str, tuple[str, bool]]:
        """By token of each job to insert: its plan, and whether any attempt to insert it was acknowledged."""
        acknowledged = {(n.by, n.facts["call"]) for n in self.of("acknowledged")}
        found: dict[str, tuple[str, bool]] = {}
        for n in self.of("invoked"):
            for token in n.facts["tokens"]:
                known = found.get(token, ("", False))[1]
                found[token] = n.facts["plan"], known or (n.by, n.facts["call"]) in acknowledged
        return found


_CHANGES = """
    SELECT seq, extract(epoch FROM at)::float8, job::text, queue, was, became, attempts, failures, losses, w.name,
           occurrence, due_in_s
    FROM chaos.audit a LEFT JOIN chaos.workers w ON w.id = a.worker ORDER BY seq"""
_ROWS = """
    SELECT id::text, queue::text, coalesce(kind, queue)::text, status::text, attempts, failures, losses,
           payload ->> 'token', NULL::int, dedupe_key::text, schedule::text, error
    FROM pgworkd.jobs WHERE status <> 'completed'
    UNION ALL
    SELECT id::text, queue::text, coalesce(kind, queue)::text, status::text, attempts, failures,
           (SELECT count(*)::int FROM jsonb_array_elements(errors) e WHERE e ->> 'type' = 'lost'), payload ->> 'token',
           (result ->> 'attempt')::int, dedupe_key::text, schedule::text, error
    FROM pgworkd.finished_jobs"""
_TREES = """
    WITH called AS (SELECT payload -> 'batch' ->> 'id' AS batch, count(*) FROM pgworkd.all_jobs
                    WHERE payload ? 'batch' GROUP BY 1),
         counted AS (SELECT batch_id, count(*) FROM pgworkd.all_jobs WHERE batch_id IS NOT NULL GROUP BY 1)
    SELECT b.id::text, b.name, b.parent_id::text, b.added::int, b.completed::int,
           (b.completed + b.dead + b.cancelled)::int, b.finished_at IS NOT NULL,
           coalesce(called.count, 0)::int, coalesce(counted.count, 0)::int
    FROM pgworkd.batches b LEFT JOIN called ON called.batch = b.id::text LEFT JOIN counted ON counted.batch_id = b.id"""


async def gather(db: asyncpg.Connection[Any], directory: Path) -> Evidence:
    """Collects the evidence once all processes have exited."""
    notes, logs, offset_s = await run_sync(_read, directory)
    changes = [Change(*row) for row in await db.fetch(_CHANGES)]
    return Evidence(
        notes,
        [change._replace(at_s=change.at_s - offset_s) for change in changes],
        [row._replace(kind=role(row.kind)) for row in (Row(*each) for each in await db.fetch(_ROWS))],
        dict(await db.fetch("SELECT job::text, count(*)::int FROM chaos.effects GROUP BY job")),
        {row[0]: Tree(*tuple(row)[1:]) for row in await db.fetch(_TREES)},
        logs,
        dict(await db.fetch("SELECT name::text, max_running::int FROM pgworkd.queues WHERE max_running IS NOT NULL")),
    )


def _read(directory: Path) -> tuple[list[Note], dict[str, str], float]:
    logs = {path.stem: path.read_text(errors="replace") for path in directory.glob("*.log")}
    return load(directory), logs, float((directory / "clock.json").read_text())
