"""JSON that is passed on as it was written: its numbers keep their digits, since no float ever holds them."""

from __future__ import annotations

from pgworkd.errors import InvalidPayload


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
