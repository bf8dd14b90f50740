"""Remote workers, and gateways that are killed, frozen, deployed anew: who lives is never presumed dead, who dies is.

Each second of an example every live worker whose renewal is due tries it, which succeeds while a gateway is up; each
holder of a lease of its own does the same; then a daemon rescues and fails what is overdue.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.kits.models import World, examples, playing
from tests.kits.remote import Waiter, beat, claim_for, extend, overdue, registered, standing
from tests.kits.verbs import Db, clock, heartbeat, insert, rescue, worker

pytestmark = pytest.mark.slow("a model against the database")

GATEWAY_S, DAEMON_S = 30.0, 30.0
"""Their leases; each renews its own every third of it."""
WORKERS_S, HOLDERS_S = (10.0, 30.0, 90.0), (12.0, 60.0)
SETTLED_S = 240
"""With a gateway up for as long, all that died has been taken back."""
HICCUP_S = 14
"""For as long a gateway may be frozen without noticing it."""


class Event(NamedTuple):
    """After so many seconds, this happens to that gateway or worker."""

    after_s: int
    what: str
    which: int


EVENTS = st.lists(
    st.builds(
        Event,
        after_s=st.integers(0, 45),
        what=st.sampled_from(["kill", "freeze", "thaw", "hiccup", "hiccup", "start", "sign off", "die", "die holding"]),
        which=st.integers(0, 2),
    ),
    min_size=3,
    max_size=12,
)


class Gateway:
    """A gateway: up or frozen."""

    def __init__(self, worker_id: int, now: int) -> None:
        self.worker_id = worker_id
        self.frozen = False
        self.thaws_at: int | None = None
        self.beats_at = now + GATEWAY_S / 3


class Leased:
    """A remote worker, or the holder of an attempt with a lease of its own."""

    def __init__(self, lease_s: float, job_id: uuid.UUID, worker_id: int = 0) -> None:
        self.lease_s, self.job_id, self.worker_id = lease_s, job_id, worker_id
        self.alive = True
        self.renew_at = lease_s / 3


class RemoteWorld(World):
    """One example after the other; sessions are not used."""

    empty = "TRUNCATE pgworkd.jobs, pgworkd.finished_jobs, pgworkd.workers, pgworkd.audit"

    async def plant(self, *how: Any) -> None:
        """Remote workers with a job each, holders of attempts, and a gateway."""
        db = self.observer
        self.gateways = [Gateway(await registered(db, "gateway", GATEWAY_S), 0)]
        self.daemon = await worker(db, DAEMON_S)
        self.workers_, self.holders, self.up_since = [], [], 0
        for lease_s in WORKERS_S:
            await insert(db, 1)
            who = await registered(db, lease_s=lease_s)
            (job_id,) = (await claim_for(db, Waiter(who)))[who]
            self.workers_.append(Leased(lease_s, job_id, who))
        patron = await registered(db, lease_s=3600)
        for lease_s in HOLDERS_S:
            await insert(db, 1)
            (job_id,) = (await claim_for(db, Waiter(patron, 1, lease_s)))[patron]
            self.holders.append(Leased(lease_s, job_id, await standing(db)))

    async def live(self, events: list[Event]) -> None:
        """Plays the events, then lets a gateway be up until everything is settled."""
        second = 0
        for event in events:
            for _ in range(event.after_s):
                second += 1
                await self._second(second)
            await self._happens(event, second)
        if not any(not each.frozen for each in self.gateways):
            await self._happens(Event(0, "start", 0), second)
        for _ in range(SETTLED_S):
            second += 1
            await self._second(second)
        for each in [*self.workers_, *self.holders]:
            assert await self._runs(each) == each.alive, f"lease of {each.lease_s} s, alive: {each.alive}"

    async def _second(self, now: int) -> None:
        db = self.observer
        await clock(now, db)
        for gateway in self.gateways:
            if gateway.thaws_at is not None and now >= gateway.thaws_at:
                gateway.frozen, gateway.thaws_at = False, None
            if not gateway.frozen and now >= gateway.beats_at:
                if await heartbeat(db, gateway.worker_id) is None:  # it was frozen for longer than its lease
                    gateway.worker_id = await registered(db, "gateway", GATEWAY_S)
                gateway.beats_at = now + GATEWAY_S / 3
        if now % 10 == 0:
            await heartbeat(db, self.daemon)
        await self._judge(now)  # whoever could not renew has not had the time to try again
        if any(not each.frozen for each in self.gateways):
            for each in self.workers_:
                if each.alive and now >= each.renew_at:
                    assert await beat(db, each.worker_id) == {each.worker_id: "renewed"}, f"at {now}"
                    each.renew_at = now + each.lease_s / 3
            for each in self.holders:
                if each.alive and now >= each.renew_at:
                    assert await extend(db, each.job_id) == pytest.approx(each.lease_s), f"at {now}"
                    each.renew_at = now + each.lease_s / 3
        await self._judge(now)

    async def _judge(self, now: int) -> None:
        taken = [*await rescue(self.observer, self.daemon), *await overdue(self.observer)]
        wrong = [each.lease_s for each in [*self.workers_, *self.holders] if each.alive and each.job_id in taken]
        assert not wrong, f"taken from the living at {now}: leases of {wrong} s"

    async def _happens(self, event: Event, now: int) -> None:
        db = self.observer
        gateway = self.gateways[event.which % len(self.gateways)] if self.gateways else None
        match event.what:
            case "kill" if gateway:
                self.gateways.remove(gateway)
            case "sign off" if gateway and not gateway.frozen:
                self.gateways.remove(gateway)
                await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", gateway.worker_id)
            case "freeze" | "thaw" if gateway:
                gateway.frozen, gateway.thaws_at = event.what == "freeze", None
            case "hiccup" if gateway and not gateway.frozen:
                gateway.frozen, gateway.thaws_at = True, now + HICCUP_S - event.after_s % 8
            case "start":
                self.gateways.append(Gateway(await registered(db, "gateway", GATEWAY_S), now))
            case "die":
                self.workers_[event.which].alive = False
            case "die holding":
                self.holders[event.which % 2].alive = False

    async def _runs(self, each: Leased) -> bool:
        sql = "SELECT status = 'running' FROM pgworkd.jobs WHERE id = $1"
        return bool(await self.observer.fetchval(sql, each.job_id))

    async def play(self, steps: Any, *how: Any) -> None:
        """One example."""
        await self.observer.execute(self.empty)
        await clock(0, self.observer)
        await self.plant()
        await self.live(steps)

    async def call(self, step: Any, db: Db) -> None:
        """Not used."""

    async def check(self) -> None:
        """Not used."""

    async def finish(self) -> None:
        """Not used."""


def test_the_living_are_never_presumed_dead_and_the_dead_always_are(server_dsn: str) -> None:
    with playing(server_dsn, RemoteWorld) as play:

        @examples(25, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
        @given(EVENTS)
        def plays(events: list[Event]) -> None:
            play(events)

        plays()
