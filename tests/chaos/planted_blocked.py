"""Bugs planted into what notices and ends loops that are blocked, processes that cannot run, and refused claims."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_MATRIX = "tests/engine/test_without_loop_or_gil.py"
_COMMANDS = "tests/engine/test_blocked_commands.py"
_WATCH = "tests/engine/test_loop_watch.py"
_REFUSED = "tests/engine/test_claims_refused.py"
_TIMER = "tests/engine/test_kill_timer.py"
_STACKS = "tests/engine/test_stacks.py"
BUGS = (
    python(
        "of a handler that blocks the loop only the coroutine is told",
        "engine/life/stack_answers",
        "describe_stack(frame) if is_running and frame is not None else describe_steps(steps_of(task))",
        "describe_steps(steps_of(task))",
        tests=_STACKS,
    ),
    python(
        "tasks of other attempts are told",
        "engine/life/stack_answers",
        "if task is not own and attempt_of(task) is attempt]",
        "if task is not own and attempt_of(task) is not None]",
        tests=_STACKS,
    ),
    python(
        "a worker tells stacks although that is off",
        "engine/life/stack_answers",
        "if self._told else OFF",
        "if self else OFF",
        tests=_STACKS,
    ),
    sql(
        "anybody may answer for a worker that is asked for a stack",
        "      AND EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token = p_token);\n    RETURN FOUND;",
        "      AND EXISTS (SELECT FROM workers w WHERE w.id = p_worker);\n    RETURN FOUND;",
        tests="tests/sql/test_stacks.py",
    ),
    python(
        "a handler that holds the interpreter lock outlives its lease",
        "engine/life/heartbeat",
        "        if self._kill_timer is not None and not self._kill_timer.armed:\n",
        "        if False:\n",
        tests=_MATRIX,
    ),
    python(
        "a renewal does not move the kill timer",
        "engine/life/heartbeat",
        "            self.renewed_at_s = sent_at_s\n            self._move_kill_timer()\n",
        "            self.renewed_at_s = sent_at_s\n",
        tests=_MATRIX,
    ),
    python(
        "the kill timer stays armed while nothing runs",
        "engine/life/heartbeat",
        "                self._call_in_daemon(self._disarm_if_idle)\n",
        "                pass\n",
        tests="tests/engine/test_lease_frozen.py",
    ),
    python(
        "the stacks are written, and the process goes on",
        "engine/life/kill_timer",
        "all_threads=True, chain=True)",
        "all_threads=True)",
        tests=_TIMER,
    ),
    python(
        "stacks that cannot be written keep a process alive",
        "engine/life/kill_timer",
        "        self._set(self._kill, kill_in_s)  # first: to write the stacks may take for ever\n"
        "        self._set(self._dump, dump_in_s)\n",
        "        self._set(self._dump, dump_in_s)\n        self._set(self._kill, kill_in_s)\n",
        tests=_TIMER,
    ),
    python(
        "init of a container survives its own SIGKILL",
        "engine/life/kill_timer",
        "kill = signal.SIGKILL if os.getpid() != 1 else",
        "kill = signal.SIGKILL if True else",
        tests=_TIMER,
    ),
    python(
        "a remote daemon has no kill timer",
        "remote/daemon",
        "self._make_worker(RemoteLife, end_process, kill_timer)",
        "self._make_worker(RemoteLife, end_process, None)",
        tests=_COMMANDS,
    ),
    python(
        "a loop may be blocked for ever",
        "engine/life/loop_watch",
        "        if 0 < self.limit_s <= self.lag_s and not self.stuck:\n",
        "        if False:\n",
        tests=_WATCH,
    ),
    python(
        "a listener that blocks keeps a blocked process alive",
        "engine/life/loop_watch",
        "        teller.join(TOLD_S)\n",
        "        teller.join()\n",
        tests=_WATCH,
    ),
    python(
        "to wait for a listener that blocks counts as if no thread ran",
        "engine/life/loop_watch",
        "                self._look()\n            slept_at = time.monotonic()\n",
        "                self._look()\n            slept_at += TICK_S\n",
        tests=_WATCH,
    ),
    python(
        "a loop that could not run is called blocked by its handler",
        "engine/life/loop_watch",
        "            if stalled_s >= BLOCKED_S:\n",
        "            if False:\n",
        tests=_WATCH,
    ),
    python(
        "a task that a handler has started is nobody's",
        "engine/life/loop_watch",
        "    running = _context(task).get(log.RUNNING)\n",
        "    running = None\n",
        tests=_WATCH,
    ),
    python(
        "an embedded daemon whose loop is stuck keeps its jobs",
        "engine/life/heartbeat",
        "        if self._loop_watch is not None and self._loop_watch.stuck:\n",
        "        if False:\n",
        tests=_COMMANDS,
    ),
    python(
        "without systemd a frozen process is never restarted",
        "processes/supervisor",
        "(systemd_s, options.loop_limit)",
        "(systemd_s,)",
        tests=_COMMANDS,
    ),
    python(
        "processes that are all frozen are left to systemd, which is not there",
        "processes/supervisor",
        "                if self._has_systemd and pinged_s <= child.due_s:\n",
        "                if pinged_s <= child.due_s:\n",
        tests=_COMMANDS,
    ),
    python(
        "a gateway's loop may be blocked for ever",
        "options",
        "        environment=settings.environment,\n        loop_limit_s=settings.loop_limit_s,\n",
        "",
        tests=_COMMANDS,
    ),
    python(
        "liveness never fails",
        "metrics/daemon",
        '        return watch.text() if watch.sick else ""\n',
        '        return ""\n',
        tests=_COMMANDS,
    ),
    python(
        "a blocked worker says that it is running",
        "engine/life/heartbeat",
        "        is_blocked = self._loop_watch is not None and self._loop_watch.lag_s >= self._heartbeat_s\n",
        "        is_blocked = False\n",
        tests=_COMMANDS,
    ),
    python(
        "a blocked remote daemon tells its gateway a state that it refuses",
        "remote/heartbeats",
        'said = "running" if state == "blocked" else state',
        "said = state",
        tests=_COMMANDS,
    ),
    python(
        "claims that the database refuses are not told",
        "engine/claim/claim_loop",
        "                self._counters.refusals.failed(self.queue, error, sent_at)\n",
        "                pass\n",
        tests=_REFUSED,
    ),
    python(
        "polls that the database refuses are not told",
        "engine/wake/poller",
        "            self._refusals.failed(PART, error, sent_at)\n",
        "",
        tests="tests/unit/test_poller.py",
    ),
    python(
        "the database is well while it refuses every connection",
        "metrics/daemon",
        '            Check("database", not waits and not reached,',
        '            Check("database", left_s > 0,',
        tests=_REFUSED,
    ),
    python(
        "a moment's refusal is told as one",
        "engine/refusals",
        "        since = known.since if (known := self._by_part.get(part)) is not None else sent_at\n",
        "        since = min(sent_at, self._first_at) if hasattr(self, '_first_at') else sent_at\n"
        "        self._first_at = since\n",
        tests=_REFUSED,
    ),
    python(
        "a job that runs for hours is nothing to speak of",
        "admin/doctor_queries",
        "WHEN u.usual_s IS NOT NULL THEN $4 * u.usual_s ELSE $5 END",
        "WHEN u.usual_s IS NOT NULL THEN $4 * u.usual_s END",
        tests="tests/engine/test_cli_runs.py",
    ),
)
