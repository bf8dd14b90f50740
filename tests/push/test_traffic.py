"""`pgworkd push --debug-http`: what is logged of the requests that are sent, and what never is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync

from tests.kits.daemon import insert, until
from tests.kits.downstream import Downstream, Writer, answer_of, headers_of, message_of, serving
from tests.kits.push import put_endpoint
from tests.kits.verbs import Db
from tests.push.process import pushing_process

pytestmark = pytest.mark.slow("commands in processes of their own")

SECRET = "whsec_5WbX5kEWLlfzsGNjH64I8lOOqUB6e8FH"
CALLBACKS = "http://jobs.example.com"


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8")


async def _hang_up(writer: Writer) -> None:
    writer.close()


async def sent(dsn: str, db: Db, down: Downstream, log: Path, *flags: str, **columns: Any) -> list[dict[str, Any]]:
    """The lines about requests in the log of a process that has sent one job to this endpoint."""
    url = f"{down.url}/t0k3n-{{id}}?key=t0k3n"
    await put_endpoint(db, "e", url, "q", secret_name="db", headers={"X-Key": "t0k3n"}, **columns)
    environ = {"PGWORKD_SECRET_DB": SECRET, "PGWORKD_CALLBACK_URL": CALLBACKS}

    process = pushing_process(dsn, *flags, log_to=log, **environ)
    await run_sync(process.__enter__)
    try:
        await insert(db, "q", json.dumps({"card": "4111" + "x" * 3000}))
        await until(lambda: down.requests)  # the stop waits for its end
    finally:
        await run_sync(process.__exit__, None, None, None)
    text = _text(log)
    for hidden in ("t0k3n", SECRET, SECRET.removeprefix("whsec_"), headers_of(down.requests[0])["webhook-signature"]):
        assert hidden not in text
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == "http.sent"]


async def test_requests_are_logged_without_their_bodies_and_secrets(dsn: str, db: Db, tmp_path: Path) -> None:
    answer = answer_of(200, {"secret": "s3cr3t", "n": 1}, set_cookie="s3cr3t")
    async with serving(Downstream(answer)) as down:
        (line,) = await sent(dsn, db, down, tmp_path / "log", "--debug-http")
    request, job_id = headers_of(down.requests[0]), await db.fetchval("SELECT id FROM pgworkd.all_jobs")
    assert (line["endpoint"], line["host"], line["status"]) == ("e", f"127.0.0.1:{down.port}", 200)
    assert line["headers"]["webhook-id"] == request["webhook-id"] == str(job_id)
    assert line["headers"]["pgworkd-attempt"] == "1"
    assert line["answer_headers"]["content-type"] == "application/json"
    assert {"request", "answer"}.isdisjoint(line)
    assert not any(hidden in _text(tmp_path / "log") for hidden in ("s3cr3t", "4111"))


async def test_bodies_are_logged_without_what_ends_the_attempt(dsn: str, db: Db, tmp_path: Path) -> None:
    async with serving(Downstream(answer_of(202, {"secret": "s3cr3t", "n": 1}))) as down:
        (line,) = await sent(dsn, db, down, tmp_path / "log", "--debug-bodies", mode="callback")
    assignment = message_of(down.requests[0])["callback"]["url"].rpartition("/")[2]
    assert assignment.startswith("a1_")
    text = _text(tmp_path / "log")
    assert not any(hidden in text for hidden in ("s3cr3t", assignment[3:20]))
    assert line["request"].startswith('{"type":"job.run"')
    assert (len(line["request"]), line["answer"]) == (2000, '{"secret": "***", "n": 1}')


async def test_a_request_without_an_answer_is_logged_with_its_error(dsn: str, db: Db, tmp_path: Path) -> None:
    async with serving(Downstream(act=_hang_up)) as down:
        (line,) = await sent(dsn, db, down, tmp_path / "log", "--debug-http")
    assert "it may have been done" in line["error"]
    assert "status" not in line


async def test_nothing_is_logged_unless_asked_for(dsn: str, db: Db, tmp_path: Path) -> None:
    async with serving(Downstream()) as down:
        assert await sent(dsn, db, down, tmp_path / "log") == []
