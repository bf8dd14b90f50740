"""`pgworkd doctor`: problems of the database and the fleet, each with its remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgworkd.admin.examination import examine
from pgworkd.admin.findings import Finding
from pgworkd.cli.common import Dsn, Json, ask_any, settings_of
from pgworkd.cli.output import as_json, out
from pgworkd.errors import AccessRefused, PgworkdError, UsageError
from pgworkd.process.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin


def doctor(*, json: Json = False, dsn: Dsn = None) -> int:
    """Check the database and the fleet for problems; exit code 1 if anything is bad."""
    findings = _examine(dsn)
    if json:
        as_json([finding._asdict() for finding in findings])
    else:
        for level, subject, finding, remedy in findings:
            line = f"{level:<5} {subject:<14} {finding}" + (f": {remedy}" if remedy else "")
            out(escaped(line))
    return 1 if any(finding.level == "bad" for finding in findings) else 0


def _examine(dsn: str | None) -> list[Finding]:
    settings = settings_of(dsn)
    dsn, findings = settings.dsn_required(), list[Finding]()

    async def question(admin: Admin) -> None:
        await examine(admin, findings, dsn, settings.database, settings.environment)

    try:
        ask_any(dsn, question, verify=False)
    except PgworkdError as error:
        reached = any(finding.subject == "connection" for finding in findings)
        if isinstance(error, UsageError) and not reached and not isinstance(error, AccessRefused):
            raise
        if reached and isinstance(error, UsageError):
            findings.append(Finding("bad", "rights", str(error), "see pgworkd grants"))
        elif reached:
            remedy = "run it again; if that fails, too, look in pg_stat_activity for who holds a lock or is slow"
            if any(finding.subject == "locks" and finding.level == "bad" for finding in findings):
                remedy = "see locks, above"
            findings.append(Finding("bad", "answers", f"the database left a question unanswered: {error}", remedy))
        else:
            findings.append(Finding("bad", "connection", str(error)))
    return findings
