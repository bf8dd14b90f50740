"""Bugs planted into what the gateway answers: batches, bodies, keys of calls."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_API = "gateway/api"

BUGS = (
    python(
        "the job after a batch loses the digits of its payload",
        "client/batches",
        'plain[:-1] + "".join(f\', "{name}": {text}\' for name, text in texts.items() if text is not None) + "}"',
        'encode({**given, "queue": job.queue}, what)',
        tests="tests/http/test_batches.py -k digits",
    ),
    python(
        "a settlement of a wrong form refuses all others",
        f"{_API}/models/workers",
        '        return Misfit(named if isinstance(named, str) else "", error)',
        "        raise",
        tests="tests/http/test_worker_input.py",
    ),
    python(
        "who has no token makes the database work",
        "gateway/workers/workers",
        "self._no_push_until = anyio.current_time() + NO_PUSH_S",
        "self._no_push_until = anyio.current_time()",
        tests="tests/http/test_access.py -k no_token",
    ),
    python(
        "a number is an instant",
        f"{_API}/models/jobs",
        "    if not _INSTANT.fullmatch(value):",
        "    if False:",
        tests="tests/http/test_bodies.py",
    ),
    python(
        "a body that no route reads is let pass",
        f"{_API}/request/route",
        "        if self._is_bodiless:\n",
        "        if False:\n",
        tests="tests/http/test_bodies.py",
    ),
    python(
        "a wait for a tree ends with its root",
        f"{_API}/request/batch_waits",
        "CASE WHEN b.parent_id IS NULL THEN b.tree_finished_at IS NOT NULL",
        "CASE WHEN b.parent_id IS NULL THEN b.finished_at IS NOT NULL",
        tests="tests/http/test_batches.py",
    ),
    python(
        "one wait for a batch ends all that begin later",
        f"{_API}/request/batch_waits",
        "                self._wanted = anyio.Event()\n",
        "                return\n",
        tests="tests/http/test_batches.py",
    ),
    python(
        "a page of batches begins again",
        "admin/batches",
        "AND ($4::uuid IS NULL OR b.id < $4)",
        "AND ($4::uuid IS NULL OR b.id <= $4)",
        tests="tests/http/test_batches.py",
    ),
    sql(
        "refused calls hold up the retention of others",
        "          AND NOT is_refused('forget_rows', jsonb_build_array(o.caller, o.key)::text)\n",
        "",
        tests="tests/sql/test_refused_parts.py",
    ),
    python(
        "a batch belongs to its own queue, not to its root's",
        f"{_API}/routes/visible",
        "access.allows(scope, queues[1])",
        "access.allows(scope, queues[0])",
        tests="tests/http/test_batches.py",
    ),
    python(
        "results of a tree show payloads of all queues",
        f"{_API}/routes/batches",
        "        if each.id not in hidden\n",
        "",
        tests="tests/http/test_batches.py",
    ),
    python(
        "a call waits for another with its key as long as that takes",
        f"{_API}/request/once",
        ", digest, timeout=UNDER_WAY_S)",
        ", digest)",
        tests="tests/http/test_once.py -k under_way",
    ),
    python(
        "jobs of a bench of a gateway stay in the history",
        "bench/calls",
        '            await self._gateway.call("PATCH", f"/v1/queues/{self._queue}", {"keep_s": 0})\n',
        '            await self._gateway.call("PATCH", f"/v1/queues/{self._queue}", {"keep_s": None})\n',
        tests="tests/http/test_bench_calls.py",
    ),
    python(
        "a refused call ends a bench of a gateway",
        "bench/calls",
        "                if refusals >= REFUSALS_MAX:\n",
        "                if refusals:\n",
        tests="tests/http/test_bench_calls.py",
    ),
    python(
        "stacks of a gateway are shown to operators, too",
        "gateway/api/routes/debug",
        'need(request, "admin"), gateway_of(request)',
        'need(request, "operate"), gateway_of(request)',
        tests="tests/http/test_debug.py",
    ),
    python(
        "several profiles are taken at once",
        "core/stacks",
        "    if not _sampling.acquire(blocking=False):\n",
        "    if not _sampling.acquire(blocking=True, timeout=0.01) and False:\n",
        tests="tests/http/test_debug.py",
    ),
    python(
        "the stack of a task ends where it awaits another coroutine",
        "core/stacks",
        "        awaited = _first(awaited, _AWAITED)\n",
        "        awaited = None\n",
        tests="tests/http/test_debug.py",
    ),
    python(
        "jobs of any error are retried where a group of errors is given",
        f"{_API}/routes/operate",
        "which.all_queues, which.group)",
        "True)",
        tests="tests/http/test_operate.py -k group",
    ),
    python(
        "a blocked loop cannot be asked where it is",
        "cli/running",
        'lambda *_: threading.Thread(target=told, name="stacks", daemon=True).start())',
        "lambda *_: loop.call_soon_threadsafe(told))",
        tests="tests/engine/test_told_stacks.py",
    ),
)
