"""Jobs that depend on each other, by name: built first, checked, then inserted at once.

flow = Workflow()
flow.add("extract", "etl", {"day": 7})
flow.add("load", "etl", {"day": 7}, after=["extract"])
flow.add("report", "mail", after=["load"], on_failed_dependency="run")
ids = await flow.enqueue(conn)                            # {"extract": UUID(...), ...}
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Unpack, overload
from uuid import UUID

from pgworkd.client.connections import AnyAsyncConnection, SyncConnection, answered, depends, inserts, way
from pgworkd.client.new_job import JobOptions, OnFailedDependency, Waits, job_with, new_ids, row, waits
from pgworkd.client.tracing import ran, traced_all
from pgworkd.core.validation import text
from pgworkd.errors import UsageError

STEP_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class _Step:
    row: list[Any]
    after: list[str]
    waits: Waits
    """What the step waits for among existing jobs."""


class Workflow:
    """A graph of jobs to enqueue, each under a unique name."""

    def __init__(self) -> None:
        self._steps: dict[str, _Step] = {}

    def add(
        self,
        name: str,
        queue: str,
        payload: object = None,
        *,
        after: Iterable[str | UUID] = (),
        on_failed_dependency: OnFailedDependency = "wait",
        **options: Unpack[JobOptions],
    ) -> None:
        """Adds a job. The arguments are those of NewJob; `after` may also name steps, even ones not added yet.

        UsageError for a name (1 to 200 characters) that is taken, and for a value that NewJob does not allow.
        """
        text(name, "the step's name", STEP_CHARS_MAX)
        if name in self._steps:
            raise UsageError(f"step {name!r} exists already: give each step a unique name")
        if isinstance(after, str):
            raise UsageError(f"step {name!r}: after must be a list of names of steps and ids of jobs")
        before = list(after)
        ids = [each for each in before if not isinstance(each, str)]
        waiting = {"after": ids, "on_failed_dependency": on_failed_dependency}
        job = job_with(queue, payload, {**options, **waiting})
        at = f"step {name!r}: "
        self._steps[name] = _Step(row(job, at), [x for x in before if isinstance(x, str)], waits(job, 0, at))

    @overload
    def enqueue(self, conn: SyncConnection) -> dict[str, UUID]: ...
    @overload
    def enqueue(self, conn: AnyAsyncConnection) -> Coroutine[Any, Any, dict[str, UUID]]: ...
    def enqueue(self, conn: Any) -> Any:
        """Inserts all jobs or none; returns their ids by name (to be awaited if `conn` is async).

        UsageError, before anything is sent, for a step that depends on an unknown step, or for a cycle.
        """
        run = way(conn)
        names = self._sorted()
        ids = new_ids(len(names))
        by_name = {name: UUID(int=i) for name, i in zip(names, ids, strict=True)}
        waiting = []
        for number, name in enumerate(names):
            step = self._steps[name]
            if after := [by_name[each] for each in step.after] + list(step.waits.after):
                waiting.append(Waits(number, after, step.waits.on_failed_dependency))
        span, rows = traced_all([self._steps[name].row for name in names])
        return answered(ran(run, conn, inserts(ids, rows) + depends(ids, waiting), span), lambda _: by_name)

    def _sorted(self) -> list[str]:
        """The names of the steps, each after those that it depends on, so that ids ascend along the graph."""
        for name, step in self._steps.items():
            if unknown := [each for each in step.after if each not in self._steps]:
                raise UsageError(f"step {name!r} depends on {unknown[0]!r}, which is not a step of this workflow")
        try:
            return list(TopologicalSorter({name: step.after for name, step in self._steps.items()}).static_order())
        except CycleError as error:
            raise UsageError(f"steps depend on each other in a cycle: {' -> '.join(error.args[1][::-1])}") from None
