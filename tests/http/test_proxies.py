"""The gateway behind nginx, HAProxy and Caddy, with the configurations of docs/proxies.md, and with nginx' defaults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import httpx
import pytest
import requests

from tests.kits.commands import waits_until
from tests.kits.gateway import served, token
from tests.kits.node import CLIENTS
from tests.kits.planting import ROOT
from tests.kits.server import free_port

pytestmark = pytest.mark.slow("proxies, and bodies of 16 MiB")

Db: TypeAlias = "asyncpg.Connection[Any]"
PAGE = (ROOT / "docs" / "proxies.md").read_text(encoding="utf-8")
NGINX = """
{user} daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    {server}
}}
"""
USER = "user root;" if os.geteuid() == 0 else ""
"""The files of the test are its user's."""
CADDY = "{{\n admin off\n}}\n{server}"
DEFAULTS = "server { listen 127.0.0.1:8080; location / { proxy_pass http://127.0.0.1:7433; } }"
SIZES = (0, 1, 50_000, 140_000, 1_000_000)
"""Of payloads: below and above what servers and clients read at once."""


def blocks(heading: str) -> list[str]:
    """The configurations below a heading of the page."""
    below = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```text\n(.*?)```", below, re.DOTALL)


def configured(which: str) -> tuple[str, str, str]:
    """The program, its configuration, and the path below which it serves the gateway."""
    if which == "haproxy":
        (text,) = blocks("HAProxy")
        return "haproxy", text, ""
    if which == "caddy":
        (text,) = blocks("Caddy")
        return "caddy", CADDY.format(server=text.replace("jobs.example.com", "http://127.0.0.1:8080")), ""
    server, location = blocks("nginx")
    if which == "nginx below a path":
        return "nginx", re.sub(r"    location / \{.*?\n    \}\n", lambda _: location, server, flags=re.DOTALL), "/jobs"
    return "nginx", DEFAULTS if which == "nginx, defaults" else server, ""


