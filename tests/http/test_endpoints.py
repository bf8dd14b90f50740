"""Endpoints over HTTP: made, changed, disabled, enabled and removed by those who may."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.gateway import also, calling, token
from tests.kits.verbs import Db

URL = "https://billing.example.com/jobs"


async def test_an_endpoint_is_made_used_changed_and_removed(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        made = await call.ok(
            "PUT", "/v1/endpoints/billing", {"url": URL, "secret_name": "billing", "headers": {"X-A": "1"}}
        )
        assert made == {
            "name": "billing",
            "url": URL,
            "mode": "sync",
            "timeout_s": 30,
            "callback_timeout_s": 300,
            "headers": {"X-A": "1"},
            "secret_name": "billing",
            "unsigned": False,
            "allow_private": False,
            "strict_results": False,
            "state": "live",
            "reason": None,
            "disabled_at": None,
            "paused_until": None,
            "queues": [],
        }
        assert await call.ok("GET", "/v1/endpoints/billing") == made
        queue = await call.ok("PATCH", "/v1/queues/invoices", {"endpoint": "billing"})
        assert queue["settings"]["endpoint"] == {"value": "billing", "from": "row"}
        changed = await call.ok("PUT", "/v1/endpoints/billing", {"url": URL, "unsigned": True})
        assert (changed["headers"], changed["secret_name"], changed["queues"]) == ({}, None, ["invoices"])
        off = await call.ok("POST", "/v1/endpoints/billing/disable", {"reason": "moved"})
        assert (off["state"], off["reason"]) == ("disabled", "moved")
        assert (await call.ok("GET", "/v1/queues/invoices"))["paused"] is True
        on = await call.ok("POST", "/v1/endpoints/billing/enable")
        assert (on["state"], on["reason"]) == ("live", None)
        assert (await call.ok("GET", "/v1/queues/invoices"))["paused"] is False
        status, _, found = await call.problem("DELETE", "/v1/endpoints/billing")
        assert (status, "queues are still sent there" in found["detail"]) == (422, True)
        await call.ok("PATCH", "/v1/queues/invoices", {"endpoint": None})
        assert await call.ok("DELETE", "/v1/endpoints/billing") == {"name": "billing", "removed": True}
        assert await call.ok("GET", "/v1/endpoints") == {"endpoints": []}
        audit = (await call.ok("GET", "/v1/audit"))["entries"]
        who = f"tester (token {call.token.split('_')[1]})"
        assert {entry["who"] for entry in audit if entry["what"] == "endpoint"} == {who}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"url": "ftp://example.com/", "unsigned": True}, "https:// is needed"),
        ({"url": "https://u:p@example.com/", "unsigned": True}, "user or password"),
        ({"url": "https://example.com:22/", "unsigned": True}, "another service"),
        ({"url": "http://10.0.0.1/", "unsigned": True}, "not of the public internet"),
        ({"url": URL}, "would not be signed"),
        ({"url": URL, "unsigned": True, "secret_name": "a"}, "give one of them"),
        ({"url": URL, "unsigned": True, "headers": {"Host": "x"}}, "set by pgworkd"),
        ({"url": URL, "unsigned": True, "headers": {"X-A": "a\r\nX-B: c"}}, "without line ends"),
    ],
)
async def test_a_bad_endpoint_is_refused_with_the_remedy(dsn: str, body: dict[str, Any], said: str) -> None:
    async with calling(dsn) as call:
        status, _, found = await call.problem("PUT", "/v1/endpoints/e", body)
        assert (status, said in str(found)) == (422, True), found
        assert await call.ok("GET", "/v1/endpoints") == {"endpoints": []}


async def test_an_unknown_one_is_not_found(dsn: str) -> None:
    async with calling(dsn) as call:
        for method, path in [("GET", ""), ("POST", "/disable"), ("POST", "/enable"), ("DELETE", "")]:
            assert (await call.problem(method, f"/v1/endpoints/none{path}"))[:2] == (404, "not-found")
        status, _, found = await call.problem("PATCH", "/v1/queues/q", {"endpoint": "none"})
        assert (status, "there is no such endpoint" in found["detail"]) == (422, True)


async def test_who_operates_sees_neither_url_nor_headers(dsn: str) -> None:
    async with calling(dsn) as call:
        await call.ok("PUT", "/v1/endpoints/e", {"url": URL, "unsigned": True, "headers": {"X-Key": "k"}})
        operator = also(call, await token(dsn, {"operate": None, "read": None}))
        found = await operator.ok("POST", "/v1/endpoints/e/disable")
        assert (found["state"], found["url"], found["headers"]) == ("disabled", None, None)
        assert (await operator.problem("GET", "/v1/endpoints"))[0] == 403
        narrow = also(call, await token(dsn, {"operate": ["q"]}))
        assert (await narrow.problem("POST", "/v1/endpoints/e/enable"))[0] == 403, "it may have other queues"
