"""Metrics, health, boards and alert rules of a fleet; a sibling of the engine, which never imports it."""

from typing import NamedTuple

REPORT_TO = "PGWORKD_REPORT_TO"
"""The variable with the name of the socket on which a process reports to its parent, which has the port."""


class ReportingProcess(NamedTuple):
    """A process that reports to its parent, at a name of `local_sockets`. `wanted` False: it is being stopped."""

    address: str
    wanted: bool = True
