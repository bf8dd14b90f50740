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

    def group(self, kind: str | None, text: str | None, place: str = "") -> Any:
        return self._value("SELECT pgworkd.error_group(%s, %s, %s)", kind, text, place)

    def place(self, traceback: str | None) -> str:
        return str(self._value("SELECT pgworkd.error_place(jsonb_build_object('traceback', %s::text))", traceback))

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


APART = {
    "code": st.integers(1, 999).map(str),
    "name": st.from_regex(r"[a-z]{1,6}(_[a-z]{1,6}){0,2}", fullmatch=True),
}
"""What tells errors apart, and is short."""
SAID = {
    "code": [
        "HTTP {}",
        "HTTP/1.1 {} of 30 s",
        "status code {}",
        "status={}",
        "Command '['x']' returned non-zero exit status {}.",
        "exit code: {}",
        "exited with -{}",
        "killed by signal {}",
        "[Errno {}] for '/a/b'",
        "SQLSTATE {}",
        "it answered {}",
    ],
    "name": [
        "KeyError: '{}'",
        "'NoneType' object has no attribute '{}'",
        "AttributeError: '{}' object has no attribute 'x'",
        'column "{}" of relation "jobs" does not exist',
        'null value in column "{}" of relation "users"',
        'duplicate key value violates unique constraint "{}"',
        "f() got an unexpected keyword argument '{}'",
        "f() missing 1 required positional argument: '{}'",
        "No module named '{}'",
        "cannot import name '{}' from 'x'",
        "NameError: name '{}' is not defined",
    ],
}


@examples(150)
@given(st.data())
def test_what_tells_errors_apart_stays(sql: Sql, data: st.DataObject) -> None:
    what = data.draw(st.sampled_from(sorted(SAID)))
    said = data.draw(st.sampled_from(SAID[what]))
    one, two = data.draw(APART[what]), data.draw(APART[what])
    patterns = {sql.pattern(said.format(each)) for each in (one, two)}
    assert len(patterns) == len({one, two})


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("401 Client Error: Unauthorized for url: https://x/1", "503 Server Error: Gone for url: https://x/1"),
        ("Client error '401 Unauthorized' for url 'https://x'", "Client error '404 Not Found' for url 'https://x'"),
        ("401, message='Unauthorized', url='https://x'", "403, message='Forbidden', url='https://x'"),
        ("ORA-00942: no such table", "no such table"),
        ('column "a" does not exist', 'column "b" does not exist'),
        ('violates unique constraint "users_email_key"', 'violates unique constraint "users_name_key"'),
    ],
)
def test_two_errors_have_two_patterns(sql: Sql, one: str, two: str) -> None:
    assert sql.pattern(one) != sql.pattern(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("order ORD-2026-AB12 is gone", "order ORD-2027-ZZ9 is gone"),
        ("token eyJhbGciOi.eyJzdWIi.SflKx-w_c expired", "token eyJ0eXAi.eyJpc3Mi.x expired"),
        ("commit deadbeef of facadefe", "commit cafebabe of bada55feed"),
        ("could not read uploads/ann/photo.png", "could not read uploads/bob/7.jpg"),
        ("could not read ./a/b.csv", "could not read ../x/y/z.csv"),
        ("timed out after 30s", "timed out after 5m"),
        ("timed out after 1.5 seconds, tried 3 times", "timed out after 2 min, tried 4 times"),
        ("took 1h30m", "took 90s"),
        ("status 4711: no such order", "status 4712: no such order"),
        ("KeyError: 'ann@example.com'", "KeyError: 'bob@example.com'"),
        ("KeyError: '4711'", "KeyError: '4712'"),
        ("it answered 1,234 rows", "it answered 2,345 rows"),
    ],
)
def test_what_differs_from_job_to_job_has_one_pattern(sql: Sql, one: str, two: str) -> None:
    assert sql.pattern(one) == sql.pattern(two)


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
        ("KeyError: 'user_id'", "KeyError: user_id"),
        ("HTTP 503 after 7 tries", "HTTP 503 after <n> tries"),
        ("Client error '404 Not Found' for url 'https://x'", "Client error 404 Not Found for url <text>"),
        ("a\x01b 7", "ab <n>"),
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


def test_two_places_have_two_groups(sql: Sql) -> None:
    one, two = sql.group("E", "row 7", "a.py, f"), sql.group("E", "row 8", "a.py, f")
    assert one == two != sql.group("E", "row 7", "a.py, g")
    assert sql.group("E", "row 7") != one


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
    "a/" * 500,
    "a-1-" * 250,
    "1s " * 333,
    "1.1," * 250,
    "column " * 140,
    "'a' object " * 90,
    "404 Aa " * 140,
    "status " * 140,
    "AB-" * 333,
    "eyJ." * 250,
    "\u202e\u0661\ufeff" * 300,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_takes_long(sql: Sql, text: str) -> None:
    sql.pattern("warm-up")
    began_s = time.monotonic()
    assert len(sql.pattern(text)) <= 500
    assert time.monotonic() - began_s < 1.0


HEAD = "Traceback (most recent call last):\n"


def frame(path: str, function: str, line: int = 7) -> str:
    return f'  File "{path}", line {line}, in {function}\n    some.code()\n'


@pytest.mark.parametrize(
    ("traceback", "place"),
    [
        (None, ""),
        ("", ""),
        ("at com.example.Job.run(Job.java:7)", ""),
        (HEAD + frame("/srv/releases/7/jobs.py", "send"), "jobs.py, send"),
        (HEAD + frame("/srv/jobs.py", "send") + frame("/srv/mail.py", "connect"), "mail.py, connect"),
        (HEAD + frame("/srv/jobs.py", "f") + frame("/v/lib/python3.11/site-packages/x/y.py", "g"), "jobs.py, f"),
        (HEAD + frame("/srv/jobs.py", "f") + frame("/usr/lib/python3.13/json/decoder.py", "g"), "jobs.py, f"),
        (HEAD + frame("/srv/jobs.py", "f") + frame("<frozen importlib._bootstrap>", "g"), "jobs.py, f"),
        (HEAD + frame("/v/site-packages/x/y.py", "f") + frame("/v/site-packages/x/z.py", "g"), "z.py, g"),
        (HEAD + frame("C:\\app\\jobs.py", "f") + frame("C:\\Python311\\lib\\site-packages\\y.py", "g"), "jobs.py, f"),
        ("\u2026" + HEAD[9:] + frame("/srv/jobs.py", "<lambda>"), "jobs.py, <lambda>"),
    ],
)
def test_the_place_of_an_error_is_the_innermost_function_of_the_application(
    sql: Sql, traceback: str | None, place: str
) -> None:
    assert sql.place(traceback) == place
    assert sql.place(None if traceback is None else traceback.replace("line 7", "line 8")) == place


@pytest.mark.parametrize("text", ["x" * 1_000_000, '  File "' * 100_000, frame("/a/b.py", "f") * 20_000])
def test_no_traceback_takes_long(sql: Sql, text: str) -> None:
    sql.place("warm-up")
    began_s = time.monotonic()
    assert len(sql.place(text)) <= 200
    assert time.monotonic() - began_s < 1.0
