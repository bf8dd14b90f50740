"""Two streams that are one pipe, and streams that the application has replaced, and left behind at the end."""

from __future__ import annotations

import os
import time

import pytest

from .test_output import program, small_pipe

LEFT = {
    "a full disk": " = open('/dev/full', 'w'); sys.{name}.write('lost')",
    "a pipe without a reader": (
        " = os.fdopen(os.pipe()[1], 'w'); os.close(sys.{name}.fileno() - 1); sys.{name}.write('lost')"
    ),
    "an object that raises": " = type('', (), {{'flush': lambda self: 1 / 0}})()",
    "an object without flush": " = 1",
    "nothing": " = None",
    "closed": ".close()",
}


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("left", LEFT)
def test_a_stream_that_the_application_has_left_behind_changes_no_exit_code(name: str, left: str) -> None:
    process = program(f"sys.{name}{LEFT[left].format(name=name)}\nsys.exit(3)\n")
    assert process.wait() == 3


def test_long_lines_of_two_streams_are_not_torn_in_one_full_pipe() -> None:
    read, write = small_pipe()
    text = """
for n in range(90):
    sys.stderr.write("a" * 9999 + chr(10))
    print("b" * 99)
    time.sleep(0.005)
output.drain(30)
"""
    process = program(text, stdout=write, stderr=write)
    os.close(write)
    received = b""
    with os.fdopen(read, "rb", buffering=0) as file:
        while piece := file.read(1000):
            received += piece
            time.sleep(0.0005)
    assert process.wait() == 0
    assert sorted(received.splitlines()) == [b"a" * 9999] * 90 + [b"b" * 99] * 90
