"""The connection may break before any protocol message of any database operation of a daemon or an application.

No job is lost, duplicated or stuck, and the caller learns the outcome, or that the outcome is unknown.
"""

from __future__ import annotations

import re

import pytest

from tests.chaos.wire import OPERATIONS
from tests.chaos.wire_kit import Operation, sweep
from tests.chaos.wire_routes import Route
from tests.http.test_access import routes

pytestmark = pytest.mark.slow("daemons under faults")

CASES = [pytest.param(OPERATIONS[0], marks=pytest.mark.fast), *OPERATIONS[1:]]


@pytest.mark.parametrize("operation", CASES, ids=lambda operation: operation.__name__)
async def test_an_operation_survives_a_cut_before_any_message(dsn: str, operation: type[Operation]) -> None:
    figures = await sweep(operation, dsn, operation.stride)
    print(figures.row)  # noqa: T201
    assert figures.violations == []


def test_every_route_that_changes_something_is_swept() -> None:
    swept = {operation.name.partition(",")[0] for operation in OPERATIONS if issubclass(operation, Route)}
    wanted = {f"{method} {path}" for method, path in routes() if method != "GET"}
    assert {_plain(each) for each in wanted} - {_plain(each) for each in swept} == set()


def _plain(route: str) -> str:
    one = re.sub("/jobs/(retry|cancel|discard|undepend)$", "/jobs/{operation}", route)  # one function does them all
    return re.sub(r"\{\w+\}", "{}", one)
