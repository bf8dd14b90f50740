"""The proxy behaves as documented, in front of a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits.daemon import until
from tests.kits.proxy import Message, Mode, Proxy

CLOSED = (ConnectionError, asyncpg.ConnectionDoesNotExistError, asyncpg.InterfaceError)
BACKENDS = """SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"""


def no_backends(db: asyncpg.Connection[Any]) -> Callable[[], Any]:
    return lambda: db.fetchval(f"SELECT ({BACKENDS}) = 0")


async def connected(proxy: Proxy) -> asyncpg.Connection[Any]:
    with anyio.fail_after(4):
        return await asyncpg.connect(proxy.dsn)


async def silent(connection: asyncpg.Connection[Any], sql: str = "SELECT 1") -> None:
    """Expects no reply within 0.1 s; the connection is unusable afterwards."""
    with pytest.raises(TimeoutError):
        await connection.execute(sql, timeout=0.1)
    assert not connection.is_closed(), "nobody has told it"
    connection.terminate()


@pytest.mark.parametrize("mode", ["blackhole", "halfopen"])
async def test_a_connection_that_lost_bytes_stays_dead_and_new_ones_work(
    dsn: str, db: asyncpg.Connection[Any], mode: Mode
) -> None:
    await db.execute("CREATE TABLE arrived (who text)")
    async with Proxy(dsn) as proxy:
        busy, idle = await connected(proxy), await connected(proxy)
        proxy.mode = mode
        await silent(busy, "INSERT INTO arrived VALUES ('busy')")
        with pytest.raises(TimeoutError):
            await asyncpg.connect(proxy.dsn, timeout=0.1)
        if mode == "halfopen":
            await until(lambda: db.fetchval("SELECT count(*) = 1 FROM arrived"))
        proxy.mode = "pass"
        if mode == "halfopen":
            assert await idle.fetchval("SELECT 1") == 1, "it has lost nothing"
        else:
            await silent(idle, "INSERT INTO arrived VALUES ('idle')")
            assert await db.fetchval(BACKENDS) == 2, "the server has not heard of any end"
        new = await connected(proxy)
        assert await new.fetchval("SELECT count(*) FROM arrived") == (mode == "halfopen")
        await new.close()
        assert proxy.cut() >= 1
        idle.terminate()
        await until(no_backends(db))


async def test_each_message_is_reported_once_in_order_of_arrival(dsn: str) -> None:
    seen: list[Message] = []
    async with Proxy(dsn) as proxy:
        proxy.on_message = lambda message: not seen.append(message)
        connection = await connected(proxy)
        kinds = [(m.side, m.kind) for m in seen]
        assert kinds[:4] == [("client", "ssl"), ("server", "ssl"), ("client", "startup"), ("server", "R")]
        assert kinds[-2:] == [("server", "K"), ("server", "Z")]
        assert [m.number for m in seen] == list(range(1, len(seen) + 1))
        del seen[:]
        assert await connection.fetch("SELECT $1::int", 7) == [(7,)]
        assert "".join(m.kind for m in seen if m.side == "client") == "PDHBES"
        assert "".join(m.kind for m in seen if m.side == "server") == "1tT2DCZ"
        del seen[:]
        await connection.execute("SELECT repeat('x', 1000000) FROM generate_series(1, 3)")
        assert [m.side + m.kind for m in seen] == ["clientQ", "serverT", *["serverD"] * 3, "serverC", "serverZ"]
        del seen[:]
        other = await connected(proxy)
        assert {m.connection for m in seen} == {2}
        await other.close()
        await connection.close()
        await until(lambda: [(m.kind, m.connection) for m in seen[-2:]] == [("X", 2), ("X", 1)])


@pytest.mark.parametrize("before", ["clientQ", "serverC"])
async def test_a_cut_falls_before_its_message_and_after_all_earlier_ones(
    dsn: str, db: asyncpg.Connection[Any], before: str
) -> None:
    await db.execute("CREATE TABLE arrived (who int)")
    passed: list[str] = []

    def judge(message: Message) -> bool:
        passed.append(message.side + message.kind)
        return passed[-1] != before

    async with Proxy(dsn) as proxy:
        proxy.on_message = lambda _: True
        connection = await connected(proxy)
        await connection.execute("SELECT 1")
        proxy.on_message = judge
        with pytest.raises(CLOSED):
            await connection.execute("INSERT INTO arrived VALUES (1)")
        await until(no_backends(db))
        assert await db.fetchval("SELECT count(*) FROM arrived") == (before == "serverC")
        assert passed == (["clientQ", "serverC"] if before == "serverC" else ["clientQ"])
        new = await connected(proxy)
        assert await new.fetchval("SELECT 1") == 1, "only that one is cut"
        await new.close()
