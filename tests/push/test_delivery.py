"""Where, and over which connection, the message about a job goes."""

from __future__ import annotations

import socket

from pgworkd.core import events
from tests.kits.daemon import insert, until, waits_for_status
from tests.kits.downstream import Downstream, answer_of, serving
from tests.kits.push import pushing, put_endpoint
from tests.kits.verbs import Db


async def test_a_job_that_may_run_once_is_not_sent_over_a_connection_that_was_kept(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(200))) as down, pushing(dsn):
        await put_endpoint(db, "billing", down.url, "invoices")
        for connections, max_attempts in ((1, 3), (1, 3), (2, 1), (3, 1)):
            job_id = await insert(db, "invoices", "{}", max_attempts=max_attempts)
            await until(waits_for_status(db, job_id, "completed"))
            assert down.connections == connections


async def test_the_facts_of_a_job_stand_in_the_address(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(200))) as down, pushing(dsn):
        await put_endpoint(db, "billing", down.url + "/{kind}/{id}?queue={queue}", "a b")
        for kind, sent in (("invoice.paid", b"invoice.paid"), ("../x?y#z/\u00fc", b"..%2Fx%3Fy%23z%2F%C3%BC")):
            job_id = await insert(db, "a b", "{}", kind=kind)
            await until(waits_for_status(db, job_id, "completed"))
            line = b"POST /jobs/%b/%b?queue=a%%20b HTTP/1.1" % (sent, str(job_id).encode())
            assert down.requests[-1].split(b"\r\n")[0] == line
        job_id = await insert(db, "a b", "{}", kind="..")
        await until(waits_for_status(db, job_id, "dead"))
        error = await db.fetchval("SELECT error FROM pgworkd.all_jobs WHERE id = $1", job_id)
        assert "would lead to another path" in error
        assert len(down.requests) == 2


async def test_each_request_is_told_to_who_wants_to_know(dsn: str, db: Db) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    async with serving(Downstream(answer_of(422))) as down, pushing(dsn) as (_, seen):
        await put_endpoint(db, "billing", down.url + "?secret=7", "invoices")
        await put_endpoint(db, "gone", f"http://127.0.0.1:{port}/", "lost")
        job_id = await insert(db, "invoices", "{}")
        lost = await insert(db, "lost", "{}")
        told = await seen.wait(events.PUSH_ANSWERED, endpoint="billing")
        assert (told["job_id"], told["attempt"], told["status"], told["host"]) == (
            str(job_id),
            1,
            422,
            f"127.0.0.1:{down.port}",
        )
        assert "secret" not in str(told)
        assert told["took_s"] < 30
        told = await seen.wait(events.PUSH_ANSWERED, endpoint="gone")
        assert (told["job_id"], told["status"]) == (str(lost), None)
