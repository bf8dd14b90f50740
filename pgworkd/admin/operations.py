"""One operation on many jobs, with the number by outcome, and the reasons for those it left unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from pgworkd.admin.refusals import Refused

if TYPE_CHECKING:
    from pgworkd.admin.jobs import JobOperations, JobSelection


class OperationResult(NamedTuple):
    """The jobs by outcome: retried, cancelled, requested (of running jobs) or discarded; and those left unchanged."""

    outcomes: dict[str, int]
    refused: list[Refused]


async def operate(
    jobs: JobOperations, operation: str, ids: Sequence[UUID], *, call_back: bool = False
) -> OperationResult:
    """Does `operation` (cancel, retry, discard) to at most ROWS_MAX jobs; `call_back` as of `retry`."""
    if operation == "retry":
        changed = (await jobs.retry(ids, call_back=call_back)).changed
        return OperationResult({"retried": len(changed)}, await refused(jobs, operation, ids, changed))
    if operation == "cancel":
        done = await jobs.cancel(ids)
        counts = {"cancelled": 0, "requested": 0, **Counter(done.values())}
        return OperationResult(counts, await refused(jobs, operation, ids, done))
    # The database returns only a count: the jobs that were not dead before are left unchanged.
    before = await jobs.refusals(operation, ids)
    count = await jobs.discard(ids)
    return OperationResult({"discarded": count}, [one for one in before.values() if one.status != "dead"])


async def first_matching(
    jobs: JobOperations, operation: str, which: JobSelection, limit: int
) -> tuple[list[UUID], bool]:
    """Up to `limit` jobs to which the operation applies, and whether these are all."""
    found = await jobs.matching(operation, which, limit=limit)
    while not found.ids and found.last is not None:  # a call looks at a bounded number of jobs
        found = await jobs.matching(operation, which, found.last, limit)
    return list(found.ids), found.last is None


async def refused(jobs: JobOperations, operation: str, ids: Sequence[UUID], done: Container[UUID]) -> list[Refused]:
    """The jobs that are not in `done`, and why the operation does not apply to them."""
    rest = [job_id for job_id in ids if job_id not in done]
    return list((await jobs.refusals(operation, rest)).values()) if rest else []
