"""A planted bug, and what is expected to catch it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kits.planting import Planted


@dataclass(frozen=True)
class Bug:
    """A planted bug, and what is expected to catch it: a chaos run with these kinds of faults, or tests."""

    planted: Planted
    kinds: str = ""
    tests: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """Arguments of `python -m`."""
        if self.tests:
            return ("pytest", "-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", *self.tests.split())
        faults = str(max(6, 2 * len(self.kinds.split(","))))
        return (
            "tests.chaos",
            "--minutes",
            "0.5",
            "--jobs",
            "900",
            "--faults",
            faults,
            "--seed",
            "7",
            "--only",
            self.kinds,
        )


def sql(name: str, old: str, new: str, kinds: str = "", tests: str = "") -> Bug:
    """A bug in schema.sql or one of its chapters."""
    return Bug(Planted(name, "schema.sql", old, new), kinds, tests)


def python(name: str, module: str, old: str, new: str, kinds: str = "", tests: str = "") -> Bug:
    """A bug in a Python module of the package."""
    return Bug(Planted(name, f"pgworkd/{module}.py", old, new), kinds, tests)
