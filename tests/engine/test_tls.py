"""Connections to a server with TLS: a real Postgres behind a proxy that terminates TLS.

The embedded server has no TLS. The proxy answers Postgres' SSLRequest and forwards everything else, so that a client
that is accepted has a working connection. The host name is resolved here, to this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import trustme

from pgworkd.client import enqueue
from pgworkd.database.connection import Connection, ConnectionOptions, Listener
from pgworkd.database.transactions import TransactionPool
from pgworkd.errors import DatabaseUnavailable
from pgworkd.results import Results
from tests.engine.test_results import doubles
from tests.kits.cli import CANARY, run_bare
from tests.kits.daemon import running
from tests.unit.test_tls import home

__all__ = ["home"]  # an autouse fixture

NAME = "db.example"


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    """The CA of the server's certificate."""
    return trustme.CA()


@pytest.fixture
def trusted(ca: trustme.CA, tmp_path: Path) -> str:
    """The file with the certificate of the CA."""
    path = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture(autouse=True)
def look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolves any name below .example to this machine."""
    real = socket.getaddrinfo

    def here(host: Any, *args: Any, **options: Any) -> Any:
        return real("127.0.0.1" if str(host).endswith(".example") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", here)


class Front:
    """Accepts TLS connections on a port of its own and forwards them to the Postgres at `dsn`."""

    def __init__(self, dsn: str, context: ssl.SSLContext, *, direct: bool) -> None:
        self._url, self._context, self._direct = urlsplit(dsn), context, direct
        self.let_in = 0
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Front]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context if self._direct else None)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()

    def dsn(self, query: str = "", host: str = NAME) -> str:
        login = self._url.netloc.rpartition("@")[0]
        return f"postgresql://{login}@{host}:{self.port}{self._url.path}?{query}".rstrip("?")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # a client that does not trust us disconnects
            if not self._direct:
                if int.from_bytes((await reader.readexactly(8))[4:]) != 80877103:  # SSLRequest
                    writer.close()
                    return
                writer.write(b"S")
                reader, writer = await self._with_tls(writer.transport)
            first = await reader.read(65536)  # in TLS 1.3 a client may still disconnect after the handshake
            self.let_in += bool(first)
            answers, back = await asyncio.open_connection(self._url.hostname, self._url.port)
            self._writers.append(back)
            back.write(first)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, back))
                both.create_task(_pump(answers, writer))

    async def _with_tls(self, transport: asyncio.WriteTransport) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # StreamWriter.start_tls, if it fails, leaves a writer that fails again when it is garbage-collected.
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        above = await loop.start_tls(transport, protocol, self._context, server_side=True)
        assert above is not None
        protocol.connection_made(above)
        return reader, asyncio.StreamWriter(above, protocol, reader, loop)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


Opens = Callable[..., contextlib.AbstractAsyncContextManager[Front]]


@pytest.fixture
def fronts(ca: trustme.CA, dsn: str) -> Opens:
    """Opens a front with a certificate for a name."""

    def opens(
        name: str = NAME, client: trustme.CA | None = None, *, direct: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Front]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        ca.issue_cert(name).configure_cert(context)
        if client is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            client.configure_trust(context)
        return Front(dsn, context, direct=direct).open()

    return opens


async def ask(dsn: str) -> Any:
    connection = Connection(ConnectionOptions(dsn, connect_timeout_s=5, command_timeout_s=5), "test")
    try:
        return await connection.value("SELECT 1")
    finally:
        await connection.close()


async def refusal(dsn: str) -> str:
    with pytest.raises(DatabaseUnavailable) as caught:
        await ask(dsn)
    assert (urlsplit(dsn).password or CANARY) not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("way", ["system", "sslrootcert=system", "sslrootcert", "environment", "home"])
async def test_the_right_name_signed_by_a_trusted_ca_is_accepted(
    monkeypatch: pytest.MonkeyPatch, fronts: Opens, trusted: str, home: Path, way: str
) -> None:
    query = {"sslrootcert": f"sslrootcert={trusted}", "sslrootcert=system": way}.get(way, "")
    if way in ("system", "sslrootcert=system"):
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
    elif way == "environment":
        monkeypatch.setenv("PGSSLROOTCERT", trusted)
    elif way == "home":
        shutil.move(trusted, home / ".postgresql" / "root.crt")
    async with fronts() as front:
        assert await ask(front.dsn(query)) == 1
        assert front.let_in == 1


async def test_an_unknown_ca_is_refused_with_a_remedy(fronts: Opens) -> None:
    async with fronts() as front:
        told = await refusal(front.dsn())
        assert "certificate" in told
        assert "sslrootcert=FILE" in told
        assert "sslmode=require" in told
        assert front.let_in == 0, "not even the user's name was sent"


async def test_a_wrong_host_name_is_refused(fronts: Opens, trusted: str) -> None:
    async with fronts("other.example") as front:
        told = await refusal(front.dsn(f"sslrootcert={trusted}"))
        assert NAME in told
        assert "connect by a name in the certificate" in told
        assert front.let_in == 0
        assert await ask(front.dsn(f"sslrootcert={trusted}", "other.example")) == 1


async def test_tls_from_the_first_byte_on_verifies_the_same_name(fronts: Opens, trusted: str) -> None:
    query = f"sslnegotiation=direct&sslmode=verify-full&sslrootcert={trusted}"
    async with fronts(direct=True) as front:
        assert await ask(front.dsn(query)) == 1
        assert front.let_in == 1
    async with fronts("other.example", direct=True) as front:
        assert "certificate" in await refusal(front.dsn(query))
        assert front.let_in == 0


@pytest.mark.parametrize("mode", ["prefer", "require"])
async def test_an_explicit_weaker_sslmode_is_respected(fronts: Opens, mode: str) -> None:
    async with fronts("other.example") as front:
        assert await ask(front.dsn(f"sslmode={mode}")) == 1
        assert front.let_in == 1


async def test_verify_ca_accepts_any_name_signed_by_a_system_ca(
    monkeypatch: pytest.MonkeyPatch, fronts: Opens, trusted: str
) -> None:
    async with fronts("other.example") as front:
        await refusal(front.dsn("sslmode=verify-ca"))
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        assert await ask(front.dsn("sslmode=verify-ca")) == 1


async def test_a_server_without_tls_is_refused_unless_allowed(dsn: str) -> None:
    there = dsn.replace("127.0.0.1", NAME)
    told = await refusal(there)
    assert "offers no TLS" in told
    assert "sslmode=disable" in told
    assert await ask(there + "?sslmode=disable") == 1
    assert await ask(there + "?sslmode=prefer") == 1


async def test_one_remote_host_of_several_requires_tls(fronts: Opens, dsn: str) -> None:
    """The server on this host offers no TLS and would answer first."""
    async with fronts() as front:
        url = urlsplit(dsn)
        both = front.dsn(host=f"{url.hostname}:{url.port},{NAME}")
        assert "certificate" in await refusal(both)
        assert await ask(both + "?sslmode=prefer") == 1
        assert front.let_in == 0


async def test_a_client_certificate_works_with_the_system_cas(
    monkeypatch: pytest.MonkeyPatch, fronts: Opens, trusted: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    clients = trustme.CA()
    ours = clients.issue_cert("us@db.example")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    ours.private_key_pem.write_to_path(str(key))
    ours.cert_chain_pems[0].write_to_path(str(chain))
    async with fronts(client=clients) as front:
        assert await ask(front.dsn(f"sslcert={chain}&sslkey={key}")) == 1
        with pytest.raises(DatabaseUnavailable):
            await ask(front.dsn())
        assert front.let_in == 1


async def test_all_connections_follow_the_same_tls_rule(fronts: Opens, trusted: str) -> None:
    async def transaction(options: ConnectionOptions) -> None:
        transactions = TransactionPool(options, 1)
        try:
            async with transactions.begin() as connection:
                assert await connection.fetchval("SELECT 1") == 1
        finally:
            await transactions.close()

    async def listen(options: ConnectionOptions) -> None:
        async with Listener(options).listen("c", lambda _: None, lambda: None) as probe:
            await probe()

    async with fronts() as front:
        for use in (transaction, listen):
            await use(ConnectionOptions(front.dsn(f"sslrootcert={trusted}")))
            with pytest.raises(DatabaseUnavailable, match="certificate"):
                await use(ConnectionOptions(front.dsn()))
        assert front.let_in == 2


async def test_daemon_and_results_listener_work_over_tls(
    monkeypatch: pytest.MonkeyPatch, fronts: Opens, trusted: str, db: asyncpg.Connection[Any]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    async with fronts() as front, running(doubles(), front.dsn()), Results(front.dsn()) as results:
        assert await results.result(await enqueue(db, "double", {"n": 21}), timeout_s=5) == 42


def test_doctor_warns_of_a_weak_mode_to_another_host(dsn: str) -> None:
    there = dsn.replace("127.0.0.1", NAME)
    said = run_bare("doctor", "--dsn", f"{there}?sslmode=disable").stdout
    assert (
        f"warn  tls            sslmode=disable to {NAME} does not verify the server's identity: set sslmode=verify-full"
        in said
    )
    assert "ok    connection" in said
    assert "tls" not in run_bare("doctor", "--dsn", f"{dsn}?sslmode=disable").stdout
    assert "bad   connection" in run_bare("doctor", "--dsn", there).stdout


@pytest.mark.parametrize("by_environment", [True, False])
async def test_a_service_gives_the_host_and_the_mode(
    dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    """Also one that PGSERVICE names, which the driver alone would not read."""
    url = urlsplit(dsn)
    (home / ".pg_service.conf").write_text(f"[s]\nhost={url.hostname}\nport={url.port}\nsslmode=disable\n")
    monkeypatch.setenv("PGPASSWORD", url.password or "")
    given = f"postgresql:///{url.path[1:]}?user={url.username}"
    if by_environment:
        monkeypatch.setenv("PGSERVICE", "s")
        monkeypatch.setenv("PGHOST", "nowhere.invalid")
    else:
        given += "&service=s"
    connection, transactions = (
        Connection(ConnectionOptions(given), "test"),
        TransactionPool(ConnectionOptions(given), 1),
    )
    assert await connection.value("SELECT current_database()") == url.path[1:]
    async with transactions.begin() as inside:
        assert await inside.fetchval("SELECT current_database()") == url.path[1:]
    await connection.close()
    await transactions.close()
