"""JSON that is passed on as it was written: its numbers keep their digits, since no float ever holds them."""

from __future__ import annotations

import re

from pgworkd.errors import InvalidPayload

_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')

_ODD = re.compile(r"\\u[dD][89a-fA-F]|[0-9][eE][-+]?[0-9]{3}")
"""What a text may not have where it is plain: a surrogate, which may be alone; an exponent, which may be too large."""


class JsonText(str):
    """The text of a JSON value, in place of the value: as the payload or meta of a job, as a result."""

    __slots__ = ()

    def checked(self, what: str, *, object_only: bool = True) -> str:
        """The text, if it can be stored, and is an object; raises InvalidPayload, whose path starts with `what`."""
        from pgworkd.core.payload import BYTES_MAX, decode, encode  # which imports this module

        if len(self.encode(errors="surrogatepass")) > BYTES_MAX:
            raise InvalidPayload(what, f"takes more than the {BYTES_MAX:,} bytes that are allowed")
        encode(decode(str(self), what, object_only=object_only), what, object_only=object_only)
        return str(self)

    def check_bounds(self, what: str) -> None:
        """Raises InvalidPayload, whose path starts with `what`, for text that cannot be stored.

        As `checked`, for any value, and without reading a text of which that is plain.
        """
        from pgworkd.core.payload import BYTES_MAX, DEPTH_MAX, is_suspicious

        if len(self) > BYTES_MAX // 4 and len(self.encode(errors="surrogatepass")) > BYTES_MAX:
            raise InvalidPayload(what, f"takes more than the {BYTES_MAX:,} bytes that are allowed")
        depth = deepest = 0
        for bracket in _BRACKET.findall(self) if self.count("[") + self.count("{") > DEPTH_MAX else ():
            depth += 1 if bracket in "[{" else -1 if bracket in "]}" else 0
            deepest = max(deepest, depth)
        if deepest > DEPTH_MAX:
            raise InvalidPayload(what, f"has {deepest:,} levels, {DEPTH_MAX} are allowed")
        if _ODD.search(self) or is_suspicious(self):
            self.checked(what, object_only=False)
