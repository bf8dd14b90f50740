"""JSON that is passed on as it was written: its numbers keep their digits, since no float ever holds them."""

from __future__ import annotations


class JsonText(str):
    """The text of a JSON value, in place of the value: as the payload or meta of a job, as a result."""

    __slots__ = ()
