"""Metrics, health, boards and alert rules of a fleet; a sibling of the engine, which never imports it."""

REPORT_TO = "PGWORKD_REPORT_TO"
"""The variable that names the Unix socket on which a process reports to its parent, which has the port."""
