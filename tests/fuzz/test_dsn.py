"""Any DSN: rejected without being quoted, or tried; the password is never shown, and the host always is."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.dsn import dsn_fault
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process import redaction
from pgworkd.process.redaction import redacted
from tests.kits.models import FUZZ, in_time, nowhere

__all__ = ["nowhere"]  # a fixture

CANARY = "c4n4ry"
PIECE = st.one_of(st.text(max_size=12), st.text(alphabet="@:/?#%[]&=,+ ;\\'\"\u2100\uff0f\uff1a", max_size=8))
PARTS = ["postgresql://", "@", ":", "/", "?", "#", "[", "]", "%", CANARY, "h", "=", "&", ",", "%00", "\u2100"]
NAMES = ["sslmode", "sslpassword", "password", "user", "dbname", "application_name", "target_session_attrs"]
QUERY = st.lists(st.tuples(st.one_of(st.sampled_from(NAMES), PIECE), PIECE).map("=".join), max_size=3).map("&".join)


@pytest.fixture(autouse=True, scope="module")
def nothing_kept() -> Iterator[None]:
    """Clears the known secrets: those of a hundred thousand DSNs would slow down each later example."""
    yield
    redaction._secrets = ()


@FUZZ
@given(st.one_of(st.text(), st.lists(st.sampled_from(PARTS)).map("".join)))
def test_any_text_as_a_dsn_is_rejected_without_being_quoted_or_used(text: str) -> None:
    with in_time():
        fault = dsn_fault(text)
        shown = redacted(text)
        redaction._secrets = ()
        try:
            options = ConnectionOptions(text)
        except UsageError as error:
            assert fault is not None
            assert CANARY not in str(error)
            return
    assert fault is None
    assert CANARY not in repr(options)
    assert redacted(shown) == shown


@FUZZ
@given(PIECE, PIECE, PIECE, PIECE, QUERY, st.booleans())
def test_connecting_with_a_dsn_never_shows_its_password(
    user: str, before: str, after: str, database: str, query: str, encoded: bool
) -> None:
    password = before + CANARY + after
    login = f"{quote(user, safe='')}:{quote(password, safe='')}" if encoded else f"{user}:{password}"
    password = password if encoded else login.partition(":")[2]  # a user with a colon ends there
    dsn = f"postgresql://{login}@127.0.0.1:1/{database}" + (f"?{query}" if query else "")
    redaction._secrets = ()
    try:
        options = ConnectionOptions(dsn, connect_timeout_s=1, command_timeout_s=1)
    except UsageError as error:
        assert CANARY not in str(error)
        return
    shown = redacted(dsn)
    assert CANARY not in shown
    assert "@127.0.0.1:1" in shown
    with in_time(), pytest.raises(PgworkdError) as caught:
        asyncio.run(Connection(options, "fuzz").value("SELECT 1"))
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    for text in (dsn, repr(dsn), password, repr(password), ascii(password), f"<{dsn}>"):
        assert CANARY not in redaction.redact(f"before {text} after")


@FUZZ
@given(st.text(), st.text())
def test_redacting_any_text_is_fast_and_idempotent(text: str, more: str) -> None:
    with in_time():
        once = redaction.redact(f"{text}://{more}:{text}@{more}")
    assert redaction.redact(once) == once
