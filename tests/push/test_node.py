"""What we send, taken by the package of Standard Webhooks for JavaScript, and by the page's receiver in TypeScript."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from pgworkd.push.message import body_of_test, headers
from tests.kits.daemon import insert, until, waits_for_status
from tests.kits.docs import blocks
from tests.kits.node import MODULES, compiled, needs_packages, program_of
from tests.kits.push import pushing, put_endpoint
from tests.kits.server import free_port
from tests.kits.verbs import Db

HERE = Path(__file__).parent
SECRET = bytes(range(32))
TEXT = "whsec_" + base64.b64encode(SECRET).decode()


pytestmark = [needs_packages, pytest.mark.slow("compilers and programs of node")]


def _verdicts(*sent: tuple[bytes, dict[str, str], str]) -> list[str]:
    """What the package says of each content, with its headers, for a secret."""
    lines = [
        json.dumps({"content": base64.b64encode(content).decode(), "headers": found, "secret": secret})
        for content, found, secret in sent
    ]
    command = ["node", str(HERE / "verify.cjs")]
    env = os.environ | {"NODE_PATH": str(MODULES)}
    done = subprocess.run(command, input="\n".join(lines), env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _signed(content: bytes, at: datetime, *secrets: bytes) -> dict[str, str]:
    return headers(uuid4(), content, at, secrets or [SECRET], {})


def test_the_package_takes_what_we_sign_and_refuses_all_else() -> None:
    now = datetime.now(UTC)
    content = body_of_test("billing", now)
    found = _signed(content, now)
    changed = [bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]]) for at in range(0, len(content), 5)]
    other = {**found, "webhook-id": str(uuid4())}
    old = _signed(content, now - timedelta(minutes=6))
    both = _signed(content, now, b"y" * 32, SECRET)
    taken, rotated, *refused = _verdicts(
        (content, found, TEXT),
        (content, both, TEXT),
        (content, other, TEXT),
        (content, old, TEXT),
        (content, {**old, "webhook-timestamp": found["webhook-timestamp"]}, TEXT),
        (content, found, "whsec_" + base64.b64encode(b"z" * 32).decode()),
        *[(each, found, TEXT) for each in changed],
    )
    assert (taken, rotated) == ("taken endpoint.test", "taken endpoint.test")
    assert len(refused) == len(changed) + 4
    assert all(each.startswith("refused: ") for each in refused)
    assert "too old" in refused[1]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[str]:
    """The receiver of docs/push.md, checked and compiled as strictly as can be; its address."""
    (block,) = [each for each in blocks("docs/push.md") if each.language == "typescript"]
    port = free_port()
    (tmp_path / "receiver.ts").write_text(re.sub(r"\b8099\b", str(port), block.text), encoding="utf-8")
    program_of(tmp_path)
    env = os.environ | {"PGWORKD_SECRET_BILLING": TEXT}
    command = ["node", str(compiled(tmp_path) / "receiver.js")]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("receiving")
    yield f"http://127.0.0.1:{port}/jobs"
    process.kill()
    process.wait()
    process.stdout.close()


async def test_the_receiver_in_typescript_does_its_jobs(
    dsn: str, db: Db, receiver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGWORKD_SECRET_BILLING", TEXT)
    await put_endpoint(db, "billing", receiver, "invoices", secret_name="billing")
    async with pushing(dsn):
        good, bad = await insert(db, "invoices", '{"invoice": 7}'), await insert(db, "invoices")
        await until(waits_for_status(db, good, "completed"))
        await until(waits_for_status(db, bad, "dead"))
    assert await db.fetchval("SELECT result::text FROM pgworkd.finished_jobs") == '{"paid": 7}'
    assert "which invoice?" in await db.fetchval("SELECT error FROM pgworkd.jobs")