@contextlib.contextmanager
def proxying(which: str, gateway: str, folder: Path) -> Iterator[str]:
    """A proxy in front of the gateway, or none; its address."""
    if which == "none":
        yield gateway
        return
    program, text, path = configured(which)
    program_path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program_path is None:
        pytest.skip(f"{program} is not installed (Debian: {program})")
    port = free_port()
    text = text.replace("127.0.0.1:7433", gateway.removeprefix("http://")).replace(
        "127.0.0.1:8080", f"127.0.0.1:{port}"
    )
    config = folder / "config"
    config.write_text(NGINX.format(folder=folder, server=text, user=USER) if program == "nginx" else text)
    arguments = {
        "nginx": ["-c", str(config), "-e", str(folder / "error.log")],
        "haproxy": ["-db", "-f", str(config)],
        "caddy": ["run", "--config", str(config), "--adapter", "caddyfile"],
    }[program]
    with subprocess.Popen([program_path, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}{path}"
            waits_until(lambda: answers(f"{url}/readyz"))
            yield url
        finally:
            process.terminate()


def answers(url: str) -> bool:
    """Whether a page is there."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=2).status_code == 200
    return False


@pytest.mark.parametrize("which", ["none", "nginx", "nginx below a path", "nginx, defaults", "haproxy", "caddy"])
async def test_a_gateway_behind_a_proxy_and_without_one(dsn: str, db: Db, tmp_path: Path, which: str) -> None:
    secret = await token(dsn)
    headers = {"Authorization": f"Bearer {secret}"}

    def play() -> None:
        with (
            served(dsn, "--proxies", "127.0.0.1") as (_, gateway),
            proxying(which, gateway, tmp_path) as url,
            httpx.Client(base_url=url, headers=headers, timeout=60) as client,
        ):
            sizes(client, plain="defaults" in which)
            links(client, url)
            waits(client)
            follows(client)
            curled(url, secret, tmp_path)
            with_others(url, secret)

    await asyncio.to_thread(play)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE payload IS NULL") == 0


def sizes(client: httpx.Client, *, plain: bool) -> None:
    """Bodies of all sizes, whole and in pieces, on one connection and on new ones."""
    for size in SIZES:
        for pieces in (1, 7):
            for kept in (True, False):
                job = json.dumps({"queue": "q", "payload": {"text": "x" * size}}).encode()
                step = len(job) // pieces + 1
                body = job if pieces == 1 else (job[at : at + step] for at in range(0, len(job), step))
                more = {"Content-Type": "application/json"} | ({} if kept else {"Connection": "close"})
                made = client.post("/v1/jobs", content=body, headers=more)
                assert made.status_code == 201, (size, pieces, kept, made.text)
                stored = client.get(f"/v1/jobs/{made.json()['id']}").json()
                assert len(stored["payload"]["text"]) == size
    large = {"jobs": [{"queue": "q", "payload": {"text": "x" * 100_000}}] * 150}
    answer = client.post("/v1/jobs/bulk", json=large)
    assert answer.status_code == (413 if plain else 201), answer.text
    lines = (json.dumps({"queue": "q", "payload": {"n": n}}).encode() + b"\n" for n in range(20_000))
    stream = client.post("/v1/jobs/stream", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert (stream.status_code, stream.json()) == (201, {"created": 20_000})


def links(client: httpx.Client, url: str) -> None:
    """Where an answer points to is there; ETags match, and HEAD is answered."""
    made = client.post("/v1/jobs", json={"queue": "q"})
    job = httpx.URL(url).join(made.headers["location"])
    shown = client.get(job)
    assert shown.status_code == 200
    edited = client.patch(job, json={"priority": 1}, headers={"If-Match": shown.headers["etag"]})
    assert edited.status_code == 200
    assert client.head("/healthz").status_code == 200
    missing = client.get("/v1/jobs/01a22802-87fa-7fc2-8fa8-93e85cc80fa5").json()
    assert client.get(httpx.URL(url).join(missing["type"])).status_code == 200


def waits(client: httpx.Client) -> None:
    """A claim that waits is answered when a job comes."""
    worker = client.post("/v1/workers", json={"name": "w", "queues": {"waited": 1}}).json()
    began = time.monotonic()
    body = {"worker": worker["worker"], "queues": ["waited"], "wait_s": 2, "claim_id": 1}
    claimed = client.post("/v1/claims", json=body, headers={"Pgworkd-Secret": worker["secret"]})
    assert (claimed.status_code, claimed.json()["assignments"]) == (200, [])
    assert 2 <= time.monotonic() - began < 10


def follows(client: httpx.Client) -> None:
    """Events come one by one, not when the stream ends."""
    began = time.monotonic()
    with client.stream("GET", "/v1/events?of=audit&for_s=5") as events:
        assert next(line for line in events.iter_lines() if line.startswith("event:")) == "event: audit"
        assert time.monotonic() - began < 4


def with_others(url: str, secret: str) -> None:
    """Clients of other languages, as far as they are installed; `requests` is."""
    whole = json.dumps({"queue": "q", "payload": {"text": "x" * SIZES[-1]}}).encode()
    for body in (whole, (whole[at : at + 100_000] for at in range(0, len(whole), 100_000))):
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        assert requests.post(f"{url}/v1/jobs", data=body, headers=headers, timeout=60).status_code == 201
    commands = {"node": ["node", "sizes.mjs"], "javac": ["java", "Sizes.java"], "go": ["go", "run", "sizes.go"]}
    for program, command in commands.items():
        if shutil.which(program) is not None:
            called = [*command, url, secret, *map(str, SIZES)]
            done = subprocess.run(called, cwd=CLIENTS, capture_output=True, text=True, check=False)
            assert done.stdout.split() == ["201", "true"] * 2 * len(SIZES), (program, done.stdout, done.stderr)


def curled(url: str, secret: str, folder: Path) -> None:
    """curl, which asks with Expect: 100-continue before it sends much."""
    if shutil.which("curl") is None:
        return
    body = folder / "body"
    body.write_text(json.dumps({"queue": "q", "payload": {"text": "x" * 900_000}}))
    command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"Authorization: Bearer {secret}"]
    command += ["-H", "Content-Type: application/json", "--data-binary", f"@{body}"]
    for offers in ((), ("-H", "Expect: 100-continue"), ("--http2",)):
        done = subprocess.run([*command, *offers, f"{url}/v1/jobs"], capture_output=True, text=True, check=True)
        assert done.stdout == "201", offers
