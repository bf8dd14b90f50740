"""Reaching a server at one of the addresses that a DSN leads to: of each host in its list, each address of the name.

An address that is silent (its machine is off, a firewall drops packets, the server is frozen) must not keep us from the
others: they are tried beside it, see `words.race`. The one that answered last goes first, while its name still leads
there.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

import anyio

from pgworkd.core.look_up import look_up
from pgworkd.core.race import AllFailed, Failed, first
from pgworkd.database.driver_errors import Unreachable, is_judgement, said
from pgworkd.settings.conninfo import Conninfo, Host, is_address

Answer = TypeVar("Answer")

SOCKET_OPTIONS = {
    "keepalives_idle": "TCP_KEEPIDLE",
    "keepalives_interval": "TCP_KEEPINTVL",
    "keepalives_count": "TCP_KEEPCNT",
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
}
_last: dict[tuple[tuple[Host, ...], bool], tuple[Host, str]] = {}
"""Where each list of hosts was reached last, for a standby or not. Read and written in one step each, by any thread."""


class _AddressFailed(Failed):
    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(where, error)
        self.where, self.error = where, error


class Search(Generic[Answer]):
    """One search for an address at which `open_at` succeeds."""

    def __init__(
        self,
        told: Conninfo,
        open_at: Callable[[Host, str], Awaitable[Answer]],
        *,
        for_standby: bool,
        drop: Callable[[Answer], None],
    ) -> None:
        """`for_standby`: what is remembered for others does not count; `drop`: see `race.first`."""
        self._told, self._open_at, self._drop = told, open_at, drop
        self._purpose = told.hosts, for_standby
        self._until = 0.0

    async def run(self, limit_s: float) -> Answer:
        """What `open_at` returned, within `limit_s` seconds. Raises Unreachable.

        An error after which no other address need be asked is raised as it is, and so is one that is no OSError if that
        is all there is to say.
        """
        self._until = anyio.current_time() + limit_s
        try:
            return await self._race([partial(self._by_name, host) for host in self._hosts()])
        except AllFailed as failed:
            raise self._joined([each for each in failed.failed if isinstance(each, _AddressFailed)]) from None

    def _hosts(self) -> list[Host]:
        hosts = list(self._told.hosts)
        if self._told.is_balanced:
            random.shuffle(hosts)
        elif (last := _last.get(self._purpose)) is not None:
            hosts.sort(key=lambda host: host != last[0])
        return hosts

    async def _by_name(self, host: Host) -> Answer:
        addresses = [host.address or host.name]
        if not host.is_socket and not is_address(addresses[0]):
            addresses = await self._looked_up(host)
        return await self._race([partial(self._at, host, address) for address in addresses])

    async def _looked_up(self, host: Host) -> list[str]:
        try:
            with anyio.fail_after(self._left_s()):
                addresses = await look_up(host.name)
        except TimeoutError:
            raise _AddressFailed(host.name, OSError("its address was not found in time")) from None
        except (OSError, UnicodeError) as error:
            raise _AddressFailed(host.name, error) from error
        if self._told.is_balanced:
            random.shuffle(addresses)
        elif (last := _last.get(self._purpose)) is not None:
            addresses.sort(key=lambda address: (host, address) != last)
        return addresses

    async def _at(self, host: Host, address: str) -> Answer:
        limit_s = self._told.number("connect_timeout") or self._left_s()
        try:
            with anyio.fail_after(min(limit_s, self._left_s())):
                answer = await self._open_at(host, address)
        except Exception as error:
            if is_judgement(error):
                raise
            raise _AddressFailed(_where(host, address), error) from error
        _last[self._purpose] = (host, address)
        return answer

    async def _race(self, attempts: list[Callable[[], Awaitable[Answer]]]) -> Answer:
        return await first(attempts, self._left_s(), self._drop)

    def _left_s(self) -> float:
        return max(0.0, self._until - anyio.current_time())

    def _joined(self, failed: list[_AddressFailed]) -> Exception:
        if len(failed) == 1 and not isinstance(failed[0].error, OSError):
            return failed[0].error
        places: dict[str, list[str]] = {}
        for each in failed:
            places.setdefault(said(each.error), []).append(each.where)
        return Unreachable("; ".join(f"{', '.join(where)}: {reason}" for reason, where in places.items()))


def _where(host: Host, address: str) -> str:
    if host.is_socket:
        return f"{host.name}/.s.PGSQL.{host.port}"
    return f"{host.name} port {host.port}" if address == host.name else f"{host.name} ({address}) port {host.port}"


class Toward:
    """The running loop for the driver, which connects to hosts by name: its connections go to this address of the host.

    TLS still verifies the host's name. A request to cancel a statement goes to the same server.
    """

    def __init__(self, told: Conninfo, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._told, self._address = told, address
        self.call_later, self.create_future = self._loop.call_later, self._loop.create_future  # used by every statement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def __eq__(self, other: object) -> bool:
        """True for the running loop, too: asyncio looks for its tasks by the loop in which a connection was opened."""
        return other is self._loop or (isinstance(other, Toward) and other._loop is self._loop)

    def __hash__(self) -> int:
        return hash(self._loop)

    async def create_connection(self, factory: Any, host: str, port: int, *, ssl: Any = None) -> tuple[Any, Any]:
        """Connects as the loop does, to this address of the host."""
        name = host if ssl else None
        made = await self._loop.create_connection(factory, self._address, port, ssl=ssl, server_hostname=name)
        _keep_alive(made[0].get_extra_info("socket"), self._told)
        return made


def _keep_alive(connection: Any, told: Conninfo) -> None:
    if told.number("keepalives") != 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, option in SOCKET_OPTIONS.items():
        number = told.number(name)
        if number and hasattr(socket, option) and (name == "tcp_user_timeout" or told.number("keepalives") != 0):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), number)
