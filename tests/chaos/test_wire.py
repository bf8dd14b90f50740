"""The connection may break before any protocol message of any database operation of a daemon or an application.

No job is lost, duplicated or stuck, and the caller learns the outcome, or that the outcome is unknown.
"""

from __future__ import annotations

import pytest

from tests.chaos.wire import OPERATIONS
from tests.chaos.wire_kit import Operation, sweep


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_an_operation_survives_a_cut_before_any_message(dsn: str, operation: type[Operation]) -> None:
    figures = await sweep(operation, dsn, operation.stride)
    print(figures.row)  # noqa: T201
    assert figures.violations == []
