"""The life of a job: its states, and its attempts to scale, of what the database has kept and nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgworkd.admin.queries import JobDetails
from pgworkd.core.job import Status
from pgworkd.dashboard.draw import attempts, states
from tests.kits import verbs as v
from tests.kits.pages import viewing
from tests.kits.verbs import Db

T = datetime(2027, 3, 4, 12, 0, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return T + timedelta(seconds=seconds)


def job(status: str, errors: list[dict[str, Any]] | str = "[]", **changes: Any) -> JobDetails:
    """A job that was created at T; instants are seconds after that."""
    times = {name: after(value) for name, value in changes.items() if name.endswith("_at")}
    if isinstance(errors, list):
        kept = [each | {"at": after(each["at"]).isoformat()} for each in errors]
        errors = json.dumps(kept)
    given = {**dict.fromkeys(JobDetails._fields), "created_at": T, "attempts": 0, **changes, **times}
    return JobDetails(**given | {"status": status, "errors": errors})  # type: ignore[arg-type]


def drawn(one: JobDetails, now: float) -> list[tuple[str, str, list[tuple[str, float, float]]]]:
    """The lanes; pieces as their kinds, and seconds from and to."""
    found = attempts.timeline(one, after(now))
    assert found is not None
    whole = (found.until - found.since).total_seconds() / 100
    return [
        (
            lane.name,
            lane.outcome,
            [(p.kind, round(p.x * whole, 2), round((p.x + p.width) * whole, 2)) for p in lane.pieces],
        )
        for lane in found.lanes
    ]


def test_a_job_that_has_completed_at_once() -> None:
    one = job("completed", run_at=10, claimed_at=30, started_at=40, finished_at=100, attempts=1)
    pieces = [("held", 0, 10), ("wait", 10, 30), ("claimed", 30, 40), ("run", 40, 100)]
    assert drawn(one, 1e6) == [("1", "completed", pieces)]


def test_failures_and_what_is_not_known_between_them() -> None:
    errors = [{"attempt": 1, "at": 20, "ran_s": 10}, {"attempt": 2, "at": 60, "ran_s": 5, "type": "x"}]
    one = job("failed", errors, run_at=128, claimed_at=50, failed_at=60, attempts=2)
    assert drawn(one, 80) == [
        ("1", "failed", [("between", 0, 10), ("run", 10, 20)]),
        ("2", "failed", [("between", 20, 50), ("claimed", 50, 55), ("run", 55, 60)]),
        ("next", "", [("backoff", 60, 128)]),
    ]
    one = one._replace(status="completed", run_at=after(128), claimed_at=after(130), started_at=after(130))
    assert drawn(one._replace(finished_at=after(200), attempts=3), 1e6)[2] == (
        "3",
        "completed",
        [("backoff", 60, 128), ("wait", 128, 130), ("run", 130, 200)],
    )


def test_what_is_dead_was_due_when_its_last_attempt_was() -> None:
    errors = [{"attempt": 1, "at": 20, "ran_s": 10}, {"attempt": 2, "at": 100, "ran_s": 30}]
    one = job("dead", errors, run_at=50, claimed_at=60, failed_at=100, attempts=2)
    assert drawn(one, 1e6)[1] == (
        "2",
        "dead",
        [("backoff", 20, 50), ("wait", 50, 60), ("claimed", 60, 70), ("run", 70, 100)],
    )
    assert len(drawn(one, 1e6)) == 2


def test_a_lost_run_has_a_length_only_if_it_was_the_last() -> None:
    errors = [{"attempt": 1, "at": 20, "type": "lost"}, {"attempt": 2, "at": 100, "type": "lost"}]
    one = job("failed", errors, run_at=90, claimed_at=60, failed_at=100, attempts=2)
    assert drawn(one, 200)[:2] == [
        ("1", "lost", [("between", 0, 20)]),
        ("2", "lost", [("between", 20, 60), ("run", 60, 100)]),
    ]


def test_attempts_that_are_not_kept_are_one_lane() -> None:
    errors = [{"attempt": 4, "at": 100, "ran_s": 10}, {"attempt": 7, "at": 200, "ran_s": 10}]
    one = job("dead", errors, run_at=150, claimed_at=185, failed_at=200, attempts=7)
    lanes = drawn(one, 1e6)
    assert [lane[0] for lane in lanes] == ["1 to 3", "4", "5 to 6", "7"]
    assert lanes[0][2] == [("unknown", 0, 90)]
    assert lanes[2][2] == [("unknown", 100, 185)]
    given_back = job("pending", run_at=60, claimed_at=40, attempts=1)
    assert drawn(given_back, 64.5) == [
        ("1", "", [("between", 0, 40)]),
        ("next", "", [("backoff", 40, 60), ("wait", 60, 64)]),
    ]


@pytest.mark.parametrize(
    ("one", "now", "lanes"),
    [
        (job("pending", run_at=0), 128, [("next", "", [("wait", 0, 128)])]),
        (job("pending", run_at=512), 128, [("next", "", [("held", 0, 512)])]),
        (job("blocked", run_at=0), 128, [("next", "", [("blocked", 0, 128)])]),
        (
            job("running", run_at=0, claimed_at=64, attempts=1),
            128,
            [("1", "running", [("wait", 0, 64), ("run", 64, 128)])],
        ),
        (job("expired", run_at=0, finished_at=50), 1e6, [("then", "expired", [("between", 0, 50)])]),
    ],
)
def test_what_has_not_ended_goes_on_until_now(one: JobDetails, now: float, lanes: Any) -> None:
    assert drawn(one, now) == lanes


def test_a_drawing_lasts_although_time_goes_on() -> None:
    one = job("running", run_at=0, claimed_at=1, attempts=1)
    assert len({str(attempts.timeline(one, after(3600 + second))) for second in range(10)}) <= 2


@pytest.mark.parametrize(
    "errors",
    [
        '{"a": 1}',
        "[1, null, [2]]",
        '[{"attempt": "x", "at": "y"}]',
        '[{"attempt": 1, "at": 5}]',
        '[{"attempt": 1, "at": "2027-03-04T12:00:09+00:00", "ran_s": 1e308}]',
        '[{"attempt": 1e400, "at": ""}]',
    ],
)
def test_entries_that_other_programs_wrote_are_left_out(errors: str) -> None:
    assert [lane[0] for lane in drawn(job("pending", errors, run_at=0), 9)] == ["next"]


def test_every_state_is_in_the_diagram_and_marked_when_it_is_where_the_job_is() -> None:
    assert set(states.PLACES) == {str(each) for each in Status}
    for name in states.PLACES:
        found = states.diagram(name)
        assert [box.name for box in found.boxes if box.is_now] == [name]
        assert f"is {name}." in found.says
    assert "From here it can become" in states.diagram("failed").says
    assert states.diagram("completed").says.endswith("That is its end.")


async def test_the_page_of_a_job_shows_its_attempts(dsn: str, db: Db) -> None:
    worker_id, job_id = await v.worker(db, 3600), await v.one(db)
    await v.claim(db, worker_id)
    await v.fail(db, [job_id], delay_s=0.0)
    await v.claim(db, worker_id)
    await v.complete(db, [job_id], 2)
    async with viewing(dsn, {"read": None}) as client:
        page = (await client.get(f"/jobs/{job_id}")).text
    assert "The job is completed. That is its end." in page
    assert page.count('<span class="outcome failed">failed</span>') == 1
    assert page.count('<span class="outcome completed">completed</span>') == 1
