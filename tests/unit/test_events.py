"""Events reach all listeners in order, and a broken listener affects no other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from pgworkd.core import events
from pgworkd.core.events import Events

Said = list[tuple[str, dict[str, Any]]]


def ear(said: Said) -> events.Listener:
    def listen(name: str, facts: Mapping[str, Any]) -> None:
        said.append((name, dict(facts)))

    return listen


def test_every_listener_receives_every_event_in_order() -> None:
    speaker, one, other = Events(), Said(), Said()
    speaker.emit("before.anyone", lost=True)
    speaker.listen(ear(one))
    speaker.emit("first", n=1)
    speaker.listen(ear(other))
    speaker.emit("second", n=2, name="a fact may be called name")
    assert one == [("first", {"n": 1}), ("second", {"n": 2, "name": "a fact may be called name"})]
    assert other == one[1:]


def test_emitting_without_listeners_works(caplog: pytest.LogCaptureFixture) -> None:
    Events().emit("into.the.void")
    assert caplog.records == []


@pytest.mark.parametrize("error", [ValueError("broken"), OSError(28, "No space left on device"), RecursionError()])
def test_a_raising_listener_does_not_affect_others(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    speaker, before, after = Events(), Said(), Said()

    def broken(name: str, facts: Mapping[str, Any]) -> None:
        raise error

    for listener in (ear(before), broken, ear(after)):
        speaker.listen(listener)
    with caplog.at_level(logging.ERROR, "pgworkd.events"):
        speaker.emit("fact", n=1)
        speaker.emit("fact", n=2)
    assert before == after == [("fact", {"n": 1}), ("fact", {"n": 2})]
    assert [record.getMessage() for record in caplog.records] == ["a listener failed on fact"] * 2
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[1] is error


def test_a_listener_may_emit_and_may_add_a_listener() -> None:
    speaker, said = Events(), Said()

    def busy(name: str, facts: Mapping[str, Any]) -> None:
        if name == "first":
            speaker.listen(ear(said))
            speaker.emit("second")

    speaker.listen(busy)
    speaker.emit("first")
    assert [name for name, _ in said].count("second") == 1


def test_event_names_are_unique_and_have_a_subject() -> None:
    names = [value for name, value in vars(events).items() if name.isupper()]
    assert len(names) == len(set(names)) > 20
    assert all(name.count(".") == 1 and name == name.lower() for name in names)
