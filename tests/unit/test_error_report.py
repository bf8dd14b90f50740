"""What is stored of an exception."""

import runpy

import pytest
from pydantic import BaseModel, ValidationError

from pgworkd.core.error_report import (
    FRAMES_MAX,
    MESSAGE_BYTES_MAX,
    TRACEBACK_BYTES_MAX,
    TYPE_CHARS_MAX,
    ErrorFacts,
    describe_error,
)
from pgworkd.core.payload import encode


class Rude(Exception):  # noqa: N818
    def __init__(self, answer: object) -> None:
        super().__init__("never shown")
        self.answer = answer

    def __str__(self) -> str:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return str(self.answer)


def raised(error: BaseException) -> BaseException:
    """`error` with a traceback, as a handler's error has."""

    def innermost() -> None:
        raise error

    try:
        innermost()
    except BaseException as caught:  # noqa: BLE001
        return caught


def assert_bounded(facts: ErrorFacts) -> None:
    assert len(facts.type) <= TYPE_CHARS_MAX
    assert len(facts.message.encode()) <= MESSAGE_BYTES_MAX
    assert len(facts.summary.encode()) <= MESSAGE_BYTES_MAX
    assert len(facts.traceback.encode()) <= TRACEBACK_BYTES_MAX
    assert "\0" not in facts.type + facts.message + facts.traceback
    encode(facts)


def test_an_error_is_described_by_type_message_and_innermost_frames():
    facts = describe_error(raised(ValueError("no such note")))
    assert_bounded(facts)
    assert (facts.type, facts.message) == ("ValueError", "no such note")
    assert facts.summary == "ValueError: no such note"
    assert facts.traceback.startswith("Traceback (most recent call last):\n")
    assert "in innermost" in facts.traceback
    assert facts.traceback.endswith("ValueError: no such note")
    assert describe_error(TimeoutError()).summary == "TimeoutError"
    assert describe_error(Rude("x")).type == f"{__name__}.Rude"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("no"), "(its str() raised RuntimeError)"),
        (SystemExit(3), "(its str() raised SystemExit)"),
        (KeyboardInterrupt(), "(its str() raised KeyboardInterrupt)"),
        ("a\0b\ud800", "a\\x00b\\ud800"),
    ],
)
def test_an_exception_whose_own_methods_raise_is_still_described(answer, message):
    facts = describe_error(raised(Rude(answer)))
    assert_bounded(facts)
    assert facts.message == message
    assert "in innermost" in facts.traceback


def test_a_message_of_50_mb_leaves_room_for_the_frames():
    facts = describe_error(raised(ValueError("x" * 50_000_000)))
    assert_bounded(facts)
    assert facts.message.endswith("x…")
    assert "in innermost" in facts.traceback


def test_a_deep_recursion_keeps_its_innermost_frames():
    def even(n: int) -> int:
        return odd(n - 1)

    def odd(n: int) -> int:
        return even(n - 1) if n > 0 else bottom()

    def bottom() -> int:
        raise ValueError("deep down")

    with pytest.raises(ValueError, match="deep down") as caught:
        even(400)
    facts = describe_error(caught.value)
    assert_bounded(facts)
    assert "in bottom" in facts.traceback
    assert facts.traceback.count("File ") == FRAMES_MAX


def test_frames_with_long_paths_keep_the_innermost(tmp_path):
    script = tmp_path.joinpath(*["ä" * 100] * 5, "script.py")
    script.parent.mkdir(parents=True)
    script.write_text(
        "def even(n): odd(n - 1)\n"
        "def odd(n): even(n - 1) if n > 1 else bottom()\n"
        "def bottom(): raise KeyError('at the bottom')\n"
        "even(40)\n"
    )
    with pytest.raises(KeyError) as caught:
        runpy.run_path(str(script))
    facts = describe_error(caught.value)
    assert_bounded(facts)
    assert facts.traceback.startswith("Traceback (most recent call last):\n…")
    assert len(facts.traceback.encode()) > TRACEBACK_BYTES_MAX - 10
    assert facts.traceback.endswith("KeyError: 'at the bottom'")
    assert "in bottom" in facts.traceback


def test_causes_come_first_and_a_cycle_of_causes_is_cut():
    first, second = ValueError("first"), KeyError("second")
    second.__cause__, first.__context__ = first, second
    facts = describe_error(second)
    assert_bounded(facts)
    lines = facts.traceback.splitlines()
    assert lines[0] == "ValueError: first"
    assert lines[1] == "The above exception was the direct cause of the following one:"
    assert lines[2:] == ["KeyError: 'second'"]


def test_notes_are_shown():
    error = ValueError("x")
    error.add_note("while reading note 7")
    assert describe_error(error).traceback == "ValueError: x\nwhile reading note 7"


def test_an_exception_group_lists_its_members_with_their_frames():
    inner = ExceptionGroup("inner", [raised(KeyError("k"))])
    facts = describe_error(ExceptionGroup("outer", [raised(ValueError("v")), inner]))
    assert_bounded(facts)
    assert facts.message == "outer (2 sub-exceptions): ValueError: v; KeyError: 'k'"
    assert "Member 1 of 2:\nTraceback" in facts.traceback
    assert facts.traceback.endswith("KeyError: 'k'")


def test_a_huge_nested_exception_group_is_bounded():
    group: BaseException = ValueError("core" * 5000)
    for depth in range(300):
        group = BaseExceptionGroup(f"level {depth} " + "g" * 5000, [group, *[OSError("o" * 5000)] * 20])
    assert_bounded(describe_error(group))


def test_the_summary_is_one_line_without_control_characters():
    facts = describe_error(ValueError("no\r\n  such\x1b[2Jnote\u2028 in\x85the\tbook\u202e"))
    assert facts.summary == "ValueError: no such\\x1b[2Jnote in the book\\u202e"
    assert facts.message.startswith("no\r\n  such"), "the history keeps what was said"
    assert describe_error(ValueError("\n\n")).summary == "ValueError"
    assert len(describe_error(ValueError("\x1b" * 4000)).summary.encode()) <= MESSAGE_BYTES_MAX


class _Card(BaseModel):
    number: int
    names: list[int]


def test_invalid_input_is_not_shown_in_a_validation_error():
    card = {"number": "4111-secret", "names": ["hunter2"] * 20}
    with pytest.raises(ValidationError) as caught:
        _Card.model_validate(card)
    facts = describe_error(caught.value)
    assert facts.message.startswith("21 validation errors for _Card: number: Input should be a valid integer")
    assert "; names.0: Input should be" in facts.message
    assert facts.message.endswith("; ...")
    kept = facts.message + facts.traceback + facts.summary
    assert "secret" not in kept
    assert "hunter2" not in kept
