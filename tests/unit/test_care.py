"""Which claims are careful, and when a job is set aside."""

from __future__ import annotations

from pgworkd.engine.claim.care import Care
from pgworkd.errors import DatabaseBusy, DatabaseError, PgworkdError

WAITED = DatabaseBusy("canceling statement due to statement timeout", sqlstate="57014")
REFUSED = DatabaseError("not this one", sqlstate="P0001")


class Claims:
    """What is set aside: `answers` of each attempt to, in turn; an error is raised."""

    def __init__(self, *answers: int | PgworkdError | None) -> None:
        self.care, self.forced, self._answers = Care(self._set_aside), list[bool](), list(answers)

    async def _set_aside(self, error: PgworkdError | None) -> int | None:
        self.forced.append(error is not None)
        answer = self._answers.pop(0)
        if isinstance(answer, PgworkdError):
            raise answer
        return answer


async def test_a_lock_that_is_gone_by_now_sets_no_job_aside() -> None:
    """It held up two claims; the trial finds that the job can be claimed."""
    claims = Claims(0)
    assert await claims.care.refused(WAITED)
    assert await claims.care.refused(WAITED), "the next claim follows at once"
    claims.care.passed()
    assert claims.forced == [False]


async def test_while_a_lock_on_all_jobs_is_held_no_job_is_blamed() -> None:
    claims = Claims(None, None, 0)
    assert await claims.care.refused(WAITED)
    assert [await claims.care.refused(WAITED) for _ in range(3)] == [False, False, True]
    assert claims.forced == [False] * 3


async def test_a_job_whose_trial_takes_as_long_is_set_aside() -> None:
    claims = Claims(WAITED, 1)
    assert await claims.care.refused(WAITED)
    assert await claims.care.refused(WAITED)
    assert claims.forced == [False, True]


async def test_a_job_that_is_refused_alone_although_its_trial_passed_is_set_aside() -> None:
    claims = Claims(0, 1)
    assert [await claims.care.refused(REFUSED) for _ in range(3)] == [True] * 3
    assert claims.forced == [False, True]
