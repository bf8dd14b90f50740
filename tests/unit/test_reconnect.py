"""Waiting for the database: growing, capped, jittered delays, and one event at each end of an outage."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.database import reconnect
from pgworkd.database.reconnect import CAP_S, FIRST_S, Outage


class Heard(Events):
    """Events, and a list of those received."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.listen(lambda name, facts: self.said.append((name, dict(facts))))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect.random, "uniform", lambda low, high: (low + high) / 2)


@pytest.mark.usefixtures("no_jitter")
async def test_the_delays_double_up_to_the_cap(heard: Heard) -> None:
    state = Outage("claim", heard)
    delays = [state.failed(OSError("down")) for _ in range(10)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 2, 2])


@pytest.mark.usefixtures("no_jitter")
async def test_the_delays_start_over_after_a_success(heard: Heard) -> None:
    state = Outage("claim", heard)
    first = [state.failed(OSError("down")) for _ in range(4)]
    state.passed()
    assert [state.failed(OSError("down")) for _ in range(4)] == first


async def test_delays_are_jittered_to_avoid_a_thundering_herd(heard: Heard) -> None:
    drawn = [Outage("claim", heard).failed(OSError("down")) for _ in range(50)]
    assert len(set(drawn)) > 40
    assert all(FIRST_S * 0.5 <= delay_s <= FIRST_S * 1.5 for delay_s in drawn)
    state = Outage("claim", heard)
    late = [state.failed(OSError("down")) for _ in range(60)][10:]
    assert all(CAP_S * 0.5 <= delay_s <= CAP_S * 1.5 for delay_s in late)


async def test_an_outage_is_reported_once_at_its_start_and_once_at_its_end(heard: Heard) -> None:
    state = Outage("claim q", heard)
    assert not state.on
    state.passed()
    assert heard.said == []
    first = state.failed(OSError("no route"))
    assert state.on
    for _ in range(100):
        state.failed(OSError("another error"))
    assert heard.said == [
        (events.DATABASE_UNAVAILABLE, {"part": "claim q", "error": "no route", "retry_in_s": round(first, 3)})
    ]
    state.passed()
    assert not state.on
    state.passed()
    assert [name for name, _ in heard.said] == [events.DATABASE_UNAVAILABLE, events.DATABASE_RECOVERED]
    assert heard.said[1][1]["part"] == "claim q"
    state.failed(OSError("again"))
    assert [name for name, _ in heard.said] == [
        events.DATABASE_UNAVAILABLE,
        events.DATABASE_RECOVERED,
        events.DATABASE_UNAVAILABLE,
    ]


async def test_an_outages_duration_is_counted_from_the_first_failure(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(reconnect.anyio, "current_time", lambda: now)
    state = Outage("lease", heard)
    for now in (1000.0, 1007.5, 1100.25):  # noqa: B007 - read by the clock above
        state.failed(OSError("down"))
    now = 1200.125
    state.passed()
    assert heard.said[-1] == (events.DATABASE_RECOVERED, {"part": "lease", "outage_s": 200.125})


async def test_components_track_their_outages_independently(heard: Heard) -> None:
    one, other = Outage("claim", heard), Outage("settle", heard)
    for _ in range(5):
        one.failed(OSError("down"))
    assert not other.on
    assert other.failed(OSError("down")) <= FIRST_S * 1.5
    assert [facts["part"] for _, facts in heard.said] == ["claim", "settle"]


async def test_a_waiting_component_retries_at_once_when_another_one_succeeds(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "CAP_S", 3600.0)
    one, other = Outage("claim", heard), Outage("settle", heard)
    one.failed(OSError("down"))
    for _ in range(20):
        other.failed(OSError("down"))
    with anyio.fail_after(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.wait, OSError("down"))
            await anyio.wait_all_tasks_blocked()
            one.passed()
    assert other.on, "it has still to be answered itself"
    heard.said.clear()
    one.failed(OSError("down"))
    one.passed()
    assert [facts["part"] for _, facts in heard.said] == ["claim", "claim"], "nobody listens who does not wait"


@pytest.mark.usefixtures("no_jitter")
async def test_a_waiting_component_otherwise_waits_the_full_delay(heard: Heard) -> None:
    began = anyio.current_time()
    await Outage("claim", heard).wait(OSError("down"))
    assert anyio.current_time() - began >= FIRST_S
