"""Bugs planted into what may be said by an option, a variable or a member of a body."""

from __future__ import annotations

from tests.chaos.bug import python

BUGS = (
    python(
        "a secret's variable is a misspelt setting",
        "settings/file",
        " if not each.startswith(SECRET_PREFIX)):",
        " if each):",
        tests="tests/unit/test_config.py -k secret_may",
    ),
)
