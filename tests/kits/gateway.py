"""Gateways for tests: in this process over ASGI, and as `pgworkd serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from pgworkd.admin import Admin
from pgworkd.core.access import SCOPES
from pgworkd.database.connection import ConnectionOptions
from pgworkd.gateway.api.app import Application
from pgworkd.gateway.api.request.gateway import Gateway, GatewayOptions

LIMIT_S = 30.0
Scopes = Mapping[str, Sequence[str] | None]
ALL: Scopes = dict.fromkeys(SCOPES)


@dataclass
class Caller:
    """Calls a gateway with one token."""

    client: httpx.AsyncClient
    token: str

    async def __call__(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """The answer to a request; `body` as JSON."""
        headers = {"Authorization": f"Bearer {self.token}"} | more.pop("headers", {})
        if body is not None:
            more["json"] = body
        return await self.client.request(method, path, headers=headers, **more)

    async def ok(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """The value of an answer that must be a success."""
        answer = await self(method, path, body, **more)
        assert answer.is_success, answer.text
        return answer.json()

    async def problem(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, str, dict[str, Any]]:
        """Status, slug and members of an answer that must be a problem."""
        answer = await self(method, path, body, **more)
        assert answer.headers["content-type"] == "application/problem+json", answer.text
        found = answer.json()
        assert found["status"] == answer.status_code
        return answer.status_code, found["type"].rpartition("/")[2], found


async def token(dsn: str, scopes: Scopes = ALL, name: str = "tester") -> str:
    """A new token in the database."""
    async with Admin(ConnectionOptions(dsn)) as admin:
        return str(await admin.tokens.add(name, scopes))


@contextlib.asynccontextmanager
async def calling(dsn: str, scopes: Scopes = ALL, **changes: Any) -> AsyncIterator[Caller]:
    """A gateway in this process that is called with a token of these scopes; `changes` to its options."""
    options = GatewayOptions(**{"database": ConnectionOptions(dsn), "connections_max": 5, "workers": False} | changes)
    app = Application(Gateway(options))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.running(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=LIMIT_S) as client,
    ):
        yield Caller(client, await token(dsn, scopes))


def also(caller: Caller, text: str) -> Caller:
    """The same gateway, called with another token."""
    return Caller(caller.client, text)


@contextlib.contextmanager
def served(
    dsn: str,
    *flags: str,
    module: Sequence[str] = ("pgworkd.cli", "serve"),
    listen: str = "127.0.0.1:0",
    **environ: str,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`pgworkd serve` on a free port, and its address; stopped gracefully at the end."""
    command = [sys.executable, "-m", *module, "--listen", listen, *flags]
    env = os.environ | {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json"} | environ
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "http.listening" in line:
                break
        else:
            raise AssertionError("".join(seen))
        yield process, "http://" + line.partition('"address": "')[2].partition('"')[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=LIMIT_S)
        if process.stdout is not None:
            process.stdout.close()
