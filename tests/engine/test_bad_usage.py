"""Every wrong command line, setting and app, by number: one line with the remedy, no traceback, no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.bad_inputs import Case, Usage, settings, usage
from tests.kits.cli import Shell, clean, shell
from tests.kits.commands import Start, start

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["clean", "shell", "start"]  # fixtures

CASES = [*usage.CASES, *settings.CASES]
FAST = dict.fromkeys((76, 77), pytest.mark.fast)


@pytest.mark.parametrize("case", [pytest.param(case, marks=FAST.get(case.number, ())) for case in CASES], ids=str)
def test_bad_usage(
    shell: Shell, start: Start, tmp_path: Path, empty_dsn: str, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    case.check(Usage(shell, start, tmp_path, empty_dsn, monkeypatch))


def test_the_numbered_cases_are_complete_ordered_and_unique() -> None:
    numbers = [case.number for case in CASES]
    assert numbers == sorted(numbers)
    assert set(numbers) == {*range(44, 54), *range(75, 83)}
    assert len({str(case) for case in CASES}) == len(CASES)
