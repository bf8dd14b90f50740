"""Assignments: one attempt in a remote worker's hands, as the opaque string by which it settles and extends it.

It names the job, the attempt and the worker, and for an attempt with a lease of its own the hand-over (`nonce`): the
fence of every settle. A MAC under the token of the worker's registration makes it unforgeable: whoever has another
worker's id, or another attempt's number, cannot make that worker's assignment from it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from typing import NamedTuple, Self
from uuid import UUID

from pgworkd.errors import UsageError

_PREFIX = "a1_"
_FIELDS = struct.Struct(">16siI16s")
"""Job, attempt, worker, nonce (zeros: none)."""
_NO_NONCE = bytes(16)
_MAC_BYTES = 16
_TEXT_CHARS = len(_PREFIX) + -(-(_FIELDS.size + _MAC_BYTES) * 4 // 3)


class Assignment(NamedTuple):
    """The fence of one attempt."""

    job_id: UUID
    attempt: int
    worker_id: int
    nonce: UUID | None = None
    """`jobs.assignment_id`; None: the attempt is leased with its worker."""

    def sealed(self, key: UUID) -> str:
        """As text, with a MAC; `key`: the token of the worker's registration."""
        nonce = _NO_NONCE if self.nonce is None else self.nonce.bytes
        fields = _FIELDS.pack(self.job_id.bytes, self.attempt, self.worker_id, nonce)
        return _PREFIX + base64.urlsafe_b64encode(fields + _mac(fields, key)).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """What a text says, whoever made it. Raises UsageError if it is none; see `is_sealed`."""
        return cls._of(_decoded(text))

    @classmethod
    def is_sealed(cls, text: str, key: UUID) -> bool:
        """True if the MAC is right. Takes as long for any wrong one."""
        data = _decoded(text)
        return hmac.compare_digest(data[_FIELDS.size :], _mac(data[: _FIELDS.size], key))

    @classmethod
    def _of(cls, data: bytes) -> Self:
        job, attempt, worker_id, nonce = _FIELDS.unpack_from(data)
        return cls(UUID(bytes=job), attempt, worker_id, None if nonce == _NO_NONCE else UUID(bytes=nonce))


def _decoded(text: str) -> bytes:
    wrong = UsageError("this is no assignment: pass the string of the claim unchanged")
    if len(text) != _TEXT_CHARS or not text.startswith(_PREFIX) or not text.isascii():
        raise wrong
    body = text[len(_PREFIX) :]
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise wrong from None
    if base64.urlsafe_b64encode(data).rstrip(b"=").decode() != body:
        raise wrong  # another spelling of the same bytes: each assignment has one text
    return data


def _mac(fields: bytes, key: UUID) -> bytes:
    return hmac.digest(key.bytes, _PREFIX.encode() + fields, hashlib.sha256)[:_MAC_BYTES]
