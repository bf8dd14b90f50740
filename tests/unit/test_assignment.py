"""Assignments: what one says, and that nobody else can make it."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core import assignment
from pgworkd.core.assignment import parsed, sealed
from pgworkd.core.fence import Fence
from pgworkd.errors import UsageError
from tests.kits.models import FUZZ

KEY = uuid.UUID("11111111-2222-4333-8444-555555555555")
ANY = st.builds(
    Fence,
    job_id=st.uuids(),
    attempt=st.integers(1, 2**31 - 1),
    worker_id=st.integers(1, 1_000_000_000),
    token=st.uuids(),
    nonce=st.none() | st.uuids(),
)
ONE = Fence(uuid.UUID(int=7), 3, 12, KEY)


def is_sealed(text: str, key: uuid.UUID) -> bool:
    return assignment.is_sealed(text, parsed(text)._replace(token=key))


@FUZZ
@given(ANY)
def test_an_assignment_says_what_it_was_made_of(fence: Fence) -> None:
    text = sealed(fence)
    assert parsed(text) == fence._replace(token=None)
    assert assignment.is_sealed(text, fence)
    assert text.isascii()
    assert len(text) < 100


@FUZZ
@given(ANY, st.uuids())
def test_another_key_does_not_fit(fence: Fence, other: uuid.UUID) -> None:
    assert is_sealed(sealed(fence), other) == (fence.token == other)


def test_no_assignment_is_made_without_a_key() -> None:
    with pytest.raises(UsageError, match="no token"):
        sealed(ONE._replace(token=None))


def test_no_change_of_a_character_is_accepted() -> None:
    text = sealed(ONE)
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
    older, newer = sealed(ONE), sealed(ONE._replace(attempt=4))
    assert older[:40] != newer[:40]
    mixed = newer[:55] + older[55:]
    assert not is_sealed(mixed, KEY)


@pytest.mark.parametrize(
    "text",
    ["", "a1_", "7", str(uuid.UUID(int=7)), sealed(ONE)[:-1], sealed(ONE) + "A", "b" + sealed(ONE)[1:],
     " " + sealed(ONE)[1:], sealed(ONE)[:-1] + "=", "a1_" + "é" * 75, "a1_" + "\x00" * 75],
)  # fmt: skip
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="this is no assignment"):
        parsed(text)


@FUZZ
@given(st.text(max_size=120))
def test_any_text_is_accepted_or_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parsed(text)
