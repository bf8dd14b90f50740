"""A real Postgres for every test: one server per process that runs tests, a fresh database per test.

By default the embedded Postgres 18. `--pg-bin=DIR` runs the server found there instead; PGWORKD_TEST_DSN uses a
server that is already up (its user must be allowed to create databases).

`pytest` runs the fast lane, in several processes (pytest-xdist): all but tests that are marked slow, and at least one
test of each promise, if need be out of a slow file and then marked fast. `pytest -m slow` runs the others,
`pytest -m ""` all, `pytest -n 0` in one process. A test given by name (`pytest tests/x.py::test_y`) runs even if it is
slow, and in this process.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import re
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import structlog

from pgworkd import log
from pgworkd.database import array_types, schema
from pgworkd.embedded import EmbeddedPostgres
from pgworkd.process import redaction

pytest.register_assert_rewrite("tests.kits")  # their failing asserts are explained like those of tests

from tests.kits.server import (  # noqa: E402 - as it says
    Databases,
    create_empty_database,
    create_template,
    drop_database,
    start_test_server,
)

TURN, RUNNING = Path(__file__), Path(__file__).with_name("__init__.py")
"""Files to lock: whose turn it is to begin a test, and who runs one."""
FAST = "fast or not slow"
"""The expression of `-m` in pyproject.toml."""
SLOW_WHOLE = re.compile(r"^pytestmark = (?:.*\n    )*.*mark\.slow\(", re.M)
PROCESSES_PER_CPU = 2
"""Many tests wait most of the time: for a lease to end, a process to start, a lock."""
PROCESSES_MAX = 16


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pg-bin", type=Path, default=None, help="run the tests on the Postgres in this bin directory")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that are slow whole: to import and collect them takes each process several seconds."""
    if config.option.markexpr != FAST or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return (bool(SLOW_WHOLE.search(text)) and "mark.fast" not in text) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets those that run alone come last, so that nobody waits for them."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)


def pytest_collection_finish() -> None:
    """Spares each garbage collection the thousands of tests that have been collected."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Lets a slow test be run by its name; and keeps bytecode, as tests start thousands of commands and daemons."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if _names_tests(config) and config.option.markexpr == FAST:
        config.option.markexpr = ""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` means."""
    return 0 if _names_tests(config) else min(PROCESSES_MAX, PROCESSES_PER_CPU * len(os.sched_getaffinity(0)))


def _names_tests(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is to be alone waits until no other process runs one, and keeps those waiting meanwhile."""
    if not hasattr(item.config, "workerinput"):
        return (yield)  # no process of pytest-xdist: there are no others
    alone = item.get_closest_marker("alone") is not None
    with TURN.open() as turn, RUNNING.open() as running:
        fcntl.flock(turn, fcntl.LOCK_EX)  # first come, first served: else those that share would never let one in
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # closing does not do it while a process forked meanwhile lives


@pytest.fixture(autouse=True)
def levels_of_logging() -> Iterator[None]:
    """A command that runs in this process sets them, and the next test must not find that."""
    loggers = (logging.root, logging.getLogger("asyncpg"))
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test configures must not write to what the next one looks at, nor pass for the application's there."""
    for name in ("configured", "_own", "_processors"):
        monkeypatch.setattr(log, name, None)
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def hidden_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test hides in this process ("secret", a password) must be readable in the texts of the next one."""
    monkeypatch.setattr(redaction, "_secrets", redaction._secrets)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres | None]:
    """The session's own server; None when PGWORKD_TEST_DSN names another."""
    if os.environ.get("PGWORKD_TEST_DSN"):
        yield None
        return
    server = start_test_server(request.config.getoption("--pg-bin"))
    yield server
    server.stop("immediate")


@pytest.fixture(scope="session")
def server_dsn(server: EmbeddedPostgres | None) -> str:
    """A superuser's DSN of the server, with the template database made."""
    dsn = server.dsn() if server is not None else os.environ["PGWORKD_TEST_DSN"]
    asyncio.run(create_template(dsn, schema.text()))
    return dsn


@pytest.fixture(scope="session")
def databases(server_dsn: str) -> Iterator[Databases]:
    """Makes the databases of the tests ahead."""
    with Databases(server_dsn) as made:
        yield made


@pytest.fixture
def dsn(databases: Databases) -> Iterator[str]:
    """The DSN of a fresh database with the schema installed."""
    dsn = databases.take()
    yield dsn
    databases.drop(dsn)


@pytest.fixture
async def empty_dsn(server_dsn: str) -> AsyncIterator[str]:
    """The DSN of a fresh database without the schema."""
    name = f"pgworkd_empty_{uuid.uuid4().hex[:12]}"
    yield await create_empty_database(server_dsn, name)
    await drop_database(server_dsn, name)


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection to the test's database, as an application would hold one."""
    connection = await asyncpg.connect(dsn)
    array_types.register(connection)
    yield connection
    connection.terminate()
