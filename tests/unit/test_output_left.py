"""Streams that the application has replaced, and left behind when the process ends."""

from __future__ import annotations

import pytest

from .test_output import program

LEFT = {
    "a full disk": "= open('/dev/full', 'w'); sys.{name}.write('lost')",
    "a pipe without a reader": (
        "= os.fdopen(os.pipe()[1], 'w'); os.close(sys.{name}.fileno() - 1); sys.{name}.write('lost')"
    ),
    "an object that raises": "= type('', (), {{'flush': lambda self: 1 / 0}})()",
    "an object without flush": "= 1",
    "nothing": "= None",
    "closed": ".close()",
}


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("left", LEFT)
def test_a_stream_that_the_application_has_left_behind_changes_no_exit_code(name: str, left: str) -> None:
    process = program(f"sys.{name} {LEFT[left].format(name=name)}\nsys.exit(3)\n".replace(f"{name} .", f"{name}."))
    assert process.wait() == 3
