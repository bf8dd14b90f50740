"""`app.alert` and `app.digest` in a daemon: what is sent, what is not, and why."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from pgworkd import App, PermanentError
from pgworkd.alerts.alert import Alert
from pgworkd.alerts.digest import Digest, before, summary
from pgworkd.core.recurrence import Recurrence
from pgworkd.engine.life import signals
from pgworkd.errors import UsageError
from tests.kits.daemon import insert, running, until
from tests.kits.models import in_time

pytestmark = pytest.mark.slow("daemons that send alerts, and wait before the next")

RESULTS = "SELECT result FROM pgworkd.finished_jobs WHERE queue = 'alerts' ORDER BY finished_at"


def app_that_fails(**alert: Any) -> tuple[App, list[Alert]]:
    """An app whose jobs in `mail` die of the error in their payload, and the alerts that it sent."""
    app, sent = App(), []

    async def to(found: Alert) -> None:
        sent.append(found)

    @app.handler("mail", max_attempts=1)
    async def mail(payload: dict[str, str]) -> None:
        raise PermanentError(payload["error"])

    app.alert(**{"to": to, **alert})
    return app, sent


async def results(db: asyncpg.Connection[Any], jobs: int = 1) -> list[dict[str, Any]]:
    """What became of the alerts; waits until there are as many."""
    await until(lambda: db.fetchval("SELECT count(*) >= $1 FROM pgworkd.finished_jobs WHERE queue = 'alerts'", jobs))
    return [json.loads(row[0]) for row in await db.fetch(RESULTS)]


async def test_an_alert_says_what_died_and_what_to_do(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, sent = app_that_fails()
    async with running(app, dsn):
        job = await insert(db, "mail", '{"error": "no such user 7"}')
        (result,) = await results(db)
    assert result == {"sent": True, "to": "app_that_fails.<locals>.to", "groups": 1, "deaths": 1}
    (alert,) = sent
    (error,) = alert.errors
    assert (error.queue, error.kind, error.dead, error.sample, error.reason) == ("mail", "mail", 1, job, "new")
    assert error.place == "test_alerts.py, mail"
    database = await db.fetchval("SELECT current_database()")
    what = "new error in mail, mail: pgworkd.errors.PermanentError: no such user <n>"
    assert alert.subject == f"pgworkd {database}: {what}"
    text = alert.text()
    assert f"database:     {database}" in text
    assert "error:        pgworkd.errors.PermanentError: no such user 7\n" in text
    assert "raised in:    test_alerts.py, mail\n" in text
    assert f"pgworkd job {job}" in text
    assert f"pgworkd mute {error.group} --until 2h" in text


async def test_two_bugs_that_say_the_same_are_two_groups(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, sent = App(), []

    def first() -> None:
        raise ValueError("out of range")

    def second() -> None:
        raise ValueError("out of range")

    @app.handler("mail", max_attempts=1)
    async def mail(payload: dict[str, int]) -> None:
        (second if payload["n"] % 2 else first)()

    app.alert(to=sent.append, bundle_s=0)
    async with running(app, dsn):
        for n in range(4):
            await insert(db, "mail", json.dumps({"n": n}))
        await until(lambda: db.fetchval("SELECT sum(deaths) = 4 FROM pgworkd.error_groups"))
    rows = await db.fetch("SELECT place, deaths, pattern FROM pgworkd.error_groups ORDER BY place")
    assert [tuple(row) for row in rows] == [
        ("test_alerts.py, first", 2, "ValueError: out of range"),
        ("test_alerts.py, second", 2, "ValueError: out of range"),
    ]


@pytest.mark.parametrize(
    ("meanwhile", "why"),
    [
        ("UPDATE pgworkd.error_groups SET muted_until = now() + interval '1 h'", "the group was muted meanwhile"),
        (
            "SELECT pgworkd.discard(ARRAY(SELECT id FROM pgworkd.jobs WHERE status = 'dead'))",
            "no job of the group is dead any more",
        ),
        ("DELETE FROM pgworkd.error_groups", "the group of errors was forgotten: no death of it is kept any more"),
    ],
)
async def test_an_alert_is_not_sent_if_that_is_over(
    dsn: str, db: asyncpg.Connection[Any], meanwhile: str, why: str
) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('alerts', 'infinity')")
    app, sent = app_that_fails()
    async with running(app, dsn):
        await insert(db, "mail", '{"error": "no such user 7"}')
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'alerts'"))
        await db.execute(meanwhile)
        await db.execute("UPDATE pgworkd.queues SET paused_until = NULL")
        assert await results(db) == [{"sent": False, "why": why}]
    assert sent == []


async def test_a_plain_function_runs_in_a_thread_and_its_error_is_retried(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    calls: list[str] = []

    def to(found: Alert) -> None:
        calls.append(found.rule)
        raise RuntimeError("the pager is down")

    async with running(app_that_fails(to=to, name="pager")[0], dsn):
        await insert(db, "mail", '{"error": "x"}')
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'failed'"))
    row = await db.fetchrow("SELECT kind, error, run_at > now() AS later FROM pgworkd.jobs WHERE status = 'failed'")
    assert row is not None
    assert (row["kind"], row["later"]) == ("pgworkd.alert.pager", True)
    assert "the pager is down" in row["error"]
    assert calls == ["pager"]


async def test_a_job_that_finds_nothing_untold_sends_nothing(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, sent = app_that_fails()
    async with running(app, dsn):
        await insert(db, "alerts", '{"group": 7, "reason": "new"}', kind="pgworkd.alert.default")
        (result,) = await results(db)
    assert result == {"sent": False, "why": "nothing is due: another message has told of it"}
    assert sent == []


async def test_rules_are_declared_at_the_start_and_again(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, _ = app_that_fails(deaths=5, queues=["mail"], within_s=60)
    async with running(app, dsn):
        row = await db.fetchrow("SELECT name::text, kind::text, queues, deaths, within_s FROM pgworkd.alert_rules")
    assert row is not None
    assert tuple(row) == ("default", "pgworkd.alert.default", ["mail"], 5, 60)


async def test_a_rule_that_was_deleted_comes_back_before_the_next_death_counts(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "DECLARE_S", 0.0)
    app, sent = app_that_fails()
    async with running(app, dsn):
        await db.execute("DELETE FROM pgworkd.alert_rules")
        await insert(db, "mail", '{"error": "x"}')
        await until(lambda: sent)


async def test_two_daemons_of_two_applications_send_one_alert_each(dsn: str, db: asyncpg.Connection[Any]) -> None:
    (ours, sent), (theirs, received) = app_that_fails(name="ours"), app_that_fails(name="theirs", queue="pager")
    async with running(ours, dsn), running(theirs, dsn):
        for n in range(30):
            await insert(db, "mail", json.dumps({"error": f"no such user {n}"}))
        await until(lambda: db.fetchval("SELECT count(*) = 30 FROM pgworkd.deaths WHERE group_id IS NOT NULL"))
        await until(lambda: sent and received)
    assert (len(sent), len(received)) == (1, 1)
    assert {alert.rule for alert in (*sent, *received)} == {"ours", "theirs"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"to": "ops"}, "give a function, or a mail address"),
        ({"to": "a@b.c\nBcc: d@e.f"}, "give a function, or a mail address"),
        ({"to": "a@b.c,d@e.f"}, "give a function, or a mail address"),
        ({"to": lambda: None}, "the function must take one argument"),
        ({"on_new": False}, "needs deaths=N"),
        ({"deaths": 0}, "deaths must be an int from 1"),
        ({"within_s": 86_401}, "within_s must be an int from 1 to 86400"),
        ({"cooldown_s": -1}, "cooldown_s must be an int from 0"),
        ({"bundle_s": 86_401}, "bundle_s must be an int from 0 to 86400"),
        ({"queues": "mail"}, "queues must be a list of names"),
        ({"queues": [""]}, "a name in queues must be text"),
        ({"queues": []}, "queues is empty: leave it out for all queues"),
        ({"name": ""}, "the alert's name must be text"),
    ],
)
def test_a_wrong_alert_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        App().alert(**{"to": print, **options})


def test_two_alerts_of_one_name_are_refused() -> None:
    app = App()
    app.alert(to=print)
    app.alert(to=print, name="other")
    with pytest.raises(UsageError, match="two alerts are named 'default'"):
        app.alert(to=print)
    app.digest(to=print, every=60)
    with pytest.raises(UsageError, match=r"two handlers for kind 'pgworkd.digest'"):
        app.digest(to=print, every=60)
    with pytest.raises(UsageError, match="cron"):
        App().digest(to=print, every="soon")


async def test_a_digest_has_all_that_is_wrong(dsn: str, db: asyncpg.Connection[Any]) -> None:
    sent: list[Digest] = []
    app = App()
    app.digest(every="0 8 * * 1-5", timezone="Europe/Berlin", to=sent.append)
    await plant(db)
    async with running(app, dsn):
        await until(lambda: db.fetchval("SELECT status = 'pending' FROM pgworkd.jobs WHERE error LIKE 'no handler%'"))
        await db.execute("SELECT pgworkd.run_schedule('pgworkd.digest')")
        (result,) = await results(db)
    assert result == {"to": "list.append", "dead": 3, "groups": 2}
    (digest,) = sent
    assert [(row.error, row.dead, row.new) for row in digest.dead.rows] == [
        ("fresh", 1, True),
        ("old at <n>", 2, False),
    ]
    assert [(kind.kind, round(kind.usual_s), round(kind.now_s), kind.runs) for kind in digest.slow] == [
        ("k", 1, 18, 50)
    ]
    assert [(queue.queue, queue.workers) for queue in digest.late] == [("late", 0)]
    assert [schedule.name for schedule in digest.schedules] == ["broken"]
    assert [(unknown.kind, unknown.jobs) for unknown in digest.unknown] == [("unwritten", 1)]
    database = await db.fetchval("SELECT current_database()")
    assert digest.subject == (
        f"pgworkd {database}: 1 paused or disabled endpoint, 1 late queue, 1 unknown kind, 1 broken schedule, "
        "1 lossy endpoint, 3 dead jobs in 2 groups of errors, 1 of them new, 1 slow kind"
    )
    text = digest.text()
    assert text.startswith(f"Summary of {database}")
    assert text.splitlines()[1].endswith(", Europe/Berlin.")
    last = f"{digest.dead.rows[0].last_at:%H:%M}"
    assert f"last {last}" not in text, "in UTC"
    found = [
        "  gone: disabled, sent waits: HTTP 410",
        "  late: due for 2 h, 0 workers",
        "  unwritten, in queue alerts: at least 1 job",
        "  broken: cron ",
        "  loose: ",
        "3 dead jobs in 2 groups of errors (pgworkd dead)\n  new, q, q: 1 job (group 2), last ",
        "  q, k: ",
    ]
    assert not [each for each in found if each not in text], text
    assert sorted(found, key=text.index) == found, "what keeps work from being done comes first"


async def plant(db: asyncpg.Connection[Any]) -> None:
    """Two groups of dead jobs, one of them new; a slow kind, a late queue, a broken schedule, an unknown kind."""
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, status, failures, failed_at, error) VALUES
               ('q', 'dead', 1, now() - interval '20 days', 'old at 7'), ('q', 'dead', 1, now(), 'old at 8'),
               ('q', 'dead', 1, now(), 'fresh');
           SELECT pgworkd.note_deaths(ARRAY(SELECT id FROM pgworkd.jobs));
           SELECT pgworkd.count_deaths();
           INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('late', now() - interval '2 h');
           INSERT INTO pgworkd.jobs (queue, kind) VALUES ('alerts', 'unwritten');
           INSERT INTO pgworkd.schedules (name, queue, cron) VALUES ('broken', 'alerts', '0 0 31 2 *');
           UPDATE pgworkd.schedules SET error = 'never due' WHERE name = 'broken';
           INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('gone', 'https://x', true),
               ('loose', 'https://x', true);
           INSERT INTO pgworkd.queues (name, endpoint) VALUES ('sent', 'gone');
           INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('sent', now() - interval '2 h');
           SELECT pgworkd.disable_endpoint('gone', 'HTTP 410'), pgworkd.warn_of('loose', 'too large')"""
    )
    for at, place in (("10 days", 31), ("0 s", 44)):  # up to 1 s; up to 20 s
        counts = [50 if n == place else 0 for n in range(1, 73)]
        await db.execute(
            """INSERT INTO pgworkd.queue_minutes (at, period_s, queue, kind, started, completed, failed, dead, released,
                                                  waits, runs, wait_s, run_s)
               VALUES (now() - $1::text::interval, 60, 'q', 'k', 50, 50, 0, 0, 0, $2, $2, 0, 0)""",
            at,
            counts,
        )


