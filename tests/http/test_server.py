"""`pgworkd serve` as a process: its start, its stop, slow clients, an away database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.kits.gateway import LIMIT_S, served, token
from tests.kits.proxy import Proxy

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

JOB = {"queue": "q"}


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


@contextlib.contextmanager
def entered(made: Any) -> Iterator[Any]:
    """A context that another thread has entered."""
    context, value = made
    try:
        yield value
    finally:
        context.__exit__(None, None, None)


def stack(context: Any) -> Any:
    return entered((context, context.__enter__()))


def place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_a_stop_answers_those_who_wait_and_exits_with_0(dsn: str) -> None:
    headers = bearer(asyncio.run(token(dsn)))
    with served(dsn) as (process, address), httpx.Client(base_url=address, headers=headers, timeout=LIMIT_S) as client:
        job = client.post("/v1/jobs", json=JOB).json()["id"]
        found: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: found.append(httpx.get(f"{address}/v1/jobs/{job}?wait_s=60", headers=headers, timeout=90))
        )
        waiting.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        waiting.join(LIMIT_S)
        assert process.wait(LIMIT_S) == 0
        assert time.monotonic() - began < 15
        assert found[0].json()["status"] == "pending"


def test_a_stop_that_cuts_off_a_request_logs_no_traceback(dsn: str) -> None:
    with (
        served(dsn, "--auth", "none", PGWORKD_SHUTDOWN_S="1") as (process, address),
        socket.create_connection(place(address)) as half,
    ):
        half.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        httpx.get(f"{address}/healthz").raise_for_status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert process.stdout is not None
        told = process.stdout.read()
    assert "timeout graceful shutdown exceeded" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--listen", "0.0.0.0:0"], "no token exists"),
        (["--listen", "0.0.0.0:0", "--auth", "none"], "can be reached from other hosts"),
        (["--listen", "[::]:0", "--auth", "none"], "can be reached from other hosts"),
        (["--auth", "maybe"], "http_auth"),
        (["--listen", "nowhere.invalid:0"], "host name is unknown"),
        (["--listen", "7433"], "host:port"),
        (["--hosts", "http://x"], "http_hosts"),
        (["--proxies", "proxy"], "http_proxies"),
        (["--with", "api,dashboards"], "http_with"),
        (["--with", ","], "http_with"),
    ],
)
def test_what_would_be_open_or_wrong_does_not_start(dsn: str, flags: list[str], says: str) -> None:
    command = [sys.executable, "-m", "pgworkd.cli", "serve", "--dsn", dsn, *flags]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert found.returncode == 2, found.stderr
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_without_tokens_any_program_on_this_host_may_call_if_asked_so(dsn: str) -> None:
    with served(dsn, "--auth", "none") as (_, address):
        assert httpx.post(f"{address}/v1/jobs", json=JOB).status_code == 201
        assert httpx.post(f"{address}/v1/jobs", json=JOB, headers={"Host": "evil.example"}).status_code == 421
        assert httpx.post(f"{address}/v1/jobs", json=JOB, headers={"Origin": "http://x"}).status_code == 403


def test_a_log_of_requests_has_no_secret_and_no_payload(dsn: str) -> None:
    text = asyncio.run(token(dsn))
    with served(dsn, "--debug-http") as (process, address):
        httpx.post(f"{address}/v1/jobs", json=JOB | {"payload": {"card": "4111"}}, headers=bearer(text))
        httpx.get(f"{address}/v1/queues/a%2Fb?token={text}", headers=bearer(text))
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=LIMIT_S)[0]
    lines = [json.loads(line) for line in log.splitlines() if "http.request" in line]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/jobs", 201),
        ("GET", "/v1/queues/a%2Fb", 422),
    ]
    assert "4111" not in log
    assert text.rpartition("_")[2] not in log


def test_a_log_of_bodies_has_payloads_and_no_secret(dsn: str) -> None:
    headers = bearer(asyncio.run(token(dsn)))
    with (
        served(dsn, "--debug-bodies") as (process, address),
        httpx.Client(base_url=address, headers=headers, timeout=LIMIT_S) as client,
    ):
        made = client.post("/v1/tokens", json={"name": "x", "scopes": {"read": None}}).json()
        worker = client.post("/v1/workers", json={"name": "w", "queues": {"q": 1}}).json()
        client.post("/v1/jobs", json=JOB | {"payload": {"card": "4111" + "x" * 3000}})
        claim = {"worker": worker["worker"], "queues": ["q"], "wait_s": 20.0}
        secret = {"Pgworkd-Secret": worker["secret"]}
        got = client.post("/v1/claims", json=claim, headers=secret).json()["assignments"][0]
        client.post(f"/v1/assignments/{got['assignment']}/complete", json={})
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=LIMIT_S)[0]
    lines = [json.loads(line) for line in log.splitlines() if "http.request" in line]
    assert [line["path"] for line in lines][-1] == "/v1/assignments/a1_***/complete"
    assert "4111xxx" in lines[2]["request"]
    assert len(lines[2]["request"]) == 2000
    assert lines[2]["answer"].startswith('{"id":')
    for hidden in (made["token"].rpartition("_")[2], worker["secret"], got["assignment"][3:]):
        assert hidden[:20] not in log


HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("sent", ["nothing", "a byte at a time", "headers without end", "half a body"])
def test_slow_clients_lose_their_connections_and_hold_up_nobody(dsn: str, sent: str) -> None:
    headers = bearer(asyncio.run(token(dsn)))
    auth = f"Authorization: {headers['Authorization']}\r\nContent-Type: application/json\r\n".encode()
    pieces = {
        "nothing": lambda n: b"",
        "a byte at a time": lambda n: HEAD[n : n + 1] or b"x",
        "headers without end": lambda n: b"X: " + b"y" * 1000 if n else HEAD,
        "half a body": lambda n: b"" if n else HEAD + auth + b"Content-Length: 100\r\n\r\n{",
    }
    with served(dsn) as (_, address):
        slow = [socket.create_connection(place(address)) for _ in range(20)]
        until, number = time.monotonic() + 70, 0
        while slow:
            assert time.monotonic() < until
            slow = [each for each in slow if is_open(each, pieces[sent](number))]
            number += 1
            assert httpx.post(f"{address}/v1/jobs", json=JOB, headers=headers).status_code == 201
            time.sleep(0.3)


def is_open(connection: socket.socket, piece: bytes) -> bool:
    """Sends a piece; False, and closes it, if the server has closed it."""
    connection.settimeout(0.01)
    try:
        connection.sendall(piece)
        if connection.recv(1000) != b"":
            return True
    except TimeoutError:
        return True
    except OSError:
        pass
    connection.close()
    return False


async def test_while_the_database_is_away_nothing_is_done_and_said_so(dsn: str) -> None:
    headers = bearer(await token(dsn))
    limits = {"PGWORKD_CONNECT_TIMEOUT_S": "1", "PGWORKD_COMMAND_TIMEOUT_S": "1"}
    async with Proxy(dsn) as proxy:
        # In a thread: the proxy needs the loop while the gateway starts.
        with await asyncio.to_thread(lambda: stack(served(proxy.dsn, **limits))) as (_, address):
            async with httpx.AsyncClient(base_url=address, headers=headers, timeout=LIMIT_S) as client:
                assert (await client.post("/v1/jobs", json=JOB)).status_code == 201
                proxy.mode = "refuse"
                proxy.cut()
                refused = await client.post("/v1/jobs", json=JOB)
                assert (refused.status_code, refused.json()["type"]) == (503, "/v1/problems/unavailable")
                assert int(refused.headers["retry-after"]) > 0
                assert (await client.get("/healthz")).status_code == 200
                proxy.mode = "pass"
                until = time.monotonic() + LIMIT_S
                while (await client.post("/v1/jobs", json=JOB)).status_code != 201:
                    assert time.monotonic() < until


def test_forwarded_addresses_are_believed_of_proxies_only(dsn: str) -> None:
    guess = bearer("pgw_aaaaaaaaaaaa_" + "x" * 40)
    for flags, codes in (((), {401, 429}), (("--proxies", "127.0.0.1"), {401})):
        with served(dsn, *flags) as (_, address), httpx.Client(base_url=address, headers=guess) as client:
            found = {
                client.get("/v1/queues", headers={"X-Forwarded-For": f"10.0.0.{n}"}).status_code for n in range(30)
            }
            assert found == codes


def test_the_port_is_closed_once_it_has_stopped(dsn: str) -> None:
    with served(dsn, "--auth", "none") as (process, address):
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    with closing(socket.socket()) as probe:
        assert probe.connect_ex(place(address)) != 0
