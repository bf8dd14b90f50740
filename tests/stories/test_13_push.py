"""A billing service that knows nothing of pgworkd gets its invoices by HTTP, accepts each with 202, and says later how
it went: some fail for a while, some for good; one is sent again the next day. Who sends is killed at work."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import asyncpg
import pytest
from standardwebhooks.webhooks import Webhook

from tests.kits.daemon import until
from tests.kits.downstream import Downstream, answer_of, headers_of, message_of, serving
from tests.kits.gateway import Caller, calling
from tests.kits.push import put_endpoint
from tests.push.process import pushing_process

pytestmark = pytest.mark.slow("a daemon that is killed, and leases that run out")

INVOICES, UNKNOWN, BUSY = 60, {7, 13}, {5, 10, 15, 20}
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Billing:
    """The service. It notes what it has paid by the job's id, so that a job that comes twice is paid once."""

    def __init__(self, gateway: Caller) -> None:
        self.gateway = gateway
        self.came: Counter[str] = Counter()
        self.paid: dict[str, int] = {}
        self._working: set[asyncio.Task[None]] = set()

    def take(self, request: bytes) -> bytes:
        """Checks the signature, accepts the invoice, and works on."""
        head, _, content = request.partition(b"\r\n\r\n")
        message = Webhook(SECRET).verify(content, headers_of(head + b"\r\n\r\n"))
        assert message == message_of(request)
        self.came[message["data"]["id"]] += 1
        task = asyncio.get_running_loop().create_task(self._work(message))
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return answer_of(202, {})

    async def _work(self, message: dict[str, Any]) -> None:
        job, url = message["data"], message["callback"]["url"]
        number = job["payload"]["invoice"]
        if number in UNKNOWN:
            said = {"type": "UnknownInvoice", "message": f"there is no invoice {number}", "retryable": False}
            await self._call(f"{url}/fail", said)
        elif number in BUSY and job["attempt"] == 1:
            await self._call(f"{url}/fail", {"type": "Busy", "message": "the bank is closed", "retry_in_s": 0})
        else:
            self.paid.setdefault(job["id"], number)
            await self._call(f"{url}/complete", {"result": {"paid": number}})

    async def _call(self, url: str, body: dict[str, Any]) -> None:
        """Until there is an answer; 409: the attempt was taken back, and another is on its way."""
        while (answer := await self.gateway.client.post(url, json=body)).status_code == 503:
            await asyncio.sleep(0.1)  # the gateway is starting
        assert answer.status_code in (200, 409), answer.text


@contextlib.contextmanager
def _sending(dsn: str) -> Iterator[Any]:
    lease = {"PGWORKD_LEASE_S": "5", "PGWORKD_HEARTBEAT_S": "1", "PGWORKD_COMMAND_TIMEOUT_S": "2"}
    secret = {"PGWORKD_SECRET_BILLING": SECRET, "PGWORKD_CALLBACK_URL": "http://localhost"}
    with pushing_process(dsn, **lease, **secret) as process:
        yield process


async def test_a_service_is_sent_its_work_and_says_later_how_it_went(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Downstream, 202, callbacks by assignment, `retryable`, and a replay."""
    async with calling(dsn, workers=True) as call:
        billing = Billing(call)
        async with serving(Downstream(billing.take)) as down:
            # So short that what was never sent is soon sent again.
            times = {"timeout_s": 2, "callback_timeout_s": 10}
            await put_endpoint(db, "billing", down.url, "invoices", mode="callback", secret_name="billing", **times)
            await db.execute("""SELECT pgworkd.set_queue('invoices', '{"backoff_s": 1}')""")
            await db.execute(
                """INSERT INTO pgworkd.jobs (queue, payload)
                   SELECT 'invoices', jsonb_build_object('invoice', n) FROM generate_series(1, $1::int) n""",
                INVOICES,
            )
            with _sending(dsn) as victim:
                await until(lambda: len(billing.came) > INVOICES // 3)
                victim.kill()
                victim.wait()  # it has accepted invoices, and requests are under way
            with _sending(dsn):
                left = "SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead'"
                with anyio.fail_after(90):
                    while await db.fetchval(left):
                        await anyio.sleep(0.05)

                # Whatever was killed when: each invoice was paid once, and what could not be paid says why.
                assert sorted(billing.paid.values()) == [n for n in range(1, INVOICES + 1) if n not in UNKNOWN]
                dead = await db.fetch("SELECT id, payload, error FROM pgworkd.jobs ORDER BY payload")
                assert {json.loads(row["payload"])["invoice"] for row in dead} == UNKNOWN
                assert all("there is no invoice" in row["error"] for row in dead)

                # The invoice is there now: an operator has the job sent again, as a new one.
                UNKNOWN.discard(7)
                first = next(str(row["id"]) for row in dead if json.loads(row["payload"])["invoice"] == 7)
                await call.ok("POST", "/v1/jobs/discard", {"ids": [first]})
                made = await call.ok("POST", f"/v1/jobs/{first}/replay")
                await until(lambda: made["id"] in billing.paid)
    assert billing.paid[made["id"]] == 7
