"""The registry: the options of a handler and their bounds, and how they configure its queue and schedule."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pgworkd import App, Backoff, DeadJob
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.options import DaemonOptions
from pgworkd.engine.registry import CONCURRENCY_DEFAULT
from pgworkd.errors import UsageError
from pgworkd.process import cpus
from pgworkd.remote.client import GatewayAddress
from pgworkd.remote.daemon import RemoteDaemon
from tests.kits.apps import registered


async def nothing() -> None: ...


def blocking() -> None: ...


# Bounds.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency of handler 'k' is 0: give a whole number from 1 to 10,000"),
        ({"concurrency": 10_001}, "concurrency of handler 'k' is 10001"),
        ({"concurrency": True}, "concurrency of handler 'k' is True"),
        ({"concurrency": "5"}, "concurrency of handler 'k' is '5'"),
        ({"concurrency": 2.5}, "concurrency of handler 'k' is 2.5"),
        ({"concurrency": float("nan")}, "concurrency of handler 'k' is nan"),
        ({"max_attempts": 0}, "max_attempts of handler 'k' is 0: give a whole number from 1 to 1,000"),
        ({"max_attempts": 1001}, "max_attempts of handler 'k' is 1001"),
        ({"max_attempts": 1.5}, "max_attempts of handler 'k' is 1.5"),
        ({"timeout_s": 0}, "timeout_s of handler 'k' is 0: give a number from 0.001 to 31,622,400"),
        ({"timeout_s": -1}, "timeout_s of handler 'k' is -1"),
        ({"timeout_s": float("nan")}, "timeout_s of handler 'k' is nan"),
        ({"timeout_s": float("inf")}, "timeout_s of handler 'k' is inf"),
        ({"timeout_s": timedelta(days=400)}, "timeout_s of handler 'k' is 34560000.0"),
        ({"transaction": 1}, "transaction of handler 'k' is 1: give True or False"),
        ({"transaction": True, "max_attempts": 1}, "transaction=True of handler 'k' does not go with max_attempts=1"),
        ({"transaction": True, "every": 60}, "transaction=True of handler 'k' does not go with `every`"),
        ({"queue": ""}, "queue '': give a name of 1 to 200 characters, without NUL"),
        ({"queue": "q" * 201}, "give a name of 1 to 200 characters"),
        ({"queue": 7}, "queue 7: give a name"),
        ({"backoff": -1}, "backoff"),
        ({"backoff": []}, "backoff"),
        ({"backoff": {"bse_s": 1}}, "unknown backoff setting 'bse_s'"),
        ({"backoff": "soon"}, "backoff"),
    ],
    ids=str,
)
def test_out_of_bounds_options_are_rejected(options: dict[str, Any], message: str) -> None:
    app = App()
    with pytest.raises(UsageError) as caught:
        app.handler("k", **options)(nothing)
    assert message in str(caught.value)
    assert app.handlers == {}


@pytest.mark.parametrize("kind", ["", "k" * 201, "a\0b", None, 7, "\ud800"], ids=repr)
def test_a_kind_that_violates_the_tables_constraints_is_rejected(kind: Any) -> None:
    with pytest.raises(UsageError, match="kind "):
        App().handler(kind)(nothing)


def test_the_bounds_are_inclusive() -> None:
    widest = registered(nothing, concurrency=10_000, max_attempts=1_000, timeout_s=31_622_400, queue="q" * 200)
    assert (widest.concurrency, widest.max_attempts, widest.timeout_s) == (10_000, 1_000, 31_622_400)
    narrowest = registered(nothing, concurrency=1, max_attempts=1, timeout_s=timedelta(milliseconds=1))
    assert (narrowest.concurrency, narrowest.max_attempts, narrowest.timeout_s) == (1, 1, 0.001)
    plain_one = registered(nothing)
    assert (plain_one.queue, plain_one.max_attempts, plain_one.timeout_s) == ("k", 3, None)
    assert plain_one.backoff == Backoff()


# Concurrency of queues.


def _app(*handlers: tuple[str, str, int | None]) -> App:
    app = App()
    for kind, queue, concurrency in handlers:
        app.handler(kind, queue=queue, concurrency=concurrency)(nothing)
    return app


@pytest.mark.parametrize(
    ("handlers", "queues"),
    [
        ((), {}),
        ((("a", "q", None),), {"q": CONCURRENCY_DEFAULT}),
        ((("a", "q", 3), ("b", "p", 4)), {"q": 3, "p": 4}),
        ((("a", "q", 3), ("b", "q", None)), {"q": 3}),
        ((("a", "q", None), ("b", "q", 3)), {"q": 3}),
        ((("a", "q", None), ("b", "q", 30)), {"q": 30}),
        ((("a", "q", 3), ("b", "q", 3)), {"q": 3}),
        ((("a", "q", None), ("b", "q", None)), {"q": CONCURRENCY_DEFAULT}),
    ],
)
def test_a_queue_takes_its_concurrency_from_any_of_its_handlers(
    handlers: tuple[Any, ...], queues: dict[str, int]
) -> None:
    assert _app(*handlers).queues() == queues


@pytest.mark.parametrize("between", [(), (("c", "q", None),)])
def test_conflicting_concurrencies_of_a_queue_are_rejected_naming_both(between: tuple[Any, ...]) -> None:
    app = _app(("a", "q", 3), *between, ("b", "q", 4))
    with pytest.raises(UsageError, match=r"queue 'q' is given two concurrencies: 3 by kind 'a', 4 by kind 'b'"):
        app.queues()


# Transactions.


@pytest.mark.parametrize("options", [{}, {"run_in": "process"}], ids=str)
def test_only_a_handler_in_the_loop_can_run_in_the_transaction_that_claims(options: dict[str, Any]) -> None:
    app = App()
    with pytest.raises(UsageError, match=r"transaction=True of handler 'k' needs an `async def`, .*\.blocking"):
        app.handler("k", transaction=True, **options)(blocking)
    assert app.handlers == {}


def test_all_handlers_of_a_queue_run_in_the_transactions_that_claim_or_none() -> None:
    app = App()
    app.handler("a", queue="q", transaction=True)(nothing)
    app.handler("b", queue="q")(nothing)
    app.handler("c")(nothing)
    said = r"queue 'q' has handlers with transaction=True \('a'\) and without \('b'\): a claim does not know .* its own"
    with pytest.raises(UsageError, match=said):
        app.slots(None)
    with pytest.raises(UsageError, match=said):
        app.slots({"c": 1})
    assert not app.runs_in_claims("c")


def test_no_daemon_without_a_database_runs_jobs_in_the_transactions_that_claim() -> None:
    app = App()
    app.handler("a", transaction=True)(nothing)
    options = DaemonOptions(ConnectionOptions("postgresql://"))
    with pytest.raises(UsageError, match="transaction=True of handler 'a' needs the database, and this"):
        RemoteDaemon(app, options, GatewayAddress("https://jobs.example.com", "token", 5.0))


def test_process_handlers_default_to_one_slot_per_core() -> None:
    app = App()
    app.handler("p", run_in="process")(blocking)
    app.handler("more", run_in="process", concurrency=99)(blocking)
    cores = cpus.available()
    assert app.queues() == {"p": cores, "more": 99}
    app.handler("t", queue="p")(blocking)
    assert app.queues()["p"] == min(cores, CONCURRENCY_DEFAULT)


# Recurring.


def test_a_schedule_rule_is_parsed_at_registration() -> None:
    rule = registered(nothing, every="0 7 * * *", timezone="Europe/Berlin", missed="all").recurrence
    assert rule is not None
    assert (rule.cron, rule.every_s, rule.timezone, rule.missed) == ("0 7 * * *", None, "Europe/Berlin", "all")
    interval = registered(nothing, every=timedelta(minutes=5), payload={"full": True})
    assert interval.recurrence is not None
    assert (interval.recurrence.cron, interval.recurrence.every_s) == (None, 300)
    assert interval.schedule_payload == {"full": True}
    assert registered(nothing).recurrence is None


# Hooks.


def test_on_dead_hooks_are_kept_in_registration_order() -> None:
    app = App()

    @app.on_dead
    async def first(dead: DeadJob) -> None: ...

    @app.on_dead
    def second(dead: DeadJob) -> None: ...

    assert app.dead_hooks == [first, second]
