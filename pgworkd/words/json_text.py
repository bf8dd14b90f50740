"""JSON that is passed on as it was written: its numbers keep their digits, since no float ever holds them."""

from __future__ import annotations

import re

from pgworkd.errors import InvalidPayload

_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')


class JsonText(str):
    """The text of a JSON value, in place of the value: as the payload or meta of a job, as a result."""

    __slots__ = ()

    def checked(self, what: str) -> str:
        """The text, if it is an object that can be stored; raises InvalidPayload, whose path starts with `what`."""
        from pgworkd.words.payload import BYTES_MAX, decode, encode  # which imports this module

        if len(self.encode(errors="surrogatepass")) > BYTES_MAX:
            raise InvalidPayload(what, f"takes more than the {BYTES_MAX:,} bytes that are allowed")
        try:
            value = decode(str(self))
        except InvalidPayload as error:
            raise InvalidPayload(what + error.path.removeprefix("payload"), error.reason) from None
        encode(value, what)
        return str(self)

    def check_bounds(self, what: str) -> None:
        """Raises InvalidPayload, whose path is `what`, for text that is too large or too deep to be stored."""
        from pgworkd.words.payload import BYTES_MAX, DEPTH_MAX

        if len(self) > BYTES_MAX // 4 and len(self.encode(errors="surrogatepass")) > BYTES_MAX:
            raise InvalidPayload(what, f"takes more than the {BYTES_MAX:,} bytes that are allowed")
        depth = deepest = 0
        for bracket in _BRACKET.findall(self) if self.count("[") + self.count("{") > DEPTH_MAX else ():
            depth += 1 if bracket in "[{" else -1 if bracket in "]}" else 0
            deepest = max(deepest, depth)
        if deepest > DEPTH_MAX:
            raise InvalidPayload(what, f"has {deepest:,} levels, {DEPTH_MAX} are allowed")
