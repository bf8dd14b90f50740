"""Redaction: no password in any form, no terminal control characters, no line breaks."""

from __future__ import annotations

import json
import time
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.dsn import dsn_fault
from pgworkd.process import redaction
from pgworkd.process.redaction import escaped, hide, hide_secret, redact
from pgworkd.remote.client import GatewayAddress

ODD = "c4n4ry@a:b/c?d#e%f g'h\"i\\jß"
"""A password with every character that a DSN, JSON, repr() or a URL escapes."""


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", ())
    monkeypatch.delenv("PGPASSWORD", raising=False)


@pytest.mark.parametrize(
    "write",
    [str, repr, json.dumps, ascii, escaped, quote, quote_plus, lambda text: quote(text, safe=""), lambda t: f"<{t}>"],
    ids=["plain", "repr", "json", "ascii", "escaped", "URL", "form", "component", "inside"],
)
def test_a_password_is_redacted_in_every_encoding(write):
    assert "c4n4ry" in redact(write(ODD)), "not known yet"
    hide(f"postgresql://user:{quote(ODD, safe='')}@host/db")
    shown = redact(f"before {write(ODD)} after")
    assert "c4n4ry" not in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


def test_a_password_is_redacted_as_written_in_the_dsn():
    hide("postgresql://user:c4n4ry%40home@host/db?sslpassword=s3cr3t%2Bkey")
    assert redact("c4n4ry%40home c4n4ry@home s3cr3t%2Bkey s3cr3t+key") == "*** *** *** ***"


def test_the_drivers_fallback_password_is_redacted(monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "c4n4ry")
    hide("postgresql://user@host/db")
    assert redact("it is c4n4ry") == "it is ***"


def test_longer_secrets_are_redacted_before_shorter_ones():
    hide("postgresql://u:c4n4ry@h/db")
    hide("postgresql://u:c4n4ry-and-more@h/db")
    assert redact("c4n4ry-and-more c4n4ry") == "*** ***"


@pytest.mark.parametrize("password", ["postgres", "app", "", "x", "host-1"])
def test_short_or_obvious_passwords_do_not_redact_other_text(password):
    """Such a password is short, or equals another part of the DSN that is shown anyway."""
    hide(f"postgresql://postgres:{password}@host-1/app")
    text = "postgres at host-1 has no database app, x"
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see postgresql://u:a@b@h/db", "see postgresql://u:***@h/db"),
        ("postgres://u:a/b?c#d@h", "postgres://u:***@h"),
        ("redis://:pw@h and amqp://u:pw@h", "redis://:***@h and amqp://u:***@h"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("http://user@host:80/", "http://user@host:80/"),
        ("mail joe@example.com", "mail joe@example.com"),
        ("postgresql://u:***@h", "postgresql://u:***@h"),
    ],
)
def test_the_password_of_any_dsn_is_redacted(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize("text", ["://:" * 50_000, "postgresql://x:" * 20_000, "://" + "a" * 500_000, "x" * 5_000_000])
def test_redaction_is_fast_on_any_text(text):
    began_s = time.process_time()
    redact(text)
    assert time.process_time() - began_s < 1.0


def test_an_invalid_dsn_does_not_break_redaction():
    for text in ("", "x", "://", "postgresql://:@", "?password", "a:b@c", "\0\ud800"):
        hide(text)
    assert redact("as before") == "as before"


@given(st.text())
def test_escaped_text_is_one_line_without_control_or_bidi_characters(text):
    shown = escaped(text)
    assert len(shown.splitlines()) <= 1
    assert all(c.isprintable() or c.isspace() for c in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\x1b\x9b\x7f\0\r\n")
    shown.encode()


# Found by the tests of this file and by those in tests/fuzz


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p%2Fw@%2Frun%2Fpostgresql/db",
        "postgresql://ü:ß@münchen.example/db",
        "postgresql://u:c4n4ry\u2100@127.0.0.1/db",  # urlsplit, which others use, refuses it, and quotes it
        "postgresql://u:c4n4ry[@127.0.0.1/db",
    ],
)
def test_unix_sockets_and_non_ascii_characters_are_accepted(dsn):
    assert dsn_fault(dsn) is None


def test_a_secret_that_is_no_address_is_hidden_in_every_form() -> None:
    hide_secret('tok"en/with+ödd')
    for written in ('tok"en/with+ödd', "tok%22en%2Fwith%2B%C3%B6dd", 'tok\\"en/with+\\u00f6dd'):
        assert redact(f"before {written} after") == "before *** after"


def test_the_token_of_a_gateway_is_hidden() -> None:
    GatewayAddress("https://jobs.example.com", "pgw_7_c4n4ry-c4n4ry")
    assert redact("HTTP 400: Bearer pgw_7_c4n4ry-c4n4ry") == "HTTP 400: Bearer ***"
