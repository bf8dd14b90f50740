"""psql with schema.sql, `pgworkd migrate`, its --print and the wheel install the same schema, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncpg
import pytest

from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import PgworkdError, SchemaError
from tests.kits.planting import ROOT
from tests.kits.schema import Roles, catalog, differences
from tests.kits.server import binaries
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("whole schemas installed, by psql and others")

Psql = Callable[..., subprocess.CompletedProcess[str]]
PLANS = ROOT / "pgworkd" / "sql" / "98_plans.sql"


@pytest.fixture
def psql(request: pytest.FixtureRequest) -> Psql:
    """Runs the server's own psql, or else the one on the path."""
    own = binaries(request.config.getoption("--pg-bin")) / "psql"
    found = str(own) if own.exists() else shutil.which("psql")
    if found is None:
        pytest.skip("there is no psql")

    def run(dsn: str, *arguments: str, sql: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [found, "-X", "-q", dsn, *arguments]
        return subprocess.run(command, input=sql, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
async def fresh(empty_dsn: str) -> AsyncIterator[Db]:
    """A session in a database without the schema."""
    connection = await asyncpg.connect(empty_dsn)
    yield connection
    connection.terminate()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkout's schema.sql with its chapters, to be damaged."""
    shutil.copy2(ROOT / "schema.sql", tmp_path)
    shutil.copytree(ROOT / "pgworkd" / "sql", tmp_path / "pgworkd" / "sql")
    return tmp_path


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the wheel installs."""
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(directory / "site")
    return directory / "site"


def whole(copied: Path) -> str:
    """What the loader makes of the copy."""
    return "".join(schema._lines(copied / "schema.sql", copied / "pgworkd" / "sql"))


async def installed(db: Db) -> bool:
    """Whether any part of the schema is installed."""
    return await db.fetchval("SELECT to_regnamespace('pgworkd')") is not None


# All ways lead to the same schema


async def test_psql_installs_what_migrate_installs(db: Db, empty_dsn: str, fresh: Db, psql: Psql) -> None:
    done = psql(empty_dsn, "-f", str(ROOT / "schema.sql"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    expected = await catalog(db)
    assert len(expected["functions"]) > 150
    assert differences(await catalog(fresh), expected) == []
    for again in (psql(empty_dsn, "-f", str(ROOT / "schema.sql")), psql(empty_dsn, sql=schema.script())):
        assert (again.returncode, again.stderr) == (0, "")
        assert differences(await catalog(fresh), expected) == []
    await schema.migrate(ConnectionOptions(empty_dsn))
    assert differences(await catalog(fresh), expected) == []


async def test_what_migrate_prints_installs_the_same_schema(db: Db, fresh: Db) -> None:
    command = [sys.executable, "-m", "pgworkd.cli", "migrate", "--print"]
    printed = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout == schema.script()
    await fresh.execute(printed.stdout)
    assert differences(await catalog(fresh), await catalog(db)) == []


async def test_the_wheel_installs_what_the_checkout_installs(
    db: Db, empty_dsn: str, fresh: Db, unpacked: Path, tmp_path: Path
) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pgworkd.cli", "migrate", *arguments]
        env = os.environ | {"PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    assert await asyncio.to_thread(run, "--print") == schema.script()
    assert await asyncio.to_thread(run, "--dsn", empty_dsn) == f"schema version: none before, {schema.VERSION} now\n"
    assert differences(await catalog(fresh), await catalog(db)) == []


async def test_a_difference_between_catalogs_is_detected(db: Db) -> None:
    before = await catalog(db)
    await db.execute(
        "ALTER FUNCTION pgworkd.claim RESET jit; ALTER TABLE pgworkd.jobs ALTER COLUMN counted SET DEFAULT true"
    )
    found = differences(before, await catalog(db))
    assert [line.split("\n")[0].split("(")[0] for line in found] == [
        "functions: pgworkd.claim",
        "settings of functions: pgworkd.claim",
        "columns: jobs.counted",
    ]


# Bad input


async def test_a_missing_chapter_installs_nothing(empty_dsn: str, fresh: Db, copied: Path, psql: Psql) -> None:
    (copied / "pgworkd" / "sql" / "60_settle.sql").unlink()
    done = psql(empty_dsn, "-f", str(copied / "schema.sql"))
    assert done.returncode == 3
    assert "60_settle.sql: No such file or directory" in done.stderr
    assert not await installed(fresh)
    with pytest.raises(SchemaError, match=r"60_settle\.sql, a part of the schema, is missing .*: reinstall pgworkd"):
        whole(copied)


async def test_a_chapter_that_fails_in_the_middle_installs_nothing(
    empty_dsn: str, fresh: Db, copied: Path, psql: Psql, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter = copied / "pgworkd" / "sql" / "60_settle.sql"
    head, found, tail = chapter.read_text().partition("-- Failed:")
    chapter.write_text(f"{head}SELECT 1 / 0;\n{found}{tail}")
    done = psql(empty_dsn, "-f", str(copied / "schema.sql"))
    assert done.returncode == 3
    assert "division by zero" in done.stderr
    assert not await installed(fresh)
    monkeypatch.setattr(schema, "text", lambda: whole(copied))
    with pytest.raises(PgworkdError, match="division by zero"):
        await schema.migrate(ConnectionOptions(empty_dsn))
    assert not await installed(fresh)


@pytest.mark.parametrize(
    "command",
    [
        r"\i pgworkd/sql/60_settle.sql",
        r"\ir ../sql/60_settle.sql",
        r"\ir pgworkd/sql/../../secret.sql",
        r"\ir /etc/passwd",
        r"\ir pgworkd/sql/60_settle.sql pgworkd/sql/65_archive.sql",
        r"\ir pgworkd/sql/grants.txt",
        r"\! rm -r x",
        r"  \gexec",
        r"\setenv A b",
        "\\",
    ],
)
def test_other_psql_commands_are_refused(copied: Path, command: str) -> None:
    contract = copied / "schema.sql"
    lines = contract.read_text().splitlines()
    contract.write_text("\n".join([*lines[:100], command, *lines[100:]]))
    with pytest.raises(SchemaError, match=r"schema\.sql, line 101: \\\S* is no command of a schema"):
        whole(copied)


def test_a_chapter_contains_no_psql_command(copied: Path) -> None:
    with (copied / "pgworkd" / "sql" / "70_schedules.sql").open("a") as chapter:
        chapter.write("\\ir 80_maintenance.sql\n")
    with pytest.raises(SchemaError, match=r"70_schedules\.sql: \\ir is no command of a schema"):
        whole(copied)


async def test_psql_leaves_a_newer_schema_unchanged(dsn: str, db: Db, psql: Psql) -> None:
    await db.execute("UPDATE pgworkd.schema_version SET version = version + 1; DROP VIEW pgworkd.job_progress")
    before = await catalog(db)
    done = psql(dsn, "-f", str(ROOT / "schema.sql"))
    assert done.returncode == 3
    assert "newer than this script" in done.stderr
    assert differences(await catalog(db), before) == []


@pytest.mark.parametrize("ends", ["superuser", "owner", "stranger"])
async def test_a_schema_installed_by_another_role_with_psql(empty_dsn: str, fresh: Db, psql: Psql, ends: str) -> None:
    """Its owner and a superuser may migrate it, and leave its owner unchanged; any other role changes nothing."""
    roles = Roles(empty_dsn)
    owner, stranger = roles.name("owner"), roles.name("reader")
    await fresh.execute(f"CREATE ROLE {owner} LOGIN PASSWORD 'secret'; CREATE ROLE {stranger} LOGIN PASSWORD 'secret'")
    try:
        database = await fresh.fetchval("SELECT quote_ident(current_database())")
        await fresh.execute(f"GRANT CREATE ON DATABASE {database} TO {owner}")
        assert psql(roles.dsn("owner"), "-f", str(ROOT / "schema.sql")).returncode == 0
        before = await catalog(fresh)
        if ends != "stranger":
            await schema.migrate(ConnectionOptions(empty_dsn if ends == "superuser" else roles.dsn("owner")))
        else:
            await fresh.execute(f"GRANT USAGE, CREATE ON SCHEMA pgworkd TO {stranger}")
            before = await catalog(fresh)
            with pytest.raises(PgworkdError, match="permission denied for table"):
                await schema.migrate(ConnectionOptions(roles.dsn("reader")))
            assert psql(roles.dsn("reader"), "-f", str(ROOT / "schema.sql")).returncode == 3
        assert differences(await catalog(fresh), before) == []
    finally:
        for role in (owner, stranger):
            await fresh.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


# 98_plans.sql


def _planned() -> tuple[dict[str, list[str]], list[str]]:
    """The functions of each bundle, and those that run with the owner's privileges, according to the table."""
    text = PLANS.read_text(encoding="utf-8")
    bundles = {name: names.split() for name, names in re.findall(r"\('(\w+)', '\n([\w\s]+)'\)", text)}
    (owners,) = re.findall(r"VALUES \('\n([\w\s]+)'\)", text)
    return bundles, owners.split()


async def test_every_function_has_exactly_one_entry_in_98_plans(db: Db) -> None:
    bundles, owners = _planned()
    planned = sorted(name for names in bundles.values() for name in names)
    rows = await db.fetch(
        "SELECT p.proname::text, p.proconfig IS NULL AS inlined, p.prosecdef, l.lanname::text, p.proconfig[1] AS path"
        " FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang"
        " WHERE p.pronamespace = 'pgworkd'::regnamespace ORDER BY p.proname COLLATE \"C\""
    )
    assert planned == sorted({row["proname"] for row in rows})
    assert {row["proname"] for row in rows if row["inlined"]} == set(bundles["inline"])
    assert {row["lanname"] for row in rows if row["inlined"]} == {"sql"}
    assert {row["proname"] for row in rows if row["prosecdef"]} == set(owners)
    assert {row["path"] for row in rows if row["prosecdef"]} == {"search_path=pg_catalog, pgworkd, pg_temp"}
    assert {row["path"] for row in rows if not row["prosecdef"] and not row["inlined"]} == {
        "search_path=pgworkd, pg_catalog, pg_temp"
    }


async def test_a_function_without_an_entry_in_98_plans_installs_nothing(
    empty_dsn: str, fresh: Db, copied: Path, psql: Psql
) -> None:
    """As happened where the list of names was read in another way than was written."""
    plans = copied / "pgworkd" / "sql" / "98_plans.sql"
    plans.write_text(plans.read_text().replace(" settle_ended ", " "))
    done = psql(empty_dsn, "-f", str(copied / "schema.sql"))
    assert done.returncode == 3
    assert "these functions have no entry in 98_plans.sql: settle_ended(uuid[]" in done.stderr
    assert not await installed(fresh)


def test_nothing_needs_md5() -> None:
    """A server in FIPS mode does not have it."""
    for path in [ROOT / "schema.sql", *(ROOT / "pgworkd").rglob("*.sql"), *(ROOT / "pgworkd").rglob("*.py")]:
        assert not re.search(r"\bmd5\s*\(", path.read_text(encoding="utf-8"), re.I), path.name


def test_no_chapter_sets_the_settings_of_its_functions() -> None:
    """CREATE OR REPLACE would remove the setting again, or a function would get it from two places."""
    for path in sorted((ROOT / "pgworkd" / "sql").glob("[0-9]*.sql")):
        code = re.sub(r"--.*", "", path.read_text(encoding="utf-8"))
        heads = re.findall(r"CREATE OR REPLACE FUNCTION.*?(?:AS \$|^\s*RETURN\b)", code, re.S | re.M)
        assert not [head for head in heads if re.search(r"\bSET \w+ = |SECURITY DEFINER", head)], path.name


# The table of verbs in schema.sql

WITHIN = {
    "carefully",
    "clock",
    "clock_after_waiting",
    "deferred",
    "finished_of",
    "held_back",
    "is_later",
    "is_origin",
    "item_key",
    "known_pools",
    "may_stay_open",
    "mend_sequences",
    "payload_key",
    "rate_left",
    "rule_of",
    "rule_out_days",
    "server_id",
    "standing_worker",
    "told",
    "unlocked",
    "validate_days",
    "waits_keyed",
    "waits_plain",
    "waits_suspect",
    "who",
}
"""Functions that statements of the package or the installation use: parts of verbs, not verbs."""


async def test_the_table_of_verbs_lists_every_verb(db: Db) -> None:
    text = (ROOT / "schema.sql").read_text(encoding="utf-8")
    table = text.partition("=== The verbs")[2].partition("-- PW001")[0]
    rows = [line[5:51] for line in table.splitlines() if line.startswith("--   ") and "INSERT" not in line]
    listed = re.findall(r"[a-z_]+", re.sub(r"\(.*?\)", "", "\n".join(rows[1:])))
    assert len(listed) == len(set(listed))
    found = await db.fetch("SELECT proname FROM pg_proc WHERE pronamespace = 'pgworkd'::regnamespace")
    made = {row[0] for row in found}
    assert set(listed) <= made
    called: set[str] = set()
    for path in (ROOT / "pgworkd").rglob("*.py"):
        called |= set(re.findall(r"\bpgworkd\.([a-z_]+)\(", path.read_text(encoding="utf-8")))
    assert called & made - WITHIN - set(listed) == set()
    assert "PW001" in table
    assert "PW005" in table
