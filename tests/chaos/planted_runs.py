"""Bugs planted into running handlers and into the meaning of their outcomes."""

from __future__ import annotations

from tests.chaos.bug import python

BUGS = (
    python(
        "any return of a stopped handler counts as completed",
        "engine/run/runner",
        "            if attempt.reason is not None and (attempt.stop_seen or scope.stop_seen) and",
        "            if False and attempt.reason is not None and",
        tests="tests/stories/test_05_stop.py",
    ),
    python(
        "a started job with max_attempts=1 is released at a stop",
        "engine/run/runner",
        "        if reason is not Reason.CANCEL and attempt.claimed.max_attempts == 1:\n",
        "        if False and attempt.claimed.max_attempts == 1:\n",
        tests="tests/engine/test_stopping.py",
    ),
    python(
        "a handler may open a second transaction",
        "engine/run/runner",
        "        if attempt.settled or attempt.in_transaction:\n",
        "        if False:\n",
        tests="tests/engine/test_transactions.py",
    ),
    python(
        "an exception after the settle is not reported",
        "engine/run/runner",
        "        if attempt.settled or (stop_seen and _is_done(attempt)):\n",
        "        if False:\n",
        tests="tests/engine/test_transactions.py",
    ),
    python(
        "a threaded handler may open a transaction",
        "engine/run/runner",
        "        if asyncio.get_running_loop() is not loop:\n",
        "        if False:\n",
        tests="tests/engine/test_transactions.py",
    ),
    python(
        "waiting for a connection counts against the handler's timeout",
        "engine/run/runner",
        "begin(attempt.committing, attempt.untimed) as",
        "begin(attempt.committing) as",
        tests="tests/engine/test_transactions.py",
    ),
    python(
        "a handler's log lines do not name its job",
        "engine/run/runner",
        "scope, task.attempt = self._grace_s, scope, attempt\n",
        "scope, task.attempt = self._grace_s, scope, None\n",
        tests="tests/engine/test_handler_log.py",
    ),
    python(
        "progress reported during an outage is dropped",
        "engine/settle/job_events",
        "            if not isinstance(error, DatabaseUnavailable):",
        "            if True:",
        tests="tests/engine/test_progress.py",
    ),
    python(
        "a handler's cleanup is cut off",
        "engine/runner_task",
        "        cut_at = asyncio.get_running_loop().time() + grace_s\n",
        "        cut_at = asyncio.get_running_loop().time()\n",
        tests="tests/engine/test_stopping.py",
    ),
    python(
        "results of other than JSON types are rejected",
        "core/payload",
        'return encode(value, "result", object_only=False, convert=True)',
        'return encode(value, "result", object_only=False)',
        tests="tests/unit/test_result_types.py",
    ),
    python(
        "an embedded daemon ends its host process",
        "engine/life/daemon",
        "(end_process or self._give_up_lease, kill_timer)\n",
        "(end_process or __import__('pgworkd.engine.life').engine.life.heartbeat.end_process, kill_timer)\n",
        tests="tests/engine/test_host.py",
    ),
    python(
        "an error summary has many lines",
        "core/error_report",
        '        message = " ".join(self.message.split())\n',
        "        message = self.message\n",
        tests="tests/unit/test_error_report.py",
    ),
    python(
        "payload values appear in errors",
        "core/error_report",
        "_faults(exc) if isinstance(exc, ValidationError) else str(exc)",
        "str(exc)",
        tests="tests/unit/test_error_report.py",
    ),
    python(
        "the pool waits for a process that has died",
        "engine/run/process_pool",
        "            tasks.start_soon(self._watch, tasks.cancel_scope)\n",
        "",
        tests="tests/engine/test_process_ends.py",
    ),
    python(
        "claimed jobs start after a freeze, under an expired lease",
        "engine/run/executor",
        "            if not slice_ends and not self._may_start():\n",
        "            if not slice_ends and not waiting:\n",
        tests="tests/engine/test_lease_frozen.py",
    ),
    python(
        "a line that a handler has begun is continued by the log",
        "process/output",
        "        if self._is_terminal or self._patience_s is not None:\n            self.add(piece)\n",
        "        if piece:\n            self.add(piece)\n",
        tests="tests/unit/test_output_streams.py",
    ),
    python(
        "a line that a job in a process has begun is ended by the next one",
        "engine/run/process_child",
        "        output.end_lines()\n",
        "",
        tests="tests/engine/test_process_ends.py",
    ),
    python(
        "the log of a remote daemon tells each request",
        "cli/programs",
        "        requests_log.setLevel(logging.WARNING)\n",
        "        requests_log.setLevel(logging.INFO)\n",
        tests="tests/http/test_remote_daemon_start.py",
    ),
)
