"""Bugs planted into operations in the background."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_STEPS, _HTTP = "tests/sql/test_operations_in_steps.py", "tests/http/test_operations.py"
_THERE = "j.created_at <= v_one.started_at"

BUGS = (
    sql(
        "what died after the start of an operation is retried, too",
        "              ELSE j.failed_at <= v_one.started_at END",
        "              ELSE true END",
        tests=_STEPS,
    ),
    sql(
        "an operation forgets the jobs that were locked",
        "    v_ends := v_found.last IS NULL AND NOT v_one.left_behind;",
        "    v_ends := v_found.last IS NULL;",
        tests=_STEPS,
    ),
    sql(
        "a locked batch holds up an operation",
        "        IF cardinality(v_found.ids) > 1 THEN",
        "        IF true THEN",
        tests=_STEPS,
    ),
    sql(
        "a job that refuses an operation is not counted",
        "    v_refused := cardinality(v_ids) - v_done - v_asked;",
        "    v_refused := 0;",
        tests=_STEPS,
    ),
    sql(
        "running jobs are asked to stop in each round",
        f"{_THERE}\n{' ' * 45}AND j.cancel_requested_at IS NULL",
        _THERE,
        tests=_STEPS,
    ),
    sql(
        "one operation goes before all others",
        "    ORDER BY o.next_at, o.id LIMIT 1 FOR UPDATE SKIP LOCKED;",
        "    ORDER BY o.id LIMIT 1 FOR UPDATE SKIP LOCKED;",
        tests=_STEPS,
    ),
    sql(
        "the same operation is started twice",
        "    IF v_id IS NOT NULL THEN\n        RETURN v_id;\n    ELSIF (SELECT",
        "    IF (SELECT",
        tests=_STEPS,
    ),
    sql(
        "what refused one operation is passed over by the next",
        "    v_name := 'operation ' || v_one.id;",
        "    v_name := 'operation';",
        tests=_STEPS,
    ),
    sql(
        "operations are kept for ever",
        "    PERFORM in_parts('prune', v_ops::text[], 'forget_operations(bigint[])');",
        "",
        tests=_STEPS,
    ),
    python(
        "an operation begins when daemons look by themselves",
        "engine/life/maintenance",
        '            "operations": self._operation_started,\n',
        "",
        tests="tests/engine/test_background.py",
    ),
    python(
        "a token for some queues knows the operations of all",
        "gateway/api/routes/operations",
        'if access.allows("read", each.queue)]',
        "]",
        tests=_HTTP,
    ),
    python(
        "who may not operate a queue stops its operations",
        "gateway/api/routes/operations",
        "    if found is None or not access_of(request).allows(scope, found.queue):",
        "    if found is None:",
        tests=_HTTP,
    ),
    python(
        "more jobs than one call may change are changed in part",
        "dashboard/pages/jobs",
        "    if not are_all:",
        "    if False:",
        tests="tests/dashboard/test_acts.py",
    ),
)
