"""One run: start everything, inject one fault after the other, drain the queues, stop, collect the evidence."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from tests.chaos import anyapp, faults_database, others
from tests.chaos.checks_workers import RESUMED_S_MAX
from tests.chaos.clocks import inherited
from tests.chaos.disk import mounted, unmount
from tests.chaos.evidence import Evidence, gather
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.faults_gateway import GATEWAY_FAULTS
from tests.chaos.fleet import Fleet, prepared, server_for
from tests.chaos.gateways import Gateways
from tests.chaos.history import AWAY, now_s
from tests.chaos.watch import CALM_S, look, probe
from tests.chaos.workload import WITHOUT_DATABASE

PRODUCERS = 3
READY_S_MAX = 60.0
REST_S_MAX = 90.0
"""Time limit for draining after the last fault has ended and the last job was inserted."""
REST_EVERY = 20
"""Phases of faults and of calm: recovery can be observed only while no new fault is injected."""
PEACE_S = CALM_S + 3.0


@dataclass(frozen=True)
class Plan:
    """The size of a run. `kinds`: the kinds of faults, by default all."""

    jobs: int = 5_000
    daemons: int = 4
    faults: int = 40
    for_s: float = 180.0
    seed: int = 0
    kinds: Sequence[str] = ()
    pg_bin: Path | None = None
    gateways: int = 0
    """Gateways through which the daemons work; 0: they have the database."""
    application: int | None = None
    """Seed of a generated application; None: only that of `workload`."""
    releases: Sequence[str] = ("new", "old")
    """Releases of the application side by side, as in a deployment that does not end."""

    @property
    def possible(self) -> dict[str, Fault]:
        """All kinds of faults that there are in such a run."""
        return FAULTS | GATEWAY_FAULTS if self.gateways else FAULTS

    def sequence(self, dice: random.Random, without: Container[str]) -> list[str]:
        """Each kind equally often, in random order; those in `without` cannot be injected here."""
        kinds = [kind for kind in self.kinds or self.possible if kind not in without]
        found: list[str] = []
        while len(found) < self.faults:
            found += dice.sample(kinds, len(kinds))
        return found[: self.faults]


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory for a run, open to Postgres where that has to run as another user; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        Path(temporary).chmod(0o711)
        yield Path(temporary)


async def run(plan: Plan, directory: Path, say: Callable[[str], None]) -> Evidence:
    """Runs the plan; returns its evidence. `directory` keeps histories and logs."""
    dice = random.Random(plan.seed)  # noqa: S311 - to be repeatable
    disk = directory / "disk"
    without = faults_database.impossible(fleet_disk=mounted(disk))
    for name, reason in without.items():
        say(f"not done here: {name}: {reason}")
    server = server_for(plan.pg_bin, disk / "server" if "disk_full" not in without else None)
    with inherited(directory / "server.clock"):
        server.start()
    try:
        dsn = await prepared(server)
        (directory / "clock.json").write_text(json.dumps(time.time() - now_s()))
        async with anyio.create_task_group() as tasks:
            fleet = Fleet(server, dsn, directory, tasks, dice)
            fleet.releases, fleet.new_kinds = list(plan.releases), anyapp.new_kinds(plan.application)
            if plan.application is not None:
                fleet.environment[anyapp.SEED] = str(plan.application)
                queues = anyapp.application(plan.application)
                processes = sum(queue.concurrency for queue in queues if "process" in queue.roles)
                fleet.note("application", slots=sum(queue.concurrency for queue in queues), processes=processes)
                async with fleet.connection() as db:
                    await anyapp.set_limits(db, queues)
            try:
                await _live(fleet, plan, plan.sequence(dice, without), tasks, say)
            finally:
                fleet.end_all()
            tasks.cancel_scope.cancel()
        async with fleet.connection(command_s=600) as db:
            return await gather(db, directory)
    finally:
        server.stop("immediate")
        unmount(disk)


async def _start(fleet: Fleet, plan: Plan, tasks: TaskGroup, say: Callable[[str], None]) -> None:
    """Starts all who work, and returns when they do."""
    if plan.gateways:
        fleet.environment |= {WITHOUT_DATABASE: "1", others.QUEUES: " ".join(others.members())}
        fleet.gateways = Gateways(fleet, plan.gateways)
        await fleet.gateways.start()
        await tasks.start(others.receive, fleet)
        if others.NODE is None:
            say("not done here: a worker in another language: node is not installed")
    for sort, count in {"daemon": plan.daemons, **(others.members() if plan.gateways else {})}.items():
        for _ in range(count):
            await fleet.start_member(sort=sort)
    with anyio.fail_after(READY_S_MAX):
        while not all(fleet.has_noted(member.name, "daemon.ready") for member in fleet.members):
            await anyio.sleep(0.05)


async def _live(fleet: Fleet, plan: Plan, faults: Sequence[str], tasks: TaskGroup, say: Callable[[str], None]) -> None:
    await _start(fleet, plan, tasks, say)
    for _ in range(PRODUCERS):
        await fleet.start_producer(plan.jobs // PRODUCERS, plan.for_s)
    tasks.start_soon(look, fleet)
    for queue in () if plan.application is None else anyapp.application(plan.application):
        if not queue.limits:
            tasks.start_soon(look, fleet, queue.name)
    began_s = now_s()
    for number, name in enumerate(faults):
        await anyio.sleep(max(0.1, began_s + number * plan.for_s / len(faults) - now_s()))
        say(f"{now_s() - began_s:6.1f} s  {name}")
        fleet.calm_since_s = float("inf")
        fleet.note("fault", name=name)
        try:
            await plan.possible[name](fleet)
        except AWAY as error:  # it hit the driver's own connection; its changes have been undone
            fleet.note("cut_short", name=name, error=f"{type(error).__name__}: {error}")
        fleet.note("fault_over", name=name)
        fleet.calm_since_s = now_s()
        if name.startswith("postgres"):  # the next fault must not distort how soon jobs run again
            with anyio.move_on_after(RESUMED_S_MAX * 3) as limit:
                await probe(fleet, name, fleet.calm_since_s)
            if limit.cancelled_caught:
                fleet.note("resumed", fault=name, after_s=RESUMED_S_MAX * 3)
        else:
            tasks.start_soon(probe, fleet, name, fleet.calm_since_s)
        if number % REST_EVERY == REST_EVERY - 1:
            await anyio.sleep(PEACE_S)
    say(f"{now_s() - began_s:6.1f} s  no more faults")
    await _rest(fleet, plan, say)
    await fleet.stop()


async def _rest(fleet: Fleet, plan: Plan, say: Callable[[str], None]) -> None:
    """Waits until every job is inserted and finished, and a little longer."""
    with anyio.move_on_after(plan.for_s + REST_S_MAX):
        while any(producer.process.poll() is None for producer in fleet.producers):
            await anyio.sleep(0.05)
    say("all is inserted")
    with anyio.move_on_after(REST_S_MAX) as rest:
        while True:
            try:
                async with fleet.connection() as db:
                    while await db.fetchval(_LEFT):
                        await anyio.sleep(0.1)
                break
            except AWAY:
                await anyio.sleep(0.1)
    say("not all is done" if rest.cancelled_caught else "all is done")
    await anyio.sleep(PEACE_S)


_LEFT = """SELECT EXISTS (SELECT FROM pgworkd.jobs
                          WHERE status IN ('pending', 'running', 'failed', 'blocked') AND schedule IS NULL)"""
