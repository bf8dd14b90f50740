"""A real Postgres for every test: one server per process that runs tests, a fresh database per test.

By default the embedded Postgres 18. `--pg-bin=DIR` runs the server found there instead; PGWORKD_TEST_DSN uses a
server that is already up (its user must be allowed to create databases).
"""

from __future__ import annotations

import asyncio
import logging
import os
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
from tests.lanes import (  # noqa: F401 - hooks of pytest
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_runtest_protocol,
    pytest_xdist_auto_num_workers,
)

pytest.register_assert_rewrite("tests.kits")  # their failing asserts are explained like those of tests

from tests.kits.server import (  # noqa: E402 - as it says
    Databases,
    create_empty_database,
    create_template,
    drop_database,
    start_test_server,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pg-bin", type=Path, default=None, help="run the tests on the Postgres in this bin directory")


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
