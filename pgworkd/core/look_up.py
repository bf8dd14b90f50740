"""The addresses of a name, asked for beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any


async def look_up(name: str) -> list[str]:
    """The addresses of a name, in the system's order. Raises OSError.

    In a thread of its own, which is left behind when we are cancelled: neither other look-ups nor the end of the
    process wait for a name server that is silent.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[list[str]] = loop.create_future()

    def tell(found: list[Any] | Exception) -> None:
        if answered.done():
            return
        if isinstance(found, Exception):
            answered.set_exception(found)
        else:
            answered.set_result(list(dict.fromkeys(_address(each[4]) for each in found)))

    def ask() -> None:
        found: list[Any] | Exception
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=ask, name=f"pgworkd look-up {name}", daemon=True).start()
    return await answered


def _address(found: tuple[Any, ...]) -> str:
    """An address with the scope of a link-local one, which getaddrinfo() gives apart."""
    address = str(found[0])
    scope = found[3] if len(found) > 3 else 0
    return f"{address}%{scope}" if scope and "%" not in address else address
