"""An application that inserts jobs of every sort: python -m tests.chaos.producer DSN JOBS SECONDS SEED

Before each call it records the tokens of the jobs to be inserted, and afterwards the result: acknowledged, or
unknown.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
from typing import Any

import anyio
import asyncpg

from pgworkd.client import NewJob, batch, enqueue, enqueue_many
from tests.chaos.history import AWAY, now_s, of_this_process
from tests.chaos.others import FOREIGN, QUEUES
from tests.chaos.workload import ATTEMPTS_MAX, DEADLY, FORKS, WITHOUT_DATABASE

CALL_S_MAX = 5.0
KEYS = 5
OTHERS = os.environ.get(QUEUES, "").split()
TRANSACT = "plain" if WITHOUT_DATABASE in os.environ else "transact"


class Producer:
    """Generates random calls and executes them."""

    def __init__(self, name: str, seed: int) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - to be repeatable
        self._name = name
        self._tokens = 0
        self.plans = {
            self.single: 30,
            self.many: 14,
            self.keyed: 12,
            self.limited: 10,
            self.once: 8,
            self.late: 6,
            self.flow: 5,
            self.tree: 2,
            self.unreadable: 2,
        }
        if OTHERS:
            self.plans[self.elsewhere] = 40

    def payload(self, **more: Any) -> dict[str, Any]:
        self._tokens += 1
        return {"token": f"{self._name}-{self._tokens}", **more}

    def quick(self, **more: Any) -> dict[str, Any]:
        longest_s = self._dice.choice((0.02, 1.0))
        return self.payload(seconds=round(self._dice.uniform(0, longest_s), 4), **more)

    def single(self) -> list[NewJob]:
        """One job of any kind."""
        dice = self._dice
        return dice.choice(
            [
                lambda: [NewJob("mixed", self.payload(seconds=dice.uniform(0.5, 2.5)), kind="plain")],
                lambda: [NewJob("mixed", self.quick(fails=dice.randint(1, 2)), kind="plain")],
                lambda: [NewJob("mixed", self.quick(snoozes=True), kind="plain", priority=dice.randint(-1, 1))],
                lambda: [NewJob("mixed", self.quick(hopeless=dice.random() < 0.2), kind="plain")],
                lambda: [NewJob("mixed", self.payload(seconds=dice.uniform(0, 1)), kind=TRANSACT)],
                lambda: [NewJob("mixed", self.payload(seconds=dice.uniform(0, 1.5)), kind="charge")],
                lambda: [NewJob("mixed", self.payload(seconds=dice.uniform(0.3, 1.5)), kind="stubborn")],
                lambda: [NewJob("mixed", self.payload(seconds=dice.uniform(0.1, 1.2)), kind="thread")],
                lambda: [NewJob("mixed", self.quick(how=dice.choice(FORKS)), kind="forks")],
                lambda: [NewJob("mixed", self.payload(seconds=dice.uniform(3, 6)), kind="plain")],
                lambda: [NewJob("mixed", self.quick(), kind="plain", delay=dice.uniform(0, 2))],
                lambda: [NewJob("process", self.payload(how=dice.choice([*DEADLY, None]), seconds=0.05))],
            ]
        )()

    def many(self) -> list[NewJob]:
        """Many jobs in one call."""
        return [NewJob("mixed", self.quick(), kind="plain") for _ in range(self._dice.randint(10, 40))]

    def keyed(self) -> list[NewJob]:
        """Several jobs with a few serialize_keys."""
        dice, keys = self._dice, [f"k{self._dice.randrange(KEYS)}" for _ in range(3)]
        kinds = ("plain", "plain", "charge", "stubborn")  # the last two are unknown to an old release
        payload = functools.partial(self.payload, seconds=dice.uniform(0, 0.3))
        return [NewJob("mixed", payload(key=key), kind=dice.choice(kinds), serialize_key=key) for key in keys]

    def limited(self) -> list[NewJob]:
        """Several jobs for the queue with a limit."""
        return [NewJob("limited", self.payload(seconds=self._dice.uniform(0, 0.3))) for _ in range(4)]

    def elsewhere(self) -> list[NewJob]:
        """Several jobs for those who work without the application: some may run once, others fail at first."""
        dice, queue = self._dice, self._dice.choice(OTHERS)
        once, again = {"kind": "charge", "max_attempts": 1}, {"kind": "plain", "max_attempts": ATTEMPTS_MAX}
        seconds = functools.partial(dice.uniform, 0, 2.0 if queue == FOREIGN else 0.3)
        return [
            NewJob(queue, self.payload(seconds=seconds()), **dice.choice((once, again))),
            NewJob(queue, self.payload(seconds=seconds(), fails=dice.randint(0, 1)), **again),
        ]

    def late(self) -> list[NewJob]:
        """Commits long after the jobs were due."""
        return self.many()[:5]

    def once(self) -> list[NewJob]:
        """Repeats the call until it is acknowledged."""
        return [NewJob("mixed", self.quick(), kind="plain")]

    def flow(self) -> list[NewJob]:
        """Two jobs, and one that depends on both."""
        return [NewJob("mixed", self.quick(), kind="plain") for _ in range(3)]

    def tree(self) -> list[NewJob]:
        """A batch, and a child that streams from it."""
        return [NewJob("mixed", self.payload(), kind="stage") for _ in range(10)]

    def unreadable(self) -> list[NewJob]:
        """A payload that Postgres accepts and Python cannot decode."""
        return [NewJob("mixed", self.payload(), kind="plain")]

    async def carry_out(self, plan: Any, jobs: list[NewJob], connection: asyncpg.Connection[Any]) -> None:
        if plan == self.once:
            key = jobs[0].payload["token"]  # type: ignore[index]
            await enqueue(
                connection, "mixed", jobs[0].payload, kind="plain", dedupe_key=key, dedupe_for=3600, on_duplicate="skip"
            )
        elif plan == self.late:
            async with connection.transaction():
                await enqueue_many(connection, jobs)
                await anyio.sleep(self._dice.uniform(0.2, 1.5))
        elif plan == self.flow:
            async with connection.transaction():
                first = await enqueue_many(connection, jobs[:2])
                await enqueue(
                    connection, "mixed", jobs[2].payload, kind="plain", after=first, on_failed_dependency="run"
                )
        elif plan == self.tree:
            async with (
                connection.transaction(),
                batch(connection, "tree", kind="stage", queue="mixed", on_complete={"queue": "probe"}) as root,
            ):
                await root.child("below", kind="stage", queue="mixed", stream=True)
                await root.add(job.payload for job in jobs)
        elif plan == self.unreadable:
            await connection.execute(
                "INSERT INTO pgworkd.jobs (queue, kind, payload) VALUES ('mixed', 'plain', "
                "jsonb_build_object('token', $1::text, 'n', '1e5000'::jsonb))",
                jobs[0].payload["token"],  # type: ignore[index]
            )
        else:
            await enqueue_many(connection, jobs)

    def choose(self) -> Any:
        return self._dice.choices(list(self.plans), list(self.plans.values()))[0]


def _producer(name: str, seed: int) -> Producer:
    from tests.chaos import anyapp  # which imports this module

    made_up = os.environ.get(anyapp.SEED)
    return Producer(name, seed) if made_up is None else anyapp.AnyProducer(name, seed, anyapp.application(int(made_up)))


async def main(dsn: str, jobs_left: int, for_s: float, seed: int) -> None:
    """Inserts `jobs_left` jobs, spread over `for_s` seconds."""
    note = of_this_process()
    producer = _producer(os.environ["CHAOS_NAME"], seed)
    began_s, pace_s, done, call = now_s(), for_s / max(jobs_left, 1), 0, 0
    connection: asyncpg.Connection[Any] | None = None
    plan, jobs = None, []
    while done < jobs_left:
        if plan is None or plan != producer.once or not jobs:
            plan = producer.choose()
            jobs = plan()
        call += 1
        try:
            with anyio.fail_after(CALL_S_MAX):
                if connection is None or connection.is_closed():
                    connection = await asyncpg.connect(dsn, timeout=CALL_S_MAX, command_timeout=CALL_S_MAX)
                note("invoked", call=call, tokens=[job.payload["token"] for job in jobs], plan=plan.__name__)  # type: ignore[index]
                await producer.carry_out(plan, jobs, connection)
        except AWAY as error:
            note("unknown", call=call, error=f"{type(error).__name__}: {error}")
            if connection is not None:
                connection.terminate()
            connection = None
            await anyio.sleep(0.05)
            continue
        note("acknowledged", call=call)
        done += len(jobs)
        jobs = []
        await anyio.sleep(max(0.0, began_s + done * pace_s - now_s()))
    note("done")


if __name__ == "__main__":
    os.environ["CHAOS_PID"] = str(os.getpid())
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
