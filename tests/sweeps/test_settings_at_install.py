"""Whatever is set for a database, the schema becomes the same, and is of use."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

import anyio
import asyncpg
import pytest

from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits.planting import ROOT
from tests.kits.schema import Catalog, catalog, differences
from tests.kits.server import binaries, create_empty_database, drop_database
from tests.kits.verbs import Db, claim_ids, complete, insert, worker

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

GROUPS, EACH = 32, 12
"""More settings than there are."""
TIMES = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout",
         "tcp_user_timeout")  # fmt: skip
"""Those of our own sessions are set on connect; sessions here, and psql, would end."""
STRINGS = {
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "backtrace_functions": "errfinish",
    "client_encoding": "LATIN1",
    "createrole_self_grant": "set, inherit",
    "default_table_access_method": "heap",
    "default_tablespace": "pg_default",
    "default_text_search_config": "german",
    "default_toast_compression": "lz4",
    "lc_messages": "C",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "search_path": "nowhere",
    "temp_tablespaces": "",
    "application_name": "x'\\y",
    "vacuum_buffer_usage_limit": "128",
}
LEFT_OUT = {
    "exit_on_error", "post_auth_delay", "pre_auth_delay", "restrict_nonsystem_relation_kind",  # end or delay sessions
    "role", "session_authorization", "is_superuser",  # no settings of a database
    "seed", "log_statement_stats", "stats_fetch_consistency", "max_stack_depth",  # bounded by the system
    "jit_debugging_support", "jit_profiling_support", "trace_sort", "trace_locks", "trace_lwlocks",  # no such build
    "log_min_messages", "client_min_messages", "log_min_error_statement",  # a flood at their most
    "default_transaction_read_only", "transaction_read_only",  # refused: see below
    "commit_delay", "temp_buffers", "ignore_system_indexes", "zero_damaged_pages", "ignore_checksum_failure",
    "allow_system_table_mods", "unix_socket_permissions", "ssl_renegotiation_limit", "transaction_timeout",
    "debug_discard_caches", "transaction_isolation",
    "transaction_deferrable", "geqo_generations", "geqo_pool_size",
}  # fmt: skip
_SETTINGS = """SELECT name, vartype, setting, min_val, max_val, enumvals FROM pg_settings
    WHERE context IN ('user', 'superuser') AND NOT name = ANY ($1) ORDER BY name"""


def hostile(
    name: str, kind: str, setting: str, low: str | None, high: str | None, of: Sequence[str] | None
) -> list[str]:
    """Other values of a setting."""
    if kind == "bool":
        return ["off" if setting == "on" else "on"]
    if kind == "enum":
        return [each for each in of or () if each != setting and not each.startswith("debug")]
    if kind in ("integer", "real"):
        least = "1" if name.endswith("_timeout") and low == "0" else low
        return [each for each in (least, high) if each is not None and each != setting]
    return [STRINGS[name]] if name in STRINGS else []


async def profiles(db: Db) -> list[dict[str, str]]:
    """Values for several settings each, so that every value is in one."""
    found: list[dict[str, str]] = []
    for row in await db.fetch(_SETTINGS, list(LEFT_OUT)):
        for value in hostile(*row):
            free = next((each for each in found if len(each) < EACH and row["name"] not in each), None)
            if free is None:
                found.append(free := {})
            free[row["name"]] = value
    return found


@pytest.fixture
async def expected(db: Db) -> Catalog:
    """What an installation without settings makes."""
    return await catalog(db)


async def smoke(db: Db) -> None:
    """A job from its insertion to its end."""
    first = await insert(db, 1, payload='{"a": null}')
    assert await claim_ids(db, await worker(db), 10) == first
    await complete(db, first)
    assert await db.fetchval("SELECT status FROM pgworkd.result_of($1)", first) == "completed"
    assert await db.fetchval("SELECT pgworkd.error_pattern('user 17 at /var/lib/x')") == "user <n> at <path>"


@pytest.mark.parametrize("number", range(GROUPS))
@pytest.mark.parametrize("by", ["migrate", "psql"])
async def test_the_schema_is_the_same_whatever_is_set(
    server_dsn: str, db: Db, expected: Catalog, request: pytest.FixtureRequest, number: int, by: str
) -> None:
    all_ = await profiles(db)
    assert len(all_) <= GROUPS
    if number >= len(all_):
        pytest.skip("there are no more")
    settings = all_[number]
    name = f"pgworkd_set_{uuid.uuid4().hex[:12]}"
    dsn = await create_empty_database(server_dsn, name)
    try:
        for key, value in settings.items():
            quoted = value.replace("'", "''")
            await db.execute(f"ALTER DATABASE {name} SET {key} = E'{quoted}'".replace("\\", "\\\\"))
        if by == "migrate":
            await schema.migrate(ConnectionOptions(dsn))
        else:
            psql = binaries(request.config.getoption("--pg-bin")) / "psql"
            command = [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", dsn, "-f", ROOT / "schema.sql"]
            environ = {**os.environ, "PGOPTIONS": " ".join(f"-c {each}=0" for each in TIMES)}
            done = await anyio.run_process([*map(str, command)], check=False, env=environ)
            assert done.returncode == 0, (settings, done.stderr)
        session = await asyncpg.connect(dsn, server_settings=dict.fromkeys(TIMES, "0"))
        await smoke(session)
        session.terminate()
        await db.execute(f"ALTER DATABASE {name} RESET ALL")
        session = await asyncpg.connect(dsn)
        assert differences(await catalog(session), expected) == [], settings
        session.terminate()
    finally:
        await drop_database(server_dsn, name)
