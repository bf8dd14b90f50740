"""Bugs planted into what people are told: groups of errors, alerts, digests."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_ALERTS, _GROUPS = "tests/sql/test_alerts.py", "tests/sql/test_error_groups.py"
_SENT, _TEXTS, _PUSH = "tests/engine/test_alerts.py", "tests/unit/test_alert_texts.py", "tests/push/test_functions.py"

BUGS = (
    python(
        "a digest says that ten things are wrong, whatever there are",
        "admin/doctor_queries",
        'WHERE enabled AND error IS NOT NULL\n    ORDER BY name LIMIT 1000"""',
        'WHERE enabled AND error IS NOT NULL\n    ORDER BY name LIMIT 10"""',
        tests="tests/engine/test_many_findings.py",
    ),
    python(
        "a digest does not say how many lines it has left out",
        "alerts/digest",
        'return [*lines[:LINES_MAX], f"... and {left:,} more: pgworkd doctor"] if left > 0 else lines',
        "return lines[:LINES_MAX]",
        tests="tests/engine/test_many_findings.py",
    ),
    python(
        "the rows of a digest are sent as lists without names",
        "push/functions",
        'if hasattr(value, "_asdict"):',
        'if hasattr(value, "no"):',
        tests=_PUSH,
    ),
    sql(
        "an alert ignores its cool-down",
        "v_cools := is_since(v_old.at, v_now, p_rule.cooldown_s);",
        "v_cools := false;",
        tests=_ALERTS,
    ),
    sql(
        "alerts stop after a step back of the clock",
        "make_interval(secs => p_for_s) AND p_at <= p_now, false);",
        "make_interval(secs => p_for_s), false);",
        tests=_ALERTS,
    ),
    sql(
        "every group is new",
        "PERFORM note_alert(r, v_group.id, v_group.deaths, v_group.is_new)",
        "PERFORM note_alert(r, v_group.id, v_group.deaths, true)",
        tests=_ALERTS,
    ),
    sql(
        "a rule sends a message for each step of a storm",
        "WHERE NOT is_since(r.job_at, clock(), CASE j.status WHEN 'dead' "
        "THEN greatest(r.bundle_s, r.cooldown_s) ELSE r.bundle_s END) AND EXISTS",
        "WHERE EXISTS",
        tests=_ALERTS,
    ),
    sql(
        "a rule sends a message while another one is on its way",
        "AND coalesce(j.status NOT IN ('pending', 'running', 'failed', 'blocked'), true)",
        "AND true",
        tests=_ALERTS,
    ),
    sql(
        "a message that died silences its rule",
        "AND coalesce(j.status NOT IN ('pending', 'running', 'failed', 'blocked'), true)",
        "AND j.id IS NULL",
        tests=_ALERTS,
    ),
    sql(
        "a message that died is made again and again",
        "CASE j.status WHEN 'dead' THEN greatest(r.bundle_s, r.cooldown_s) ELSE r.bundle_s END) AND EXISTS",
        "r.bundle_s) AND EXISTS",
        tests="tests/sql/test_alert_ends.py",
    ),
    sql(
        "a group that grows is silent until the cool-down ends",
        "coalesce(v_old.told > 0 AND p_deaths >= 10 * v_old.told, false)",
        "false",
        tests=_ALERTS,
    ),
    sql(
        "the rest of a group is never told",
        "ELSIF v_cools THEN v_due_at := v_old.at + make_interval(secs => p_rule.cooldown_s);",
        "ELSIF v_cools THEN RETURN;",
        tests=_ALERTS,
    ),
    sql(
        "the first message silences the number of deaths",
        "NOT is_since(v_old.many_at, v_now, p_rule.cooldown_s) THEN",
        "NOT v_cools THEN",
        tests=_ALERTS,
    ),
    sql(
        "deaths that come while a message is sent count as told",
        "WHEN g.deaths > t.deaths THEN clock() + make_interval(secs => coalesce(v_cooldown_s, 0)) END,",
        "END,",
        tests=_ALERTS,
    ),
    sql(
        "a late attempt takes back what was told",
        "AND a.group_id = t.group_id AND a.told <= t.deaths;",
        "AND a.group_id = t.group_id;",
        tests=_ALERTS,
    ),
    sql(
        "a group that was forgotten is told of for ever",
        "AND NOT EXISTS (SELECT FROM error_groups g WHERE g.id = a.group_id);",
        "AND false;",
        tests=_ALERTS,
    ),
    sql(
        "a rule of numbers tells of deaths before its time",
        "CASE WHEN v_many AND NOT p_is_new THEN p_deaths - v_recent ELSE 0 END,",
        "0,",
        tests=_ALERTS,
    ),
    python(
        "what was told is not noted",
        "alerts/alert",
        "await connection.fetch(_TOLD, rule.name, [row.group for row in due], [row.deaths for row in due])",
        "pass",
        tests="tests/engine/test_alert_storms.py",
    ),
    python(
        "groups that nobody must hear of are told of",
        "alerts/alert",
        "live = [row for row in due if row.why_not is None]",
        "live = list(due)",
        tests=_SENT,
    ),
    python(
        "an error adds lines to an alert",
        "alerts/alert",
        'f"{why}\\n\\n" + "".join(f"{escaped(fact)}\\n" for fact in facts)',
        'f"{why}\\n\\n" + "".join(f"{fact}\\n" for fact in facts)',
        tests=_TEXTS,
    ),
    python(
        "an alert does not say which database it is of",
        "alerts/recipient",
        'return f"pgworkd {self.database}"',
        'return "pgworkd"',
        tests=_TEXTS,
    ),
    python(
        "each attempt of an alert has its own id",
        "alerts/alert",
        "id=uuid5(job_id, repr(sorted(told))),",
        "id=uuid5(job_id, repr(at)),",
        tests=_PUSH,
    ),
    python(
        "what has grown has the id of what was sent before",
        "alerts/alert",
        "id=uuid5(job_id, repr(sorted(told))),",
        "id=job_id,",
        tests=_PUSH,
    ),
    python(
        "an error mentions everyone in a chat",
        "push/functions",
        "subject, text = _for_chat(alert.subject), _for_chat(alert.text()[:SLACK_CHARS_MAX])",
        "subject, text = alert.subject, alert.text()[:SLACK_CHARS_MAX]",
        tests=_PUSH,
    ),
    python(
        "an error ends the block of code in a chat",
        "push/functions",
        "[&<>]|```|@",
        "[&<>]|@",
        tests=_PUSH,
    ),
    python(
        "a digest counts the new groups that it lists",
        "alerts/digest",
        'f", {self.dead.new:,} of them new" if self.dead.new else ""',
        'f", {sum(r.new for r in self.dead.rows):,} of them new" if self.dead.new else ""',
        tests=_SENT,
    ),
    python(
        "a digest lists dead jobs before what waits",
        "alerts/digest",
        "(*self._urgent(), *self._lasting())",
        "(*self._lasting(), *self._urgent())",
        tests=_SENT,
    ),
    python(
        "a digest leaves out endpoints that are disabled",
        "alerts/digest",
        "endpoints=[HeldEndpoint(*row) for row in await fetch(health.ENDPOINTS)],",
        "endpoints=[],",
        tests=_SENT,
    ),
    python(
        "a digest has its times in UTC",
        "alerts/digest",
        "at.astimezone(ZoneInfo(self.timezone))",
        "at",
        tests=_TEXTS,
    ),
    sql(
        "a status of HTTP does not tell errors apart",
        "E'\\\\1\\\\2\\x01\\\\3'],",
        "E'\\\\1\\\\2\\\\3'],",
        tests=_GROUPS,
    ),
    sql(
        "the name of a constraint does not tell errors apart",
        "(KeyError|attribute|argument|arguments|column|constraint|",
        "(KeyError|attribute|argument|arguments|column|",
        tests=_GROUPS,
    ),
    sql(
        "two places make one group",
        "|| coalesce(E'\\n' || nullif(p_place, ''), '')",
        "",
        tests=_GROUPS,
    ),
    sql(
        "deaths have no place",
        "left(error_message(j), 1000), error_place(j.errors -> -1)",
        "left(error_message(j), 1000), ''",
        tests=_SENT,
    ),
    sql(
        "a place is in a library",
        "site-packages|dist-packages|",
        "dist-packages|",
        tests=_GROUPS,
    ),
)
