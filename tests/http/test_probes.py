"""Each of the ways in of `probes` is tried on `pgworkd serve`, and none leads in: nothing is told, nothing changed."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import UUID

import asyncpg
import httpx
import pytest
from anyio import to_thread

from pgworkd.admin import Admin
from pgworkd.core.access import SCOPES
from pgworkd.core.assignment import parsed, sealed
from pgworkd.database.connection import ConnectionOptions
from tests.http.probes import CANARY, PROBES, Probe
from tests.kits.gateway import LIMIT_S, served, token

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

PROXY = {"X-Forwarded-For": "10.0.0.{n}"}
"""Each comes from an address of its own: the limit on wrong tokens is tested elsewhere, and would answer for others."""
PASSED = {401, 403, 404, 405, 421, 422, 400, 415}
"""Whoever may do it gets none of these."""
_STATE = """
    SELECT md5(string_agg(each::text, ',' ORDER BY each::text)) FROM (
        SELECT to_jsonb(j) - 'progress' AS each FROM pgworkd.jobs j
        UNION ALL SELECT to_jsonb(f) FROM pgworkd.finished_jobs f
        UNION ALL SELECT to_jsonb(q) FROM pgworkd.queues q WHERE q.name = 'vault'
        UNION ALL SELECT to_jsonb(b) FROM pgworkd.batches b
        UNION ALL SELECT to_jsonb(s) FROM pgworkd.schedules s
        UNION ALL SELECT to_jsonb(t) FROM pgworkd.tokens t
        UNION ALL SELECT jsonb_build_array(w.id, w.name, w.lost_at, w.requested) FROM pgworkd.workers w
                  WHERE w.kind = 'remote') every"""


@dataclass
class Target:
    """A gateway, and what the probes are about."""

    address: str
    facts: dict[str, str]
    db: asyncpg.Connection[Any]

    async def state(self) -> str:
        """A digest of all that a probe might change."""
        return str(await self.db.fetchval(_STATE))


async def prepared(address: str, dsn: str, db: asyncpg.Connection[Any]) -> Target:
    """The vault with a job in each state, a batch, a schedule and a worker; and tokens that are not for it."""
    root = await token(dsn)
    narrow = {scope: ["public*"] for scope in SCOPES if scope != "admin"}
    texts = {
        "root": root,
        "reader": await token(dsn, {"read": None}),
        "narrow": await token(dsn, narrow),
        "runner": await token(dsn, {"work": ["public"]}),
        "revoked": await token(dsn),
    }
    async with Admin(ConnectionOptions(dsn)) as admin:
        texts["expired"] = str(await admin.tokens.add("x", dict.fromkeys(SCOPES)))
        await admin.tokens.revoke(texts["revoked"].split("_")[1])
    await db.execute(
        "UPDATE pgworkd.tokens SET created_at = now() - interval '2 d', expires_at = now() - interval '1 s' "
        "WHERE id = $1",
        texts["expired"].split("_")[1],
    )
    headers = {"Authorization": f"Bearer {root}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=LIMIT_S) as client:
        facts = await filled(client, texts["narrow"])
    _, root_id, secret = root.split("_", 2)
    return Target(address, facts | texts | {
        "root_id": root_id,
        "root_hash": hashlib.sha256(secret.encode()).hexdigest(),
        "root_basic": base64.b64encode(f"pgworkd:{root}".encode()).decode(),
        "root_short": root[:-1],
        "root_wide": root.replace("pgw", "ｐｇｗ"),
        "own_secret": texts["narrow"].split("_", 2)[2],
    }, db)  # fmt: skip


async def filled(client: httpx.AsyncClient, narrow: str) -> dict[str, str]:
    async def made(path: str, body: Any, **more: Any) -> Any:
        answer = await client.post(path, json=body, **more)
        assert answer.is_success, answer.text
        return answer.json()

    async def worker(queue: str) -> Any:
        return await made("/v1/workers", {"name": f"of {queue}", "queues": {queue: 9}, "lease_s": 3600.0})

    async def claimed(worker: Any, queue: str) -> Any:
        body = {"worker": worker["worker"], "queues": [queue], "max": 1, "wait_s": 20.0}
        answer = await made("/v1/claims", body, headers={"Pgworkd-Secret": worker["secret"]})
        return answer["assignments"][0]

    job = {"queue": "vault", "payload": {"card": CANARY}}
    its, own = await worker("vault"), await worker("public")
    ended: dict[str, str] = {}
    for name, how, body in (
        ("done", "complete", {"result": CANARY}),
        ("dead", "fail", {"type": "E", "message": "no", "traceback": CANARY, "retryable": False}),
    ):
        ended[name] = (await made("/v1/jobs", job))["id"]
        got = await claimed(its, "vault")
        await made(f"/v1/assignments/{got['assignment']}/{how}", body)
    await made("/v1/jobs", job)
    running = await claimed(its, "vault")
    await made("/v1/jobs", {"queue": "public"})
    mine = await claimed(own, "public")
    tree = await made("/v1/batches", {"name": "secret", "queue": "vault", "payloads": [{"card": CANARY}]})
    rule = {"queue": "vault", "every_s": 86_400, "payload": {"card": CANARY}}
    put = await client.put("/v1/schedules/secret", json=rule)
    assert put.is_success, put.text
    pending = (await made("/v1/jobs", job))["id"]
    fence = parsed(running["assignment"])
    text = running["assignment"]
    return ended | {
        "job": pending,
        "batch": str(tree["id"]),
        "worker": str(its["worker"]),
        "my_worker": str(own["worker"]),
        "my_secret": own["secret"],
        "running": running["job"]["id"],
        "mine": mine["assignment"],
        "forged": sealed(fence._replace(worker_id=own["worker"], token=UUID(own["secret"]))),
        "bent": text[:10] + ("A" if text[10] != "A" else "B") + text[11:],
    }


def request_of(probe: Probe, facts: Mapping[str, str], who: str | None, number: int) -> bytes:
    """The request as bytes: no client in between corrects it."""
    if probe.raw is not None:
        return probe.raw(facts)
    headers = {"Host": "localhost", "Connection": "close", "X-Forwarded-For": f"10.0.{number // 250}.{number % 250}"}
    headers |= {name: with_facts(value, facts) for name, value in probe.headers.items()}
    if who is not None:
        headers["Authorization"] = f"Bearer {facts[who]}"
    content = b""
    if probe.body is not None:
        content = json.dumps(placed(probe.body, facts)).encode()
        headers.setdefault("Content-Type", "application/json")
    if probe.method not in ("GET", "OPTIONS"):
        headers["Content-Length"] = str(len(content))
    path = quote(with_facts(probe.path, facts), safe="/?&=%'\\")
    lines = [f"{probe.method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + content


def with_facts(text: str, facts: Mapping[str, str]) -> str:
    for name, value in facts.items():
        text = text.replace("{" + name + "}", value)
    return text


def placed(value: Any, facts: Mapping[str, str]) -> Any:
    """A body with the facts in their places; ids of workers are numbers."""
    if isinstance(value, dict):
        return {name: placed(each, facts) for name, each in value.items()}
    if isinstance(value, list):
        return [placed(each, facts) for each in value]
    if isinstance(value, str):
        text = with_facts(value, facts)
        return int(text) if value in ("{worker}", "{my_worker}") else text
    return value


def answered(address: str, request: bytes) -> str:
    """All that comes back until the connection is closed, or nothing for a while."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    parts = []
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(request)
        try:
            while part := connection.recv(65_536):
                parts.append(part)
                connection.settimeout(1.0)
        except (TimeoutError, ConnectionResetError):
            pass
    return b"".join(parts).decode("latin-1")


