"""Unix sockets between a process and those that it starts, without files: there may be no directory for them.

Names in Linux's abstract namespace have no owner and no mode, so it is the user of the other side that is checked.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

from pgworkd.process import forks

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def new_name() -> str:
    """A name that no other socket has; @ stands for the NUL with which the address begins, as with systemd."""
    return f"@pgworkd-{secrets.token_hex(16)}"


def address(name: str) -> str:
    """The address of a name, or of a path."""
    return "\0" + name[1:] if name.startswith("@") else name


def bound(name: str, kind: socket.SocketKind) -> socket.socket:
    """A socket of this name. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, kind)
    try:
        made.bind(address(name))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    except OSError:
        made.close()
        raise
    forks.keep_private(made)
    return made


def is_trusted(connection: socket.socket) -> bool:
    """Whether the other end of a connection is of our own user, or root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _is_trusted(_CREDENTIALS.unpack(found)[1])


def received(bound_to: socket.socket, size: int) -> bytes:
    """A datagram; b"" for one of another user. Raises OSError."""
    data, more, _, _ = bound_to.recvmsg(size, socket.CMSG_SPACE(_CREDENTIALS.size))
    users = [
        _CREDENTIALS.unpack(each)[1]
        for level, kind, each in more
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
    ]
    return data if users and all(map(_is_trusted, users)) else b""


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())
