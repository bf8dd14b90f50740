"""Tokens of the gateway's callers: what a row may hold, and when it is forgotten."""

from __future__ import annotations

import asyncpg
import pytest

from tests.kits.verbs import Db, at, clock

pytestmark = pytest.mark.usefixtures("t0")

ADD = """INSERT INTO pgworkd.tokens (id, name, sha256, scopes, expires_at, revoked_at)
    VALUES ($1, $2, sha256($1::text::bytea), $3, $4, $5)"""


@pytest.mark.parametrize(
    ("column", "value", "check"),
    [
        ("id", "'short'", "token_id_must_have_8_to_32_letters_and_digits"),
        ("id", "repeat('a', 33)", "token_id_must_have_8_to_32_letters_and_digits"),
        ("id", "'ABCDEFGH'", "token_id_must_have_8_to_32_letters_and_digits"),
        ("id", "E'abcdefgh\\n'", "token_id_must_have_8_to_32_letters_and_digits"),
        ("name", "''", "token_name_must_have_1_to_200_characters"),
        ("name", "repeat('a', 201)", "token_name_must_have_1_to_200_characters"),
        ("sha256", "'secret'", "token_sha256_must_have_32_bytes"),
        ("scopes", "'[]'", "token_scopes_must_be_a_json_object"),
    ],
)
async def test_a_bad_value_is_refused_by_name(db: Db, column: str, value: str, check: str) -> None:
    await db.execute(ADD, "abcdefgh", "a", "{}", None, None)
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await db.execute(f"UPDATE pgworkd.tokens SET {column} = {value}")  # noqa: S608 - names are ours
    assert caught.value.constraint_name == check


async def test_two_tokens_cannot_have_one_id(db: Db) -> None:
    await db.execute(ADD, "abcdefgh", "a", "{}", None, None)
    with pytest.raises(asyncpg.UniqueViolationError):
        await db.execute(ADD, "abcdefgh", "b", "{}", None, None)


async def test_a_token_is_forgotten_some_days_after_it_has_ended(db: Db) -> None:
    days = 86_400
    rows = {
        "endless0": (None, None),
        "expired0": (at(1 * days), None),
        "revoked0": (None, at(1 * days)),
        "revoked1": (at(300 * days), at(1 * days)),
        "laterend": (at(6 * days), at(7 * days)),
        "recently": (at(20 * days), None),
    }
    for name, times in rows.items():
        await db.execute(ADD, name, name, "{}", *times)
    for day, gone in ((8, set()), (9, {"expired0", "revoked0", "revoked1"}), (14, {"laterend"}), (400, {"recently"})):
        before = {row[0] for row in await db.fetch("SELECT id FROM pgworkd.tokens")}
        await clock(day * days, db)
        await db.execute("SELECT pgworkd.prune(7, 30)")
        assert before - {row[0] for row in await db.fetch("SELECT id FROM pgworkd.tokens")} == gone, f"day {day}"
