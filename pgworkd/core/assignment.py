"""Assignments: one attempt in a remote worker's hands, as the opaque string by which it settles and extends it.

It names the job, the attempt and the worker, and for an attempt with a lease of its own the hand-over (`nonce`): the
fence of every settle. A MAC under the token of the worker's registration makes it unforgeable: whoever has another
worker's id, or another attempt's number, cannot make that worker's assignment from it.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import hmac
import struct
from functools import lru_cache
from typing import Any
from uuid import UUID

from pgworkd.core.fence import Fence
from pgworkd.errors import UsageError

_PREFIX = "a1_"
_FIELDS = struct.Struct(">16siI16s")
"""The fields of an assignment: job, attempt, worker, nonce (zeros: none)."""
_NO_NONCE = bytes(16)
_MAC_BYTES = 16
"""Size of the MAC, BLAKE2s with a key (RFC 7693): of all that hashlib has, what is quickest for few bytes."""
_PERSON = b"pgworkd1"
KEYS_MAX = 5_000
"""Workers' keys that are kept ready."""
_TO_URLS = bytes.maketrans(b"+/", b"-_")
_FROM_URLS = bytes.maketrans(b"-_+/", b"+/..")
_TEXT_CHARS = len(_PREFIX) + -(-(_FIELDS.size + _MAC_BYTES) * 4 // 3)
_PADDING = b"=" * (-(_TEXT_CHARS - len(_PREFIX)) % 4)


def sealed(fence: Fence) -> str:
    """The attempt as text, with a MAC under the token of its worker, which it must have."""
    if fence.token is None:
        raise UsageError(f"worker {fence.worker_id} has no token: its assignments could be forged")
    nonce = _NO_NONCE if fence.nonce is None else fence.nonce.bytes
    fields = _FIELDS.pack(fence.job_id.bytes, fence.attempt, fence.worker_id, nonce)
    mac = _keyed(fence.token).copy()
    mac.update(fields)
    text = binascii.b2a_base64(fields + mac.digest(), newline=False).translate(_TO_URLS).decode()
    return _PREFIX + text.rstrip("=")


def parsed(text: str) -> Fence:
    """The attempt that a text names, whoever made it, without a token. Raises UsageError if it is none."""
    job, attempt, worker_id, nonce = _FIELDS.unpack_from(_decoded(text))
    return Fence(UUID(bytes=job), attempt, worker_id, None, None if nonce == _NO_NONCE else UUID(bytes=nonce))


def is_sealed(text: str, fence: Fence) -> bool:
    """True if `text` is the one that was made of this attempt, with its token; takes as long if it is not.

    Each assignment has one text: another spelling of the same bytes is none.
    """
    return hmac.compare_digest(sealed(fence).encode(), text.encode())


@lru_cache(KEYS_MAX)
def _keyed(key: UUID) -> Any:
    """BLAKE2s with this key, to be copied: setting it up takes longer than what it is for."""
    return hashlib.blake2s(digest_size=_MAC_BYTES, key=key.bytes, person=_PERSON)


def _decoded(text: str) -> bytes:
    if len(text) == _TEXT_CHARS and text.startswith(_PREFIX) and text.isascii() and "=" not in text:
        with contextlib.suppress(binascii.Error):
            return binascii.a2b_base64(text[len(_PREFIX) :].encode().translate(_FROM_URLS) + _PADDING, strict_mode=True)
    raise UsageError("this is no assignment: pass the string of the claim unchanged")
