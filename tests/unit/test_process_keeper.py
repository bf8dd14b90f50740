"""The keeper of numbered processes, with processes that end when the test says so."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Mapping

import anyio
import pytest

from pgworkd.processes.process_keeper import ProcessKeeper
from tests.kits.daemon import until


class Fake:
    """A process; it exits with -SIGTERM or -SIGINT when it receives `obeys`."""

    facts: Mapping[str, object] = {}
    end_facts: Mapping[str, object] = {}

    def __init__(self, obeys: signal.Signals) -> None:
        self.obeys = obeys
        self.received: list[signal.Signals] = []
        self.code: int | None = None
        self.ended = anyio.Event()

    def end(self, code: int) -> None:
        self.code = code
        self.ended.set()

    async def wait(self) -> int:
        await self.ended.wait()
        assert self.code is not None
        return self.code

    async def send(self, number: signal.Signals) -> None:
        self.received.append(number)
        if number in (self.obeys, signal.SIGKILL):
            self.end(-number)


class Fakes:
    """The processes of a keeper, by number in the order of their starts."""

    def __init__(self, obeys: signal.Signals = signal.SIGTERM, kill_after_s: tuple[float, float] = (60, 60)) -> None:
        self.started: list[tuple[int, Fake]] = []
        self.obeys = obeys
        self.stops = 0
        self.keeper = ProcessKeeper("worker", str, self._start, self._stop_all, kill_after_s=kill_after_s)

    @contextlib.asynccontextmanager
    async def _start(self, number: int) -> AsyncIterator[Fake]:
        if number == 9:
            raise OSError("no memory")
        self.started.append((number, fake := Fake(self.obeys)))
        yield fake

    def _stop_all(self) -> None:
        self.stops += 1  # a supervisor's stop comes later, as a signal

    async def starts(self, *numbers: int) -> None:
        await until(lambda: [number for number, _ in self.started] == list(numbers))


@contextlib.asynccontextmanager
async def running(fakes: Fakes, *wanted: int) -> AsyncIterator[ProcessKeeper]:
    async with anyio.create_task_group() as tasks:
        fakes.keeper.want(wanted)
        tasks.start_soon(fakes.keeper.run, 9)
        yield fakes.keeper


async def test_a_stopped_process_may_start_again_and_then_has_not_died_before() -> None:
    async with running(fakes := Fakes(), 1) as keeper:
        await fakes.starts(1)
        fakes.started[0][1].end(1)
        await fakes.starts(1, 1)
        keeper.want(())
        await until(lambda: not keeper.began_s)
        keeper.want({1})
        await fakes.starts(1, 1, 1)
        fakes.started[2][1].end(1)
        with anyio.fail_after(0.5):  # a second death in a row would have to wait longer
            await fakes.starts(1, 1, 1, 1)
        keeper.request_stop()
    assert [fake.received for _, fake in fakes.started] == [[], [signal.SIGTERM], [], [signal.SIGTERM]]
    assert keeper.exit_code == 0


async def test_a_number_that_is_wanted_again_while_it_stops_does_not_get_a_second_process() -> None:
    async with running(fakes := Fakes(obeys=signal.SIGINT), 1) as keeper:
        await fakes.starts(1)
        keeper.want(())
        await until(lambda: fakes.started[0][1].received == [signal.SIGTERM])
        keeper.want({1, 2})
        await fakes.starts(1, 2)
        fakes.started[0][1].end(1)
        await fakes.starts(1, 2, 1)
        keeper.request_stop(2)
    assert keeper.exit_code == 0, "it was asked to stop when it failed, but not with all"


async def test_an_exit_with_2_stops_all_once() -> None:
    async with running(fakes := Fakes(), 1, 2, 3) as keeper:
        await fakes.starts(1, 2, 3)
        fakes.started[0][1].end(2)
        fakes.started[1][1].end(2)
        await until(lambda: set(keeper.began_s) == {3})
        keeper.request_stop()
    assert len(fakes.started) == 3
    assert (fakes.stops, keeper.exit_code) == (1, 2)
    assert [fake.received for _, fake in fakes.started][2] == [signal.SIGTERM]


@pytest.mark.parametrize("has_received_it", [True, False])
async def test_a_failure_during_a_stop_is_an_exit_code_of_1(has_received_it: bool) -> None:
    async with running(fakes := Fakes(obeys=signal.SIGINT), 1) as keeper:
        await fakes.starts(1)
        if not has_received_it:
            fakes.started[0][1].end(2)
        keeper.request_stop()
        if has_received_it:
            await until(lambda: bool(fakes.started[0][1].received))
            fakes.started[0][1].end(2)
    assert (fakes.stops, keeper.exit_code) == (0, 1), "also if it is 2"


@pytest.mark.parametrize("kill_after_s", [(0.01, 60.0), (60.0, 0.01), (60.0, 60.0)])
async def test_a_process_that_does_not_stop_is_killed(kill_after_s: tuple[float, float]) -> None:
    async with running(fakes := Fakes(signal.SIGKILL, kill_after_s), 1) as keeper:
        await fakes.starts(1)
        keeper.request_stop({0.01: 1}.get(kill_after_s[0], 2))
        if kill_after_s == (60.0, 60.0):
            await until(lambda: signal.SIGINT in fakes.started[0][1].received)
            keeper.request_stop(3)
    first, *_, last = fakes.started[0][1].received
    assert (first, last, keeper.exit_code) == (signal.SIGTERM, signal.SIGKILL, 1)


async def test_a_process_that_cannot_be_started_is_tried_again_and_a_stop_does_not_wait() -> None:
    async with running(fakes := Fakes(), 9, 1) as keeper:
        await fakes.starts(1)
        keeper.request_stop()
    assert keeper.exit_code == 0
