"""Lists of hosts, and names with several addresses: a silent or wrong one does not keep us from the right one."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.client import enqueue
from pgworkd.core import events, race
from pgworkd.database import addresses, connection
from pgworkd.database.connection import Connection, ConnectionOptions, Listener
from pgworkd.database.heartbeat_store import HeartbeatStore
from pgworkd.database.requests import RequestPool
from pgworkd.database.store import Store
from pgworkd.database.transactions import TransactionPool
from pgworkd.errors import AccessRefused, DatabaseUnavailable, PgworkdError
from tests.kits.addresses import WRONG, Wrong, name_resolves, silent
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.proxy import Proxy

LIMIT_S = 10.0
"""Far more than anything takes that does not wait for it."""
SOON_S = LIMIT_S / 2


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_last", {})
    monkeypatch.setattr(race, "STAGGER_S", 0.2)
    monkeypatch.setattr(connection, "OTHERS_S", 0.3)


@pytest.fixture
async def wrong(dsn: str) -> AsyncIterator[Wrong]:
    async with Wrong(dsn).open() as opened:
        yield opened


async def plain(options: ConnectionOptions) -> None:
    one = Connection(options, "test")
    try:
        assert await one.value("SHOW transaction_read_only") == "off"
    finally:
        await one.close()


async def listen(options: ConnectionOptions) -> None:
    async with Listener(options).listen("c", lambda _: None, lambda: None) as probe:
        await probe()


async def transaction(options: ConnectionOptions) -> None:
    pool = TransactionPool(options, 1)
    try:
        async with pool.begin() as inside:
            await inside.execute("CREATE TEMP TABLE t ()")
    finally:
        await pool.close()


async def request(options: ConnectionOptions) -> None:
    pool = RequestPool(options, 1)
    try:
        async with pool.session() as lent:
            await lent.value("SELECT nextval('pgworkd.workers_id_seq')")
    finally:
        await pool.close()


async def lease(options: ConnectionOptions) -> None:
    store: HeartbeatStore = Store(options).heartbeats(LIMIT_S)
    try:
        assert await store.heartbeat(1, "running") is False
    finally:
        await store.close()


Use = Callable[[ConnectionOptions], Awaitable[None]]
USES: list[Use] = [plain, listen, transaction, request, lease]


async def timed(use: Use, dsn: str, limit_s: float = LIMIT_S, **options: Any) -> float:
    began_s = time.monotonic()
    await use(ConnectionOptions(dsn, connect_timeout_s=limit_s, command_timeout_s=5, **options))
    return time.monotonic() - began_s


@pytest.mark.parametrize("use", USES)
async def test_whatever_stands_before_the_right_host_all_connect(wrong: Wrong, use: Use) -> None:
    lists = [(*before, "right") for before in itertools.permutations(WRONG, 2)]
    lists += [(*WRONG, "right"), ("right", *WRONG), ("silent", "right", "frozen")]
    late: list[Any] = []

    async def tried(kinds: tuple[str, ...]) -> None:
        if (took_s := await timed(use, wrong.of(*kinds))) > SOON_S:
            late.append((kinds, took_s))

    async with anyio.create_task_group() as tasks:
        for kinds in lists:
            tasks.start_soon(tried, kinds)
    assert not late
    await anyio.wait_all_tasks_blocked()  # what was connected is accepted, too
    before = len(wrong.asked)
    await timed(use, wrong.of("frozen", "standby", "right"))
    assert wrong.asked[before:] == [], "the one that answered last is tried first"


@pytest.mark.parametrize("use", USES)
async def test_without_a_right_host_the_error_says_what_each_did(wrong: Wrong, use: Use) -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        await timed(use, wrong.of(*WRONG), 0.6)
    said = str(caught.value)
    at = {kind: "{} port {}".format(*wrong.at[kind].split(":")) for kind in WRONG}
    assert said.startswith("no connection to the database: ")
    assert f"{at['refused']}: Connection refused" in said
    assert f"{at['standby']}: this server only reads (a standby?): connect to the primary" in said
    silent_ones = {f"{at['silent']}, {at['frozen']}", f"{at['frozen']}, {at['silent']}"}
    assert any(f"{each}: did not answer in time" in said for each in silent_ones)
    assert at["closing"] in said
    assert "asyncpg" not in said


async def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    url = wrong.at["right"].rpartition(":")
    with silent(int(url[2]), "127.0.0.9"):
        name_resolves(monkeypatch, db=["127.0.0.9", "127.0.0.8", "127.0.0.1"], none=["127.0.0.9"])
        dsn = wrong.of("right").replace(f"@{url[0]}:", "@db.example:") + "?sslmode=disable"
        for use in USES:
            monkeypatch.setattr(addresses, "_last", {})
            assert 0.2 <= await timed(use, dsn) < SOON_S
            assert [address for _, address in addresses._last.values()] == ["127.0.0.1"]
        with pytest.raises(
            DatabaseUnavailable, match=r"none\.example \(127\.0\.0\.9\) port \d+: did not answer in time"
        ):
            await timed(plain, dsn.replace("db.example", "none.example"), 0.3)


async def test_a_statement_is_cancelled_at_the_address_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, wrong: Wrong, db: asyncpg.Connection[Any]
) -> None:
    port = int(wrong.at["right"].rpartition(":")[2])
    dsn = wrong.of("right").replace("@127.0.0.1:", "@db.example:") + "?sslmode=disable"
    running = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(30)' AND state = 'active'"
    with silent(port, "127.0.0.9"):
        name_resolves(monkeypatch, db=["127.0.0.9", "127.0.0.1"])
        pool = TransactionPool(ConnectionOptions(dsn, connect_timeout_s=LIMIT_S), 1)

        async def sleep() -> None:
            async with pool.begin() as inside:
                assert await enqueue(inside, "q"), "it is known in which loop the connection was opened"
                await inside.execute("SELECT pg_sleep(30)", timeout=0.2)

        with pytest.raises(TimeoutError):
            await sleep()
        await until(lambda: db.fetchval(f"SELECT ({running}) = 0"), limit_s=3)
        await pool.close()


@pytest.mark.slow("a lease that must not run out")
async def test_a_primary_that_falls_silent_costs_no_lease_and_no_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """All connections of a daemon move to the next address within the lease, whose own time is the shortest."""
    async with Proxy(dsn) as one, Proxy(dsn) as other:
        both = one.dsn.replace(f":{one.port}", f":{one.port},127.0.0.1:{other.port}")
        app = App()

        @app.handler("q")
        async def handle(payload: dict[str, Any], job: Job) -> None:
            async with job.transaction():
                pass

        limits = ConnectionOptions(both, connect_timeout_s=5, command_timeout_s=1)
        async with running(app, both, connection=limits, lease_s=6.0, heartbeat_s=0.5) as (daemon, seen):
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
            one.mode = "blackhole"
            assert other.connections == 0
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
            await until(lambda: daemon.worker.lease_left_s > 5)
            assert not seen.all(events.LEASE_FENCED)
            await until(lambda: daemon.listening and other.connections >= 5)
            one.cut()


async def test_an_address_that_a_name_has_no_more_is_not_used(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    """A failover that moves the name: the old primary may still accept writes."""
    dsn = wrong.of("right").replace("@127.0.0.1:", "@db.example:") + "?sslmode=disable"
    name_resolves(monkeypatch, db=["127.0.0.1"])
    await timed(plain, dsn)
    name_resolves(monkeypatch, db=["127.0.0.8"])
    with pytest.raises(DatabaseUnavailable, match=r"\(127\.0\.0\.8\) port \d+: Connection refused"):
        await timed(plain, dsn)


async def test_a_name_server_that_is_silent_holds_up_neither_the_next_host_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, wrong: Wrong
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: answer.wait(60))
    try:
        dsn = wrong.of("right").replace("@", "@lost.example,") + "?sslmode=disable"
        assert 0.2 <= await timed(plain, dsn) < SOON_S
        with pytest.raises(DatabaseUnavailable, match=r"lost\.example: its address was not found in time"):
            await timed(plain, dsn.replace(wrong.at["right"], wrong.at["refused"]), 0.3)
    finally:
        answer.set()


@pytest.mark.slow("commands and daemons in processes of their own")
def test_a_process_ends_while_a_name_server_is_silent() -> None:
    program = """if True:
        import asyncio, socket, time
        from pgworkd.database.connection import Connection, ConnectionOptions
        socket.getaddrinfo = lambda *_, **__: time.sleep(60)
        options = ConnectionOptions("postgresql://u@lost.example/d", connect_timeout_s=0.2)
        asyncio.run(Connection(options, "x").value("SELECT 1"))
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert "lost.example: its address was not found in time" in ended.stderr


