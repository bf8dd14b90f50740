"""Metrics, health, boards and alert rules of a fleet; a sibling of the engine, which never imports it."""

from pathlib import Path
from typing import NamedTuple

REPORT_TO = "PGWORKD_REPORT_TO"
"""The variable that names the Unix socket on which a process reports to its parent, which has the port."""


class Member(NamedTuple):
    """A process that reports to its parent. `wanted` False: it is being stopped, and need not be ready."""

    path: Path
    wanted: bool = True
