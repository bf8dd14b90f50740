"""The examination of `pgworkd doctor`: the server, the schema, the fleet, and what keeps jobs from running."""

from __future__ import annotations

import time
from typing import Literal

from pgworkd.admin.admin import Admin
from pgworkd.admin.doctor_database import Doctor, ServerFacts
from pgworkd.admin.doctor_queries import DEAD_MAX
from pgworkd.admin.findings import Finding, judged, judged_locks, judged_sessions
from pgworkd.core.origin import Origin
from pgworkd.errors import SchemaError
from pgworkd.settings.conninfo import conninfo
from pgworkd.settings.tls import weakness

SKEW_WARN_S, SKEW_BAD_S = 2.0, 60.0
TRANSACTION_WARN_S, TRANSACTION_BAD_S = 300.0, 3600.0
NOTIFY_QUEUE_WARN, NOTIFY_QUEUE_BAD = 0.1, 0.5
_OF_WORKERS = ("queues", "kinds")
"""Subjects that a standby cannot judge: it does not know which worker serves which queue."""
SERVER_OLDEST, SERVER_NEWEST = 14, 18


async def examine(
    admin: Admin,
    findings: list[Finding],
    dsn: str,
    address: str,
    environment: str | None,
    *,
    only_reads: bool = False,
) -> None:
    """Adds what is found to `findings`, as it is found. Raises the errors of `Admin`, with what was found before them.

    `dsn`: by which `admin` is connected; `address`: how the database is named; `environment`: of who asks.
    `only_reads`: it is by our own wish that `admin` changes nothing.
    """
    weak = weakness(conninfo(dsn))
    findings.extend([] if weak is None else [Finding("warn", "tls", *weak.split(": ", 1))])
    await admin.server()  # connects first, so that the time to connect does not count as clock skew
    before_s = time.time()
    server = await admin.server()
    after_s = time.time()
    server = server._replace(read_only=server.standby) if only_reads else server
    findings.append(Finding("ok", "connection", f"{address}, answers in {(after_s - before_s) * 1000:.1f} ms"))
    findings.extend(_judge_server(server))
    findings.append(_judge_clock(server.clock_s - (before_s + after_s) / 2))
    findings.append(judged_sessions(await admin.sessions()))
    waits = [] if server.standby else await admin.locks()  # first: what they hold up, this may wait for, too
    findings.extend(judged_locks(waits))
    try:
        await admin.verify()
    except SchemaError as error:
        finding, _, remedy = str(error).partition(": ")
        findings.append(Finding("bad", "schema", finding, remedy))
        return
    findings.append(Finding("ok", "schema", "installed and current"))
    findings.extend(_judge_origin(await admin.origin(environment), environment))
    findings.extend(_judge(await admin.doctor()))
    findings.extend(await examine_jobs(admin, standby=server.standby, locked=bool(waits)))


async def examine_jobs(admin: Admin, *, standby: bool, locked: bool = False) -> list[Finding]:
    """What keeps jobs from running; `standby`: the server is one; `locked`: jobs wait for a lock."""
    found = judged(await admin.health(standby=standby), locked=locked)
    return [each for each in found if not (standby and each.subject in _OF_WORKERS)]


def _judge_server(server: ServerFacts) -> list[Finding]:
    major = server.version_num // 10_000
    findings = [Finding("ok", "server", f"Postgres {server.version}")]
    if major < SERVER_OLDEST:
        findings = [Finding("bad", "server", f"Postgres {server.version}", f"upgrade it to {SERVER_OLDEST} or later")]
    elif major > SERVER_NEWEST:
        findings = [Finding("warn", "server", f"Postgres {server.version}", "newer than pgworkd was tested with")]
    if server.standby:
        finding = "this is a read-only standby, which does not know which worker serves which queue"
        findings.append(
            Finding("bad", "writes", finding, "give workers, and commands that write, the primary's address")
        )
    elif server.read_only:
        remedy = "set default_transaction_read_only = off for the database and the role"
        findings.append(Finding("bad", "writes", "transactions are read-only by default", remedy))
    return findings


def _judge_origin(found: Origin | None, environment: str | None) -> list[Finding]:
    """A finding about a copy whose jobs run nowhere. Who names no environment, as an operator's machine, may ask."""
    if found is None or found.is_here:
        return []
    if found.environment is not None and environment is None:
        return [Finding("ok", "origin", str(found))]
    return [Finding("bad", "origin", *found.fault(environment))]


def _judge_clock(skew_s: float) -> Finding:
    finding = f"the server is {abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} this host"
    level: Literal["ok", "warn", "bad"] = "ok"
    if abs(skew_s) > SKEW_WARN_S:
        level = "bad" if abs(skew_s) > SKEW_BAD_S else "warn"
    return Finding(level, "clock", finding, "" if level == "ok" else "run NTP on both; jobs follow the server's clock")


def _judge(facts: Doctor) -> list[Finding]:
    return [
        Finding("ok", "autovacuum", "on")
        if facts.autovacuum
        else Finding(
            "bad", "autovacuum", "off", "turn it on, on the server and for pgworkd.jobs; claims slow down without it"
        ),
        _judge_transactions(facts),
        *_judge_workers(facts),
        Finding("warn", "dead jobs", _up_to(facts.dead), "pgworkd dead shows of what; then pgworkd retry or discard")
        if facts.dead
        else Finding("ok", "dead jobs", "none"),
        Finding("ok", "history", "has a partition for tomorrow")
        if facts.tomorrow
        else Finding(
            "warn", "history", "has no partition for tomorrow", "a running daemon creates it, or pgworkd migrate"
        ),
        _judge_notifications(facts.notify_queue),
    ]


def _up_to(count: int) -> str:
    return f"{count:,}" if count < DEAD_MAX else f"{count:,} or more"


def _judge_transactions(facts: Doctor) -> Finding:
    unseen = "" if facts.sees_all_sessions else " (only own sessions are visible: GRANT pg_read_all_stats)"
    age_s = facts.oldest_transaction_s or 0.0
    if age_s < TRANSACTION_WARN_S:
        return Finding("ok", "transactions", f"none older than {TRANSACTION_WARN_S / 60:g} min{unseen}")
    return Finding(
        "bad" if age_s > TRANSACTION_BAD_S else "warn",
        "transactions",
        f"{facts.oldest_transaction} has been open for {age_s / 60:.0f} min and holds back vacuum",
        "end it, or SELECT pg_terminate_backend(pid); idle_in_transaction_session_timeout prevents it",
    )


def _judge_workers(facts: Doctor) -> list[Finding]:
    findings = [Finding("ok", "workers", f"{facts.workers} up")]
    remedy = "other workers rescue their jobs within a minute; see pgworkd workers"
    if not facts.workers:
        findings = [Finding("warn", "workers", "none is up", "start one with pgworkd run")]
        remedy = "the next one that starts rescues their jobs within a minute; see pgworkd workers"
    if facts.workers_lost:
        findings.append(Finding("warn", "workers", f"{facts.workers_lost} lost", remedy))
    return findings


def _judge_notifications(filled: float) -> Finding:
    if filled < NOTIFY_QUEUE_WARN:
        return Finding("ok", "notifications", f"queue {filled:.0%} full")
    return Finding(
        "bad" if filled > NOTIFY_QUEUE_BAD else "warn",
        "notifications",
        f"queue {filled:.0%} full; once it is full, commits fail",
        "end the session that listens inside a long transaction (see pg_stat_activity)",
    )
