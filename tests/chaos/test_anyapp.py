"""Generated applications: a seed determines each of them; a short run of `python -m tests.anyapp`."""

from __future__ import annotations

import dataclasses

import pytest

from pgworkd import App
from tests.anyapp import plan_of
from tests.chaos.__main__ import report
from tests.chaos.anyapp import AnyProducer, application, register
from tests.chaos.drive import run, workplace

pytestmark = pytest.mark.slow("daemons under faults")

SEED = 3


def test_a_seed_determines_an_application_and_its_traffic() -> None:
    for seed in range(200):
        queues = application(seed)
        assert queues == application(seed)
        assert plan_of(seed) == plan_of(seed)
        served = register(App(), queues).queues()
        assert {queue.name: queue.concurrency for queue in queues}.items() <= served.items()
        one, other = (AnyProducer("p", seed, queues) for _ in range(2))
        jobs = [[producer.choose().__name__ for _ in range(20)] for producer in (one, other)]
        assert jobs[0] == jobs[1]
        assert [one.make() for _ in range(5)] == [other.make() for _ in range(5)]


def test_generated_applications_differ_in_every_drawn_property() -> None:
    queues = [queue for seed in range(100) for queue in application(seed)]
    assert {role for queue in queues for role in queue.roles} >= {
        "plain",
        "transact",
        "charge",
        "thread",
        "stubborn",
        "forks",
        "process",
    }
    limits = {name for queue in queues for name, _ in queue.limits}
    assert limits == {"max_running", "limit_per_key", "rate", "rate_period_s", "rate_burst", "fair"}
    assert {queue.every_s for queue in queues} == {None, 1, 2, 5}


async def test_a_generated_application_runs_without_violations(request: pytest.FixtureRequest) -> None:
    plan = plan_of(SEED, for_s=8.0, faults=3, pg_bin=request.config.getoption("--pg-bin"))
    plan = dataclasses.replace(plan, jobs=150)
    said: list[str] = []
    with workplace() as directory:
        lines, violations = report(await run(plan, directory, said.append))
    assert violations == 0, "\n".join([*said, *lines, f"python -m tests.anyapp --minutes 0 --seed {SEED}"])
