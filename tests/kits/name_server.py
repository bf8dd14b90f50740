"""A name server that changes its mind, and a lookup that asks it: DNS over UDP (RFC 1035), A records only."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

_HEAD = struct.Struct(">6H")
_ANSWER = struct.Struct(">2HIH4s")  # after the name: type, class, ttl, length, address
_A, _IN, _RESPONSE, _POINTER = 1, 1, 0x8180, b"\xc0\x0c"


class NameServer(asyncio.DatagramProtocol):
    """Answers the first query with the first of `answers`, and so on; the last one again and again."""

    def __init__(self, answers: Sequence[Sequence[str]]) -> None:
        self.queries = 0
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """It listens."""
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """One query."""
        self.queries += 1
        (number, *_), question, addresses = _HEAD.unpack_from(data), data[_HEAD.size :], next(self._answers)
        head = _HEAD.pack(number, _RESPONSE, 1, len(addresses), 0, 0)
        # A time to live of 0: whoever looks twice asks twice.
        answers = [_POINTER + _ANSWER.pack(_A, _IN, 0, 4, ipaddress.IPv4Address(each).packed) for each in addresses]
        self._transport.sendto(head + question + b"".join(answers), addr)


class _Query(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, _: Any) -> None:
        self.answer.set_result(data)


class Names:
    """The lookup of a system that uses this name server."""

    def __init__(self, server: NameServer, port: int) -> None:
        self.server, self._port = server, port

    async def look_up(self, host: str) -> Iterable[str]:
        """The addresses of a name, asked for now."""
        name = b"".join(bytes([len(part)]) + part.encode() for part in host.split(".")) + b"\0"
        loop = asyncio.get_running_loop()
        transport, query = await loop.create_datagram_endpoint(_Query, remote_addr=("127.0.0.1", self._port))
        with contextlib.closing(transport):
            transport.sendto(_HEAD.pack(7, 0x0100, 1, 0, 0, 0) + name + struct.pack(">2H", _A, _IN))
            async with asyncio.timeout(5):
                answer = await query.answer
        count, at = _HEAD.unpack_from(answer)[3], _HEAD.size + len(name) + 4
        step = len(_POINTER) + _ANSWER.size
        records = [_ANSWER.unpack_from(answer, at + number * step + len(_POINTER)) for number in range(count)]
        return [str(ipaddress.IPv4Address(record[-1])) for record in records]


@contextlib.asynccontextmanager
async def naming(*answers: Sequence[str]) -> AsyncIterator[Names]:
    """A name server with these answers, one after the other."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: NameServer(answers), local_addr=("127.0.0.1", 0))
    with contextlib.closing(transport):
        yield Names(server, transport.get_extra_info("sockname")[1])
