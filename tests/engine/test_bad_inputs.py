"""Every bad input from SQL, the client or a handler, by number, with the exact expected result.

A row that the table accepts affects only its own job: others of its claim complete, the daemon keeps running.
"""

from __future__ import annotations

import anyio
import pytest

from tests.engine.bad_inputs import Case, calls, handlers, places, relations, rows
from tests.kits.daemon import LIMIT_S
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("each bad value in each place where it can come in")

CASES = [each for module in (rows, relations, calls, places, handlers) for each in module.CASES]
FAST = dict.fromkeys((1, 21, 31), pytest.mark.fast)


@pytest.mark.parametrize("case", [pytest.param(case, marks=FAST.get(case.number, ())) for case in CASES], ids=str)
async def test_bad_input(dsn: str, db: Db, case: Case) -> None:
    with anyio.fail_after(LIMIT_S):  # a wrong result may well be no result at all
        await case.check(dsn, db)


def test_the_numbered_cases_are_complete_ordered_and_unique() -> None:
    numbers = [case.number for case in CASES]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, 44))
    assert len({str(case) for case in CASES}) == len(CASES)