def status(answer: str) -> int:
    return int(answer.split(" ", 2)[1]) if answer.startswith("HTTP/1.1 ") else 0


async def tried(target: Target, probe: Probe, number: int) -> str | None:
    """How the probe got in; None: it did not."""
    before = await target.state()
    answer = await to_thread.run_sync(answered, target.address, request_of(probe, target.facts, probe.who, number))
    changed = await target.state() != before
    problems = {
        "it is told": CANARY in answer,
        "it has changed something": changed,
        "it is a success": 200 <= status(answer) < 300 and not probe.filtered,
        "it breaks": status(answer) >= 500,
        "another site may read it": "access-control-allow" in answer.lower(),
    }
    wrong = ", ".join(name for name, is_so in problems.items() if is_so)
    return f"{probe.name}: {wrong}: {answer[:500]}" if wrong else None


def test_there_are_as_many_as_promised() -> None:
    assert len(PROBES) >= 50
    assert len({probe.name for probe in PROBES}) == len(PROBES)


async def test_no_probe_gets_in(dsn: str, db: asyncpg.Connection[Any]) -> None:
    with await to_thread.run_sync(lambda: entered(dsn, "--proxies", "127.0.0.1")) as (_, address):
        target = await prepared(address, dsn, db)
        found = [await tried(target, probe, number) for number, probe in enumerate(PROBES)]
        got_in = [how for how in found if how is not None]
        assert not got_in, "\n".join(got_in)
        # As one who may, the same passes: none has failed for another reason.
        for number, probe in enumerate(PROBES):
            if probe.control:
                plain = Probe(probe.name, "root", probe.method, probe.path, probe.body)
                request = request_of(plain, target.facts, "root", number)
                answer = await to_thread.run_sync(answered, address, request)
                assert status(answer) not in PASSED, (probe.name, answer)


async def test_the_time_of_an_answer_tells_nothing_about_a_token(dsn: str) -> None:
    """Medians of requests in turn: an unknown id, a known one with a wrong secret, and with all but a letter right."""
    root = await token(dsn)
    tokens = {
        "unknown": "pgw_aaaaaaaaaaaa_" + "x" * 43,
        "known": root[:17] + "x" * 43,
        "nearly": root[:-1] + ("A" if root[-1] != "A" else "B"),
    }
    with await to_thread.run_sync(lambda: entered(dsn, "--proxies", "127.0.0.1")) as (_, address):
        took: dict[str, list[float]] = {name: [] for name in tokens}
        async with httpx.AsyncClient(base_url=address, timeout=LIMIT_S) as client:
            for number in range(400):
                for name, text in tokens.items():
                    headers = {"Authorization": f"Bearer {text}", "X-Forwarded-For": f"10.1.{number // 250}.{number}"}
                    began = time.perf_counter()
                    assert (await client.get("/v1/queues", headers=headers)).status_code == 401
                    took[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in took.items()}
    assert max(medians.values()) < 1.3 * min(medians.values()), medians


def entered(dsn: str, *flags: str) -> Any:
    """`served`, entered in a thread of its own: it waits for the process."""
    from tests.http.test_server import stack

    return stack(served(dsn, *flags))
