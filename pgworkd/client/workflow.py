"""Jobs that wait for each other, by name: built first, checked, then inserted in one go.

flow = Workflow()
flow.add("extract", "etl", {"day": 7})
flow.add("load", "etl", {"day": 7}, after=["extract"])
flow.add("report", "mail", after=["load"], on_failed_dependency="run")
ids = await flow.enqueue(conn)                            # {"extract": UUID(...), ...}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any
from uuid import UUID

from pgworkd.client.connections import answered, depends, inserts, way
from pgworkd.client.new_job import NewJob, OnFailedDependency, Waits, new_ids, row, text, waits
from pgworkd.errors import UsageError

STEP_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class _Step:
    row: tuple[Any, ...]
    after: list[str]
    waits: Waits
    """For jobs that are there already."""


class Workflow:
    """A graph of jobs to be, each under a name of its own."""

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
        **options: Any,
    ) -> None:
        """Adds a job; the rest as for NewJob, but that `after` may also name steps, before or after they are added.

        UsageError for a name that is taken, or what NewJob would refuse.
        """
        text(name, "the step's name", STEP_CHARS_MAX)
        if name in self._steps:
            raise UsageError(f"step {name!r} is there already: give each a name of its own")
        if isinstance(after, str):
            raise UsageError(f"step {name!r}: after must be a list of steps' names and jobs' ids")
        before = list(after)
        ids = [each for each in before if not isinstance(each, str)]
        job = NewJob(queue, payload, after=ids, on_failed_dependency=on_failed_dependency, **options)
        at = f"step {name!r}: "
        self._steps[name] = _Step(row(job, at), [x for x in before if isinstance(x, str)], waits(job, 0, at))

    def enqueue(self, conn: Any) -> Any:
        """Inserts all jobs or none; their ids by name, to be awaited if `conn` is async.

        UsageError, before the database is asked, for a step that waits for an unknown one, or steps in a circle.
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
        steps = inserts(ids, [self._steps[name].row for name in names]) + depends(ids, waiting)
        return answered(run(conn, steps), lambda _: by_name)

    def _sorted(self) -> list[str]:
        """The names, each behind those that it waits for, so that ids rise along the flow."""
        for name, step in self._steps.items():
            if unknown := [each for each in step.after if each not in self._steps]:
                raise UsageError(f"step {name!r} waits for {unknown[0]!r}, which is no step of this workflow")
        try:
            return list(TopologicalSorter({name: step.after for name, step in self._steps.items()}).static_order())
        except CycleError as error:
            raise UsageError(f"steps wait for each other in a circle: {' -> '.join(error.args[1][::-1])}") from None
