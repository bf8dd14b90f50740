"""Push from code: jobs of a handler, alerts and digests."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from standardwebhooks.webhooks import Webhook as Verifier

from pgworkd import App
from pgworkd.alerts.digest import summary
from pgworkd.errors import UsageError
from pgworkd.push import PushFailed, Webhook
from tests.kits.alerts import alert_of
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.downstream import Downstream, answer_of, headers_of, message_of, serving
from tests.kits.push import pushing, put_endpoint
from tests.kits.verbs import Db

SECRET = "whsec_ZnJvbSBjb2RlLCBpbiB0aGUgZW52aXJvbm1lbnQ="
ALERT = alert_of("no such user 'bob'", pattern="no such user <text>", queue="mail", group=7, sample=UUID(int=7))


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (answer_of(200, {"n": 1}), "completed", None),
        (answer_of(204), "completed", None),
        (answer_of(200, b"OK", content_type="application/json"), "completed", None),
        (answer_of(422, b"which?"), "dead", "HTTP 422: which?"),
        (answer_of(500, b"oops"), "failed", "HTTP 500: oops"),
        (answer_of(503, retry_after="3600"), "failed", "HTTP 503"),
        (answer_of(200, pgworkd_outcome="release", retry_after="3600"), "pending", None),
        (b"what?\r\n\r\n", "failed", "it may have been done"),
    ],
)
async def test_a_job_of_a_handler_ends_by_the_answer(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, answer: bytes, status: str, said: str | None
) -> None:
    monkeypatch.setenv("PGWORKD_SECRET_CODE", SECRET)
    async with serving(Downstream(answer)) as down:
        app = App()
        app.push("paid", down.url, secret="code", allow_private=True, max_attempts=2)
        async with running(app, dsn):
            job_id = await insert(db, "paid", '{"n": 7}')
            attempted = "SELECT attempts > 0 AND status::text = $2 FROM pgworkd.all_jobs WHERE id = $1"
            await until(lambda: db.fetchval(attempted, job_id, status))
        request = down.requests[0]
    assert Verifier(SECRET).verify(request.partition(b"\r\n\r\n")[2], headers_of(request)) == message_of(request)
    assert message_of(request)["data"]["payload"] == {"n": 7}
    row = await db.fetchrow("SELECT error, result::text FROM pgworkd.all_jobs WHERE id = $1", job_id)
    assert row is not None
    assert (said or "") in (row["error"] or "")
    assert row["result"] == ('{"n": 1}' if answer.endswith(b"}") else None)


async def test_a_result_that_cannot_be_stored_may_be_a_failure(
    dsn: str, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    async with serving(Downstream(answer_of(200, b"OK", content_type="application/json"))) as down:
        app.push("loose", down.url, unsigned=True, allow_private=True)
        app.push("strict", down.url, unsigned=True, allow_private=True, strict_results=True)
        async with running(app, dsn):
            loose, strict = await insert(db, "loose"), await insert(db, "strict")
            await until(waits_for_status(db, loose, "completed"))
            await until(waits_for_status(db, strict, "dead"))
    assert f"job {loose} has completed without its result" in caplog.text


async def test_what_was_not_delivered_is_no_failure_of_a_job_that_may_run_once(dsn: str, db: Db) -> None:
    async with serving(Downstream()) as down:
        url = down.url
    app = App()
    app.push("paid", url, unsigned=True, allow_private=True, max_attempts=1)
    async with running(app, dsn):
        job_id = await insert(db, "paid", max_attempts=1)
        await until(lambda: db.fetchval("SELECT attempts = 1 AND status = 'pending' FROM pgworkd.jobs"))
    assert await db.fetchval("SELECT failures FROM pgworkd.jobs WHERE id = $1", job_id) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "would not be signed"),
        ({"secret": "nowhere"}, "set PGWORKD_SECRET_NOWHERE"),
        ({"unsigned": True, "headers": {"Host": "x"}}, "set by pgworkd"),
        ({"unsigned": True, "timeout_s": 0}, "give 0.1 to 3,600 seconds"),
        ({"unsigned": True, "max_attempts": 0}, "max_attempts"),
    ],
)
def test_what_is_wrong_is_said_when_the_app_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        App().push("kind", "https://example.com/", **options)


async def test_an_alert_is_sent_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGWORKD_SECRET_CODE", SECRET)
    async with serving(Downstream(answer_of(204))) as down:
        await Webhook(down.url, secret="code", allow_private=True)(ALERT)
    (request,) = down.requests
    message = Verifier(SECRET).verify(request.partition(b"\r\n\r\n")[2], headers_of(request))
    assert message["type"] == "alert"
    assert {"subject": ALERT.subject, "text": ALERT.text(), "id": str(ALERT.id)}.items() <= message["data"].items()
    (error,) = message["data"]["errors"]
    assert {"queue": "mail", "group": 7, "sample": str(UUID(int=7))}.items() <= error.items()
    assert headers_of(request)["webhook-id"] == str(ALERT.id)


async def test_the_rows_of_a_digest_are_objects(dsn: str, db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, cron, error) VALUES ('s', 'q', '* * * * *', 'bad')")
    async with asyncpg.create_pool(dsn) as pool:
        digest = await summary(pool.fetch, lambda now: now - timedelta(days=1))
    async with serving(Downstream(answer_of(204))) as down:
        await Webhook(down.url, unsigned=True, allow_private=True)(digest)
    data = json.loads(down.requests[0].partition(b"\r\n\r\n")[2])["data"]
    assert data["schedules"] == [{"name": "s", "error": "bad"}]
    assert data["dead"] == {"rows": [], "groups": 0, "dead": 0, "new": 0, "newest": None}


async def test_a_chat_gets_text_and_no_signature() -> None:
    async with serving(Downstream(answer_of(200, b"ok"))) as down:
        await Webhook(down.url, slack=True, allow_private=True)(ALERT)
    (request,) = down.requests
    assert message_of(request).keys() == {"text"}
    subject = ALERT.subject.replace("<text>", "&lt;text&gt;")
    assert message_of(request)["text"].startswith(f"*{subject}*\n```Jobs die of an error that is new.")
    assert "webhook-signature" not in headers_of(request)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("<!everyone> & <https://evil.example|here>", "&lt;!everyone&gt; &amp; &lt;https://evil.example|here&gt;"),
        ("``` out of the block", "''' out of the block"),
        ("@Channel, @here: ann@example.com", "@\u200bChannel, @\u200bhere: ann@example.com"),
        ("a\nqueue:  b", "a\\nqueue:  b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("{{ 7 * 7 }} {0} %s ${HOME}", "{{ 7 * 7 }} {0} %s ${HOME}"),
    ],
)
async def test_a_chat_shows_any_text_as_it_is(said: str, shown: str) -> None:
    alert = alert_of(said, pattern=said, queue=said)
    async with serving(Downstream(answer_of(200, b"ok"))) as down:
        await Webhook(down.url, slack=True, allow_private=True)(alert)
    text = message_of(down.requests[0])["text"]
    subject, _, block = text.partition("*\n```")
    assert subject == f"*pgworkd shop, production: new error in {shown}, send: {shown}"
    assert f"error:        {shown}\n" in block
    assert block.count("```") == 1
    assert block.endswith("```")


@pytest.mark.parametrize("answer", [answer_of(500, b"oops"), answer_of(302, location="/"), b"?\r\n\r\n"])
async def test_what_a_webhook_refuses_is_sent_again_by_its_job(answer: bytes) -> None:
    async with serving(Downstream(answer)) as down:
        with pytest.raises(PushFailed):
            await Webhook(down.url, slack=True, allow_private=True)(ALERT)


async def test_an_alert_arrives_from_the_death_of_a_job(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(204))) as down:
        app = App()
        app.alert(to=Webhook(down.url, slack=True, allow_private=True))

        @app.handler("q", max_attempts=1)
        async def die() -> None:
            raise ValueError("no such user 'bob'")

        async with running(app, dsn):
            await insert(db, "q")
            await until(lambda: down.requests)
    assert "no such user" in message_of(down.requests[0])["text"]


async def test_each_attempt_of_one_alert_has_one_id(dsn: str, db: Db) -> None:
    """So a receiver can drop the second; what has grown meanwhile is another message."""
    async with serving(Downstream(answer_of(500, b"busy"))) as down:
        app = App()
        app.alert(to=Webhook(down.url, unsigned=True, allow_private=True))

        @app.handler("q", max_attempts=1)
        async def die() -> None:
            raise ValueError("no such user 'bob'")

        async with running(app, dsn):
            for attempts in (1, 2):
                if attempts == 1:
                    await insert(db, "q")
                await until(lambda: db.fetchval("SELECT status = 'failed' FROM pgworkd.jobs WHERE queue = 'alerts'"))
                assert len(down.requests) == attempts
                await db.execute("SELECT pgworkd.retry(ARRAY(SELECT id FROM pgworkd.jobs WHERE queue = 'alerts'))")
                await until(lambda attempts=attempts: len(down.requests) > attempts)
            await until(lambda: db.fetchval("SELECT status = 'failed' FROM pgworkd.jobs WHERE queue = 'alerts'"))
            await insert(db, "q")
            await until(lambda: db.fetchval("SELECT deaths = 2 FROM pgworkd.error_groups"))
            await db.execute("SELECT pgworkd.retry(ARRAY(SELECT id FROM pgworkd.jobs WHERE queue = 'alerts'))")
            await until(lambda: len(down.requests) > 3)
    ids = [headers_of(request)["webhook-id"] for request in down.requests]
    assert ids[0] == ids[1] == ids[2] != ids[3]


async def test_the_callback_of_a_batch_is_a_webhook(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(204))) as down, pushing(dsn):
        await put_endpoint(db, "hooks", down.url, "hooks", "work")
        await db.execute(
            """SELECT pgworkd.seal_batch(b.id) FROM pgworkd.create_batch('payroll', 'work',
               p_on_complete => '{"queue": "hooks", "payload": {"month": 7}}') b,
               LATERAL (SELECT pgworkd.add_jobs(b.id, ARRAY['{}']::jsonb[])) j"""
        )
        await until(lambda: len(down.requests) == 2)
        finished = "SELECT count(*) = 2 FROM pgworkd.finished_jobs WHERE status = 'completed'"
        await until(lambda: db.fetchval(finished))
    (hook,) = [sent for sent in map(message_of, down.requests) if sent["data"]["queue"] == "hooks"]
    assert hook["data"]["payload"]["month"] == 7
    assert hook["data"]["payload"]["batch"]["name"] == "payroll", json.dumps(hook)


async def test_the_handler_works_in_one_daemon_after_the_other(dsn: str, db: Db) -> None:
    """The handler is one object: it works in each daemon that has it, one after the other."""
    async with serving(Downstream()) as down:
        app = App()
        app.push("paid", down.url, unsigned=True, allow_private=True)
        for _ in range(2):
            async with running(app, dsn):
                await until(waits_for_status(db, await insert(db, "paid"), "completed"))
