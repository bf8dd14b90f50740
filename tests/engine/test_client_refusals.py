"""Arguments that the client refuses before it uses the connection."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy

from pgworkd.client import NewJob, Workflow, batch, enqueue, enqueue_many, enqueue_once
from pgworkd.errors import DELAY_S_MAX, InvalidPayload, UsageError
from tests.kits.drivers import Untouchable, refused_at_the_call

BAD: list[tuple[dict[str, Any], str]] = [
    ({"queue": ""}, "queue must be text of 1 to 200 characters"),
    ({"queue": "q" * 201}, "queue must be text of 1 to 200"),
    ({"queue": None}, "queue must be text"),
    ({"queue": b"q"}, "queue must be text"),
    ({"kind": ""}, "kind must be text of 1 to 200"),
    ({"kind": "k" * 201}, "kind must be text of 1 to 200"),
    ({"kind": 7}, "kind must be text"),
    ({"dedupe_key": ""}, "dedupe_key must be text of 1 to 512"),
    ({"dedupe_key": "d" * 513}, "dedupe_key must be text of 1 to 512"),
    ({"dedupe_key": UUID(int=1)}, "dedupe_key must be text"),
    ({"serialize_key": ""}, "serialize_key must be text of 1 to 512"),
    ({"serialize_key": "s" * 513}, "serialize_key must be text of 1 to 512"),
    ({"serialize_key": 7}, "serialize_key must be text"),
    ({"limit_key": ""}, "limit_key must be text of 1 to 512"),
    ({"limit_key": "l" * 513}, "limit_key must be text of 1 to 512"),
    ({"on_retry": "later", "serialize_key": "s"}, 'on_retry must be "hold" or "yield"'),
    ({"on_retry": None}, 'on_retry must be "hold" or "yield"'),
    ({"on_retry": ["yield"], "serialize_key": "s"}, 'on_retry must be "hold" or "yield"'),
    ({"on_retry": "yield"}, 'on_retry="yield" needs a serialize_key'),
    ({"dedupe_for": 60}, "dedupe_for needs a dedupe_key"),
    ({"dedupe_for": 0, "dedupe_key": "d"}, "dedupe_for is 0: pass more"),
    ({"dedupe_for": timedelta(0), "dedupe_key": "d"}, "dedupe_for is 0: pass more"),
    ({"dedupe_for": -1, "dedupe_key": "d"}, "dedupe_for is"),
    ({"dedupe_for": float("nan"), "dedupe_key": "d"}, "dedupe_for is nan"),
    ({"dedupe_for": DELAY_S_MAX + 1, "dedupe_key": "d"}, "dedupe_for is"),
    ({"dedupe_for": "1h", "dedupe_key": "d"}, "dedupe_for is a str"),
    ({"dedupe_until": datetime(2030, 1, 1, tzinfo=UTC)}, "dedupe_until needs a dedupe_key"),
    ({"dedupe_until": datetime(2200, 1, 1, tzinfo=UTC), "dedupe_key": "d"}, "dedupe_until must be .* 1970 to 2199"),
    (
        {"dedupe_until": datetime(2030, 1, 1, tzinfo=UTC), "dedupe_for": 1, "dedupe_key": "d"},
        "dedupe_until and dedupe_for are both given",
    ),
    ({"priority": 2**31}, "priority must be an int from -2147483648 to 2147483647"),
    ({"priority": -(2**31) - 1}, "priority must be an int"),
    ({"priority": 10**5000}, "priority must be an int"),
    ({"priority": 1.0}, "priority must be an int"),
    ({"priority": True}, "priority must be an int"),
    ({"priority": None}, "priority must be an int"),
    ({"max_attempts": 0}, "max_attempts must be an int from 1 to 1000"),
    ({"max_attempts": -1}, "max_attempts must be"),
    ({"max_attempts": 1001}, "max_attempts must be"),
    ({"max_attempts": 2**31}, "max_attempts must be"),
    ({"max_attempts": "3"}, "max_attempts must be"),
    ({"max_attempts": True}, "max_attempts must be"),
    ({"run_at": "2030-01-01T00:00:00Z"}, "run_at must be a datetime"),
    ({"run_at": datetime(2030, 1, 1, tzinfo=UTC).date()}, "run_at must be a datetime"),
    ({"run_at": datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)}, "run_at must be .* 1970 to 2199"),
    ({"run_at": datetime(2200, 1, 1, tzinfo=UTC)}, "run_at must be .* 1970 to 2199"),
    (
        {"run_at": datetime(2199, 12, 31, 23, tzinfo=timezone(timedelta(hours=-2)))},
        "run_at must be .* 1970 to 2199",
    ),
    (
        {"run_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
        "run_at must be .* 1970 to 2199",
    ),
    (
        {"run_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=12)))},
        "run_at must be .* 1970 to 2199",
    ),
    ({"expires_at": datetime(2200, 1, 1, tzinfo=UTC)}, "expires_at must be a datetime from 1970 to 2199"),
    ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 0}, "run_at and delay are both given"),
    ({"delay": -1e-9}, "delay is"),
    ({"delay": timedelta(microseconds=-1)}, "delay is"),
    ({"delay": DELAY_S_MAX + 1}, "delay is"),
    ({"delay": float("nan")}, "delay is nan"),
    ({"delay": float("inf")}, "delay is inf"),
    ({"delay": True}, "delay is a bool"),
    ({"delay": "10s"}, "delay is a str"),
    ({"timeout_s": 0}, "timeout_s is 0"),
    ({"timeout_s": 0.0}, "timeout_s is 0"),
    ({"timeout_s": timedelta(0)}, "timeout_s is 0"),
    ({"timeout_s": -1}, "timeout_s is"),
    ({"timeout_s": DELAY_S_MAX + 1}, "timeout_s is"),
    ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ({"timeout_s": "60"}, "timeout_s is a str"),
    ({"payload": [1]}, "payload is of type list: an object is needed"),
    ({"payload": '{"n": 1}'}, "payload is of type str: an object is needed"),
    ({"payload": {1: 1}}, "payload has a key of type int"),
    ({"payload": {"a": 10**4300}}, "payload.a is an integer of more than 4300 digits"),
    ({"payload": {"a": "x" * 2**20}}, "payload takes 1,048,584 bytes"),
    ({"meta": ["tag"]}, "meta is of type list: an object is needed"),
    (
        {"after": [str(UUID(int=7))]},
        r"after must be a list of job ids, UUIDs as .* returns them; UUID\(text\) makes one",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_arguments_are_refused_at_the_call(fields: dict[str, Any], message: str) -> None:
    error = refused_at_the_call(fields, message)
    assert isinstance(error, InvalidPayload) or not {"payload", "meta"} & set(fields)


@pytest.mark.parametrize(
    "call",
    [
        lambda **options: enqueue(Untouchable(), "q", **options),
        lambda **options: enqueue_once(Untouchable(), UUID(int=7), "q", **options),
        lambda **options: Workflow().add("step", "q", **options),
        lambda **options: batch(Untouchable(), "b", **options),
    ],
    ids=["enqueue", "enqueue_once", "Workflow.add", "batch"],
)
def test_a_misspelt_keyword_is_named_with_what_is_meant(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'dedupe_kye': did you mean 'dedupe_key'\?$"):
        call(dedupe_kye="k")
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'zzz'$"):
        call(zzz=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_duplicate": "skip"}, "on_duplicate needs a dedupe_key"),
        ({"on_duplicate": "skip", "dedupe_key": None}, "on_duplicate needs a dedupe_key"),
        ({"on_duplicate": "skip", "dedupe_key": ""}, "dedupe_key must be text of 1 to 512"),
        ({"on_duplicate": "ignore", "dedupe_key": "d"}, "on_duplicate must be one of raise, skip, replace, reschedule"),
        ({"on_duplicate": True, "dedupe_key": "d"}, "on_duplicate must be one of"),
        ({"on_duplicate": ["skip"], "dedupe_key": "d"}, "on_duplicate must be one of"),
    ],
)
def test_bad_on_duplicate_arguments_are_refused_at_the_call(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        enqueue(Untouchable(), "q", **options)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([{"queue": "q", "on_duplicate": "skip"}], r"^jobs\[0\] is not a job: .*'on_duplicate'"),
        ([{"queue": "q", "dealy": 5}], r"^jobs\[0\] is not a job: .*'dealy': did you mean 'delay'\?$"),
        ([NewJob("q"), {"payload": {}}], r"^jobs\[1\] is not a job: .*'queue'"),
        ([{"queue": "q", 7: 1}], r"^jobs\[0\] is not a job: "),
        ([None], r"^jobs\[0\] is not a job: .*mapping"),
        ([("q", {})], r"^jobs\[0\] is not a job: .*mapping"),
        ({"queue": "q"}, r"^jobs\[0\] is not a job: .*mapping, not str"),  # one mapping instead of a list of them
    ],
)
def test_objects_that_are_no_jobs_are_refused_at_the_call(jobs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        enqueue_many(Untouchable(), jobs)


class NotOurs:
    """From a module that the client does not know."""


@pytest.mark.parametrize(
    "conn",
    [None, "postgresql://localhost", NotOurs(), sqlalchemy.create_engine("postgresql+psycopg://"), psycopg],
    ids=lambda conn: type(conn).__name__,
)
def test_unknown_connection_types_are_refused_with_the_supported_ones(conn: Any) -> None:
    calls: list[Callable[[], Any]] = [lambda: enqueue(conn, "q"), lambda: enqueue_many(conn, [])]
    for call in calls:
        with pytest.raises(UsageError, match=r"cannot enqueue on a .*: pass one of asyncpg.Connection, .*django"):
            call()