async def test_a_digest_is_as_many_lines_as_there_are_findings(db: asyncpg.Connection[Any]) -> None:
    for name in ("a\nDead jobs: none", "b\x1b[2J"):
        await db.execute("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ($1, now() - interval '2 h')", name)
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, status, failures, failed_at, error) VALUES ($1, 'dead', 1, now(), 'x')",
            name,
        )
    text = (await summary(db.fetch, lambda now: now - timedelta(days=1))).text()
    assert "\n  a\\nDead jobs: none: due for " in text
    assert "\nDead jobs: none" not in text
    assert "\x1b" not in text


async def test_a_digest_counts_all_groups_that_are_new(db: asyncpg.Connection[Any]) -> None:
    """Also those that are not among the first 100, which are listed."""
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, status, failures, failed_at, error)
           SELECT 'q', 'dead', 1, now(), 'cause ' || translate((n % 150)::text, '0123456789', 'ghijklmnop')
           FROM generate_series(1, 300) n"""
    )
    digest = await summary(db.fetch, lambda now: now - timedelta(days=1))
    assert len(digest.dead.rows) == 100
    assert digest.subject.endswith(": 300 dead jobs in 150 groups of errors, 150 of them new")
    assert "\n  ... and 50 groups more: pgworkd dead\n" in digest.text()


async def test_a_digest_without_findings_says_so(dsn: str, db: asyncpg.Connection[Any]) -> None:
    sent: list[Digest] = []
    app = App()

    async def to(digest: Digest) -> None:
        sent.append(digest)

    app.digest(every=1, to=to, name="quick")
    async with running(app, dsn):
        await until(lambda: len(sent) >= 2)
    database = await db.fetchval("SELECT current_database()")
    assert sent[0].subject == f"pgworkd {database}: all is well"
    assert "Nothing to report." in sent[0].text()
    assert await db.fetchval("SELECT schedule FROM pgworkd.finished_jobs LIMIT 1") == "pgworkd.digest.quick"


@pytest.mark.parametrize(
    ("every", "at", "last"),
    [
        ("0 8 * * 1-5", datetime(2026, 11, 23, 8, tzinfo=UTC), datetime(2026, 11, 20, 8, tzinfo=UTC)),
        ("0 8 * * 1-5", datetime(2026, 11, 24, 8, tzinfo=UTC), datetime(2026, 11, 23, 8, tzinfo=UTC)),
        ("0 8 * * 1-5", datetime(2026, 11, 24, 9, 3, tzinfo=UTC), datetime(2026, 11, 24, 8, tzinfo=UTC)),
        ("0 0 1 1 *", datetime(2026, 11, 24, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)),
        ("0 0 29 2 *", datetime(2027, 2, 1, tzinfo=UTC), datetime(2027, 1, 31, tzinfo=UTC)),
        (60, datetime(2026, 11, 24, tzinfo=UTC), datetime(2026, 11, 23, 23, 59, tzinfo=UTC)),
    ],
)
def test_the_occurrence_before(every: Any, at: datetime, last: datetime) -> None:
    with in_time():
        assert before(Recurrence.parse(every), at) == last
    assert before(None, at) == at - timedelta(days=1)
