"""The stories of a job from its insert to its end, of crashes and of stops, each again through a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kits.remote_daemon import remote_daemons
from tests.stories import test_01_insert_to_done, test_02_crash_and_rescue, test_05_stop

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

NEED_A_DATABASE = {
    "test_writes_in_job_transaction_commit_with_the_completion_or_not_at_all",
    "test_a_daemon_that_never_reached_its_database_stops_cleanly",
    "test_a_heartbeat_during_deregistration_neither_loses_nor_renews_the_lease",
}
"""What they are about is the connection to the database."""


@pytest.fixture(autouse=True)
async def through_a_gateway(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """All daemons."""
    async with remote_daemons(dsn, monkeypatch):
        yield


for _story in (test_01_insert_to_done, test_02_crash_and_rescue, test_05_stop):
    for _name, _test in vars(_story).items():
        if _name.startswith("test_") and _name not in NEED_A_DATABASE:
            globals()[_name] = _test
