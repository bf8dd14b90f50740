"""Faults of processes and connections. Each injects its fault, undoes it, and returns; see also `faults_database`."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import anyio
from anyio.to_thread import run_sync

from tests.chaos.clocks import put_forward
from tests.chaos.fleet import BEARABLE_S, EXIT_S_MAX, TIMES, Fleet, Member
from tests.chaos.worker import POINTS

Fault = Callable[[Fleet], Awaitable[None]]
FAULTS: dict[str, Fault] = {}
LONG_S = TIMES["lease_s"] * 1.5
SHORT_S = BEARABLE_S * 0.6


def fault(function: Fault) -> Fault:
    """Registers a fault under its name."""
    FAULTS[function.__name__] = function
    return function


async def keep_busy(fleet: Fleet, for_s: float) -> None:
    """Makes sure that every daemon is running a job for that long."""
    await fleet.insert("mixed", {"seconds": for_s}, kind="plain", count=12)
    await anyio.sleep(0.3)


@fault
async def kill(fleet: Fleet) -> None:
    """kill -9 of one daemon."""
    await keep_busy(fleet, 1.0)
    for member in fleet.any():
        fleet.kill(member)


@fault
async def kill_at_a_point(fleet: Fleet) -> None:
    """A daemon kills itself just before, or just after, a database call."""
    point = f"{fleet.dice.choice(['before', 'after'])} {fleet.dice.choice(POINTS)}"
    for member in fleet.any():
        assert member.process.stdin is not None
        member.process.stdin.write(f"{point}\n".encode())
        member.process.stdin.flush()


@fault
async def kill_fleet(fleet: Fleet) -> None:
    """kill -9 of all daemons at once."""
    killed = list(fleet.members)
    for member in killed:
        fleet.kill(member)
    with anyio.move_on_after(20):
        while not any(fleet.has_noted(m.name, "daemon.ready") for m in fleet.members if m not in killed):
            await anyio.sleep(0.02)
    fleet.disturb()


@fault
async def kill_producer(fleet: Fleet) -> None:
    """kill -9 of an application, maybe in the middle of a commit."""
    await fleet.kill_producer()


@fault
async def terminate(fleet: Fleet) -> None:
    """SIGTERM: the daemon must exit within its limits and leave nothing behind."""
    await keep_busy(fleet, LONG_S * 2)
    for member in fleet.any():
        await _ends(fleet, member, signals=1)


@fault
async def terminate_storm(fleet: Fleet) -> None:
    """Several SIGTERMs: an immediate stop."""
    for member in fleet.any():
        await _ends(fleet, member, signals=5)


@fault
async def terminate_newborn(fleet: Fleet) -> None:
    """SIGTERM while a daemon is starting."""
    member = await fleet.start_member()
    fleet.too_many += 1
    await _ends(fleet, member, signals=1, after_s=fleet.dice.uniform(0, 0.05))


async def _ends(fleet: Fleet, member: Member, *, signals: int, after_s: float = 0.0) -> None:
    await fleet.is_born(member)
    await anyio.sleep(after_s)
    fleet.note("terminated", name=member.name, signals=signals)
    for _ in range(signals):
        member.process.send_signal(signal.SIGTERM)
        await anyio.sleep(0.01)
    with anyio.move_on_after(EXIT_S_MAX):
        while member.alive:
            await anyio.sleep(0.02)
        return
    fleet.note("hangs", name=member.name)
    member.process.kill()


@fault
async def freeze_briefly(fleet: Fleet) -> None:
    """SIGSTOP for less time than it takes to lose a lease."""
    for member in fleet.any():
        await fleet.freeze(member, SHORT_S)


@fault
async def freeze_long(fleet: Fleet) -> None:
    """SIGSTOP for longer than the lease."""
    await keep_busy(fleet, SHORT_S * 2)
    for member in fleet.any():
        await fleet.freeze(member, LONG_S)


@fault
async def block_loop(fleet: Fleet) -> None:
    """A handler blocks its daemon's event loop for longer than the lease."""
    await fleet.insert("block", {"seconds": LONG_S})
    await anyio.sleep(LONG_S + 0.5)


@fault
async def cut(fleet: Fleet) -> None:
    """All connections of a daemon, or two, are reset."""
    for member in fleet.any(2):
        member.proxy.cut()


@fault
async def delay(fleet: Fleet) -> None:
    """A slow network."""
    for member in fleet.any(2):
        member.proxy.delay_s = 0.1
        await fleet.isolate(member, "delay", SHORT_S)


@fault
async def blackhole_briefly(fleet: Fleet) -> None:
    """The network drops everything, for less time than it takes to lose a lease."""
    for member in fleet.any():
        await fleet.isolate(member, "blackhole", SHORT_S / 2)


@fault
async def blackhole_long(fleet: Fleet) -> None:
    """The network drops everything, for longer than the lease."""
    await keep_busy(fleet, LONG_S * 1.5)
    for member in fleet.any():
        await fleet.isolate(member, "blackhole", LONG_S)


@fault
async def hold(fleet: Fleet) -> None:
    """Data in both directions is delivered only long after the lease has expired and the jobs were rescued."""
    await keep_busy(fleet, LONG_S * 1.5)
    for member in fleet.any():
        await fleet.isolate(member, "hold", LONG_S)


@fault
async def half_open(fleet: Fleet) -> None:
    """One-way loss: the daemon's messages reach the server, and the replies are lost."""
    await keep_busy(fleet, LONG_S * 1.5)
    for member in fleet.any():
        await fleet.isolate(member, "halfopen", LONG_S)


@fault
async def refuse(fleet: Fleet) -> None:
    """Connections are cut, and new ones refused."""
    for member in fleet.any():
        member.proxy.cut()
        await fleet.isolate(member, "refuse", SHORT_S)


@fault
async def worker_clock(fleet: Fleet) -> None:
    """The wall clocks of some daemons are an hour ahead."""
    clocks = [fleet.directory / f"{member.name}.clock" for member in fleet.any(3)]
    for by_s in (3600, 0):
        for clock in clocks:
            await run_sync(put_forward, clock, by_s)
        await anyio.sleep(LONG_S / 2)