@pytest.mark.slow("waits for addresses that are silent")
@pytest.mark.parametrize("others", [("refused",), ("silent",), ("frozen", "closing"), ()])
async def test_commands_that_only_read_take_a_standby_if_nothing_else_answers(
    wrong: Wrong, others: tuple[str, ...]
) -> None:
    async def read(options: ConnectionOptions) -> None:
        one = Connection(options, "test")
        seen.append(await one.value("SHOW transaction_read_only"))
        await one.close()

    seen: list[str] = []
    for kinds in ((*others, "standby"), ("standby", *others)):
        assert await timed(read, wrong.of(*kinds), any_server=True) < SOON_S
        assert await timed(read, wrong.of(*kinds, "right"), any_server=True) < SOON_S
        assert (
            await timed(read, wrong.of(*kinds, "right", query="target_session_attrs=standby"), any_server=True) < SOON_S
        )
    assert seen == ["on", "off", "on"] * 2


async def test_a_server_that_judges_us_ends_the_search(wrong: Wrong) -> None:
    """As with libpq: a password that is wrong is not sent to one after the other."""
    dsn = wrong.of("right", "standby").replace("@", "x@", 1)
    with pytest.raises(AccessRefused, match="password authentication failed"):
        await timed(plain, dsn)
    assert wrong.asked == []


async def test_the_limit_in_the_dsn_holds_for_each_address(wrong: Wrong) -> None:
    began_s = time.monotonic()
    with pytest.raises(PgworkdError, match="did not answer in time"):
        await timed(plain, wrong.of("silent", query="connect_timeout=1"), 20)
    assert time.monotonic() - began_s < SOON_S


async def test_random_order_uses_every_host(wrong: Wrong) -> None:
    dsn = wrong.of("standby", "right", query="load_balance_hosts=random")
    for _ in range(40):
        await timed(plain, dsn)
        if "standby" in wrong.asked:
            return
    raise AssertionError("the other host was never tried first")


@pytest.mark.slow("waits for many addresses")
async def test_many_silent_addresses_still_leave_time_for_the_last(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.setattr(race, "STAGGER_S", 1.0)
    async with Wrong(dsn).open() as wrong:
        assert await timed(plain, wrong.of(*["silent"] * 20, "right"), 6.0) < SOON_S
