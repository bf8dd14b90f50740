"""Assignments: what one says, and that nobody else can make it."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.errors import UsageError
from pgworkd.words.assignment import Assignment
from tests.kits.models import FUZZ

KEY = uuid.UUID("11111111-2222-4333-8444-555555555555")
ANY = st.builds(
    Assignment,
    job_id=st.uuids(),
    attempt=st.integers(1, 2**31 - 1),
    worker_id=st.integers(1, 1_000_000_000),
    nonce=st.none() | st.uuids(),
)
ONE = Assignment(uuid.UUID(int=7), 3, 12, None)


def is_sealed(text: str, key: uuid.UUID) -> bool:
    return Assignment.parse(text).is_sealed(text, key)


@FUZZ
@given(ANY, st.uuids())
def test_an_assignment_says_what_it_was_made_of(assignment: Assignment, key: uuid.UUID) -> None:
    text = assignment.sealed(key)
    assert Assignment.parse(text) == assignment
    assert is_sealed(text, key)
    assert text.isascii()
    assert len(text) < 100


@FUZZ
@given(ANY, st.uuids(), st.uuids())
def test_another_key_does_not_fit(assignment: Assignment, key: uuid.UUID, other: uuid.UUID) -> None:
    assert is_sealed(assignment.sealed(key), other) == (key == other)


def test_no_change_of_a_character_is_accepted() -> None:
    text = ONE.sealed(KEY)
    accepted = []
    for place in range(len(text)):
        for character in "Aa_-9é ":
            changed = text[:place] + character + text[place + 1 :]
            if changed == text:
                continue
            try:
                if is_sealed(changed, KEY):
                    accepted.append(changed)
            except UsageError:
                pass
    assert accepted == []


def test_fields_of_another_assignment_do_not_fit_its_mac() -> None:
    """The attempt's number is raised by who has an older assignment of the job."""
    older, newer = ONE.sealed(KEY), ONE._replace(attempt=4).sealed(KEY)
    assert older[:40] != newer[:40]
    mixed = newer[:55] + older[55:]
    assert not is_sealed(mixed, KEY)


@pytest.mark.parametrize(
    "text",
    ["", "a1_", "7", str(uuid.UUID(int=7)), ONE.sealed(KEY)[:-1], ONE.sealed(KEY) + "A", "b" + ONE.sealed(KEY)[1:],
     " " + ONE.sealed(KEY)[1:], ONE.sealed(KEY)[:-1] + "=", "a1_" + "é" * 75, "a1_" + "\x00" * 75],
)  # fmt: skip
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="this is no assignment"):
        Assignment.parse(text)


@FUZZ
@given(st.text(max_size=120))
def test_any_text_is_accepted_or_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Assignment.parse(text)
