"""Bugs in what users and operators see: README, the commands, the unit."""

from __future__ import annotations

from tests.chaos.bug import Bug
from tests.planting import Planted

BUGS = (
    Bug(
        Planted("README's tour names a queue that the app lacks", "README.md", "thumbnail=4", "ocr=4"),
        tests="tests/stories/test_12_readme.py",
    ),
)
