"""error_pattern() and error_group(): what differs from job to job does not matter; any text is accepted, quickly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.models import examples

pytestmark = pytest.mark.slow("generated errors, and what they have in common")

WORDS = [
    "connection",
    "refused",
    "no",
    "such",
    "user",
    "timed out after",
    "could not read",
    "key",
    "at",
    "can't",
    "日本",
]
PARTS = {
    "uuid": st.uuids().map(str),
    "number": st.one_of(st.integers(0, 10**12).map(str), st.floats(0, 1e6).map(lambda n: f"{n:.3f}")),
    "hex": st.integers(16**7, 16**16).map(lambda n: f"0x{n:x}"),
    "address": st.tuples(st.ip_addresses(v=4).map(str), st.sampled_from(["", ":5432", ":80"])).map("".join),
    "quoted": st.text(st.characters(exclude_characters="'\"`\n\x00", codec="utf-8"), max_size=40).map(
        lambda t: f'"{t}"'
    ),
    "single": st.text(st.characters(exclude_characters="'\"`\n\x00", codec="utf-8"), max_size=40).map(
        lambda t: f"'{t}'"
    ),
    "path": st.lists(st.from_regex(r"[a-z0-9_.-]{1,12}", fullmatch=True), min_size=2, max_size=5).map(
        lambda names: "/" + "/".join(names)
    ),
    "email": st.from_regex(r"[a-z]{1,9}@[a-z]{1,9}\.(com|org)", fullmatch=True),
    "url": st.from_regex(r"https://[a-z]{1,9}\.com/[a-z0-9]{0,9}", fullmatch=True),
}
SHAPE = st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from(sorted(PARTS)).map(lambda n: (n,))), max_size=8)


def filled(shape: list[Any]) -> st.SearchStrategy[str]:
    """An error of that shape."""
    return st.tuples(*(st.just(part) if isinstance(part, str) else PARTS[part[0]] for part in shape)).map(" ".join)


class Sql:
    """The two functions, on one connection."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)

    def pattern(self, text: str | None) -> str:
        return str(self._value("SELECT pgworkd.error_pattern(%s)", text))

    def group(self, kind: str | None, text: str | None) -> Any:
        return self._value("SELECT pgworkd.error_group(%s, %s)", kind, text)

    def _value(self, sql: str, *args: Any) -> Any:
        row = self.connection.execute(sql, args).fetchone()
        assert row is not None
        return row[0]


@pytest.fixture
def sql(dsn: str) -> Iterator[Sql]:
    found = Sql(dsn)
    yield found
    found.connection.close()


@examples(100)
@given(st.data())
def test_what_differs_from_job_to_job_does_not_matter(sql: Sql, data: st.DataObject) -> None:
    """Two errors of one shape, filled in differently, are in one group; of another type they are not."""
    shape = data.draw(SHAPE)
    one, two = data.draw(filled(shape)), data.draw(filled(shape))
    assert sql.pattern(one) == sql.pattern(two)
    assert sql.group("E", one) == sql.group("E", two) != sql.group("F", one)


@examples(100)
@given(st.one_of(SHAPE.flatmap(filled), st.text(st.sampled_from("0193af-:.@/'\"`x \\"), max_size=80)))
def test_which_digits_there_are_does_not_matter(sql: Sql, text: str) -> None:
    """dead_groups() relies on it."""
    assert sql.pattern(text.translate(str.maketrans("123456789", "0" * 9))) == sql.pattern(text)


@examples(100)
@given(st.text(max_size=300))
def test_any_text_is_accepted_and_only_its_first_line_counts(sql: Sql, text: str) -> None:
    text = text.replace("\x00", "").encode("utf-8", "replace").decode()  # what Postgres can store
    found = sql.pattern(text)
    assert len(found) <= 500
    assert "\n" not in found
    line = text.lstrip(" \t\r\n")
    if line:
        assert sql.pattern(f"\r\n  {line.split(chr(10))[0]}\r\nat line 7 of {text}") == found


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (None, ""),
        ("", ""),
        ("it broke", "it broke"),
        ("can't open 'a b' and \"c\" in `d`", "can't open <text> and <text> in <text>"),
        ("Key (id)=(17, 3.5) exists", "Key (id)=(<n>, <n>) exists"),
        ("11111111-2222-3333-4444-555555555555 is gone", "<uuid> is gone"),
        ("commit 0xDEADBEEF of 3f786850e387550f", "commit <hex> of <hex>"),
        ("no route to 10.0.0.7:5432 or fe80::1ff:fe23", "no route to <address> or <address>"),
        ("in /srv/app/jobs.py, and C:\\app\\jobs.py", "in <path>, and <path>"),
        ("ann@example.com refused https://x.org/a?b=1", "<email> refused <url>"),
        ("and/or is no path", "and/or is no path"),
        ("lost: worker web-7f9c (blue) (id 7, pid 812) has ended", "lost: worker <name> (id <n>, pid <n>) has ended"),
    ],
)
def test_patterns(sql: Sql, text: str | None, pattern: str) -> None:
    assert sql.pattern(text) == pattern


def test_a_quoted_text_may_be_longer_than_what_is_read(sql: Sql) -> None:
    one, two = (f'invalid document "{word * 300}": bad' for word in ("spam ", "eggs and ham "))
    assert sql.pattern(one) == sql.pattern(two) == "invalid document <text>"


HOSTILE = [
    "x" * 1_000_000,
    " " * 1_000_000,
    "\n" * 1_000_000 + "x",
    '"' * 999,
    "'" * 999,
    "a.b@" * 250,
    "/a" * 500,
    "a:" * 500,
    "1.2." * 250,
    "0123456789abcdef" * 60,
    "a" * 999 + "@",
    "\U0001f600" * 500_000,
    "://" * 300,
    "\u202e\u0661\ufeff" * 300,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_takes_long(sql: Sql, text: str) -> None:
    sql.pattern("warm-up")
    began_s = time.monotonic()
    assert len(sql.pattern(text)) <= 500
    assert time.monotonic() - began_s < 1.0
