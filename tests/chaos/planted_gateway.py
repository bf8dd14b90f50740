"""Bugs planted into the gateway, and into daemons that work through one."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_WORKERS, _OPTIONS = "tests/http/test_workers.py", "tests/http/test_worker_options.py"
_LISTS = "tests/http/test_worker_lists.py"
_FAULTS = "tests/http/test_worker_faults.py"
_JOINED = "tests/http/test_joined.py"
_FRAMING = "tests/http/test_framing.py"
_CALLER = "tests/http/test_caller.py"
_DAEMON = "tests/http/test_remote_daemon.py"

BUGS = (
    python(
        "a long poll claims for who has gone",
        "gateway/workers/pool",
        "        if waiter.is_gone:\n            self._release([each.held for each in given])\n        elif given:",
        "        if given:",
        tests=_FAULTS,
    ),
    python(
        "an assignment is taken without its MAC",
        "gateway/workers/workers",
        "        if not is_sealed(text, fence):",
        "        if False:",
        tests=_WORKERS,
    ),
    python(
        "any secret will do",
        "gateway/workers/workers",
        " or not hmac.compare_digest(worker.id.token.hex.encode(), secret.encode()):",
        ":",
        tests=_WORKERS,
    ),
    python(
        "a beat of a lost worker is answered as any other",
        "gateway/workers/beats",
        "            if outcome == LOST:",
        "            if False:",
        tests=_WORKERS,
    ),
    python(
        "what no list has is never given back",
        "gateway/workers/watch",
        "            if dropped:",
        "            if False:",
        tests=_LISTS,
    ),
    python(
        "what a claim brings whose answer is on its way is given back",
        "gateway/workers/workers",
        "            and row.claim_id <= self.claim_id\n",
        "",
        tests=_LISTS,
    ),
    sql(
        "what was listed and is not any more goes back uncounted",
        "coalesce(j.listed = j.attempts, false) AS begun",
        "false AS begun",
        tests=_LISTS,
    ),
    python(
        "a row that cannot be noted as begun costs its worker the lease",
        "gateway/workers/beats",
        "            if len(held) == 1:\n",
        "            if len(held) == 1:\n                raise\n            if False:\n",
        tests=_LISTS,
    ),
    python(
        "a worker gets more than its free slots",
        "gateway/workers/workers",
        "        return max(0, slots - held - self.reserved[queue])",
        "        return slots",
        tests=_WORKERS,
    ),
    python(
        "the last that waits is served first",
        "gateway/workers/pool",
        "        waiting = list(self._waiting)\n",
        "        waiting = list(reversed(self._waiting))\n",
        tests=_WORKERS,
    ),
    python(
        "a slot that was freed through another gateway is not seen",
        "gateway/workers/watch",
        "            full = [worker for worker in self._workers if worker.is_full]",
        "            full: list[RemoteWorker] = []",
        tests=_FAULTS,
    ),
    python(
        "an occurrence that was claimed elsewhere is followed by none",
        "gateway/workers/settles",
        "        if elsewhere:",
        "        if False:",
        tests="tests/http/test_worker_schedules.py",
    ),
    python(
        "a repeated settle is an error",
        "gateway/workers/settles",
        "    if status is not None and status in STATUSES_AFTER[item.outcome.ending]:",
        "    if False:",
        tests=_WORKERS,
    ),
    python(
        "a bad settle harms the others",
        "engine/settle/loop",
        "            elif len(items) == 1 or (away and not self._policy.keeps):",
        "            elif True:",
        tests=_FAULTS,
    ),
    python(
        "the max_attempts of the first worker hold for all",
        "gateway/workers/pool",
        " and budgets in (None, waiter.budgets) and self._may_serve(waiter):",
        " and self._may_serve(waiter):",
        tests=_OPTIONS,
    ),
    python(
        "a suspect waits behind a worker that may not take it",
        "gateway/workers/pool",
        "        self._in_vain_for = None if found.claims else chosen[0][0].budgets\n",
        "",
        tests=_OPTIONS,
    ),
    python(
        "a worker that is stopping is given jobs",
        "gateway/workers/claims",
        "            if worker.has_news or worker.is_stopping:",
        "            if worker.has_news:",
        tests=_OPTIONS,
    ),
    python(
        "a locked job holds up a call of many settles",
        "gateway/api/routes/assignments",
        "LOCKED_MANY_S = 0.5",
        "LOCKED_MANY_S = 3600.0",
        tests=_OPTIONS,
    ),
    python(
        "a remote daemon does not list what it holds",
        "remote/assignments",
        "        return [text for text, token in list(self._texts.values()) if token == ours]",
        "        return []",
        tests=_DAEMON,
    ),
    python(
        "a remote daemon goes on with what is not its own any more",
        "remote/daemon",
        "        self._stop_attempts(instructions.gone, Reason.FENCE)\n",
        "",
        tests=_DAEMON,
    ),
    python(
        "a remote daemon forgets what it could not settle",
        "remote/store",
        "        if wrong:  # the others are repeated with it, and answered as before\n            raise wrong[0]\n",
        "",
        tests=_DAEMON,
    ),
    python(
        "a locked job of a remote daemon counts as taken",
        "remote/store",
        "                locked.add(each.fence.job_id)\n                continue\n",
        "                pass\n",
        tests=_DAEMON,
    ),
    python(
        "a claim of a remote daemon whose answer was lost is under way for ever",
        "remote/store",
        "            self.held.end_claim(claim_id)\n",
        "            pass\n",
        tests="tests/http/test_remote_claims.py",
    ),
    python(
        "a broken connection of a request is dropped twice",
        "database/requests",
        "        if connection is not None:\n            terminate(connection)\n",
        "        if connection is not None:\n            connection.terminate()\n",
        tests="tests/chaos/test_wire.py::test_an_operation_survives_a_cut_before_any_message[SetQueue]",
    ),
    python(
        "a session is never reset after a look-up",
        "database/transactions",
        "        is_as_new, self._is_as_new = self._is_as_new, False\n",
        "        is_as_new = self._is_as_new\n",
        tests="tests/http/test_lookups.py",
    ),
    python(
        "a claim is answered to who has just hung up",
        "gateway/api/request/caller",
        "bool(is_closing())",
        "False",
        tests=_CALLER,
    ),
    python(
        "an application's own check of callers ends the gateway",
        "gateway/api/request/gateway",
        "            except Exception as error:",
        "            except PgworkdError as error:",
        tests="tests/http/test_waiting_tokens.py",
    ),
    python(
        "a body without its end is waited for for ever",
        "gateway/api/server",
        "    def on_message_complete(self) -> None:",
        "    def on_body(self, body: bytes) -> None:\n"
        "        self._notes[HAS_ARRIVED] = True\n"
        "        super().on_body(body)\n\n"
        "    def on_message_complete(self) -> None:",
        tests=_CALLER,
    ),
    python(
        "a head without a body is never sent",
        "gateway/api/server",
        "            self._loop.call_soon(self._flush)",
        "            pass",
        tests=_JOINED,
    ),
    python(
        "a connection is closed before its answer is sent",
        "gateway/api/server",
        "        self._flush()\n        self._transport.close()",
        "        self._transport.close()",
        tests=_JOINED,
    ),
    python(
        "the body of a request counts as its head",
        "gateway/api/server",
        "        if self._in_body:\n            return\n",
        "",
        tests=_FRAMING,
    ),
    python(
        "a request that offers an upgrade loses its body",
        "gateway/api/server",
        "self._decline_upgrade(data[offer.args[0] :])",
        'self._decline_upgrade(b"")',
        tests=_FRAMING,
    ),
    python(
        "a head without an end is read while an answer is awaited",
        "gateway/api/server",
        "        if self._head_bytes > HEAD_BYTES_MAX:",
        "        if self._head_bytes > HEAD_BYTES_MAX and (self.cycle is None or self.cycle.response_complete):",
        tests=_FRAMING,
    ),
    python(
        "the last of two hosts is believed",
        "gateway/api/server",
        "        if len(single) > len(set(single)):",
        "        if False:",
        tests=_FRAMING,
    ),
    python(
        "many settles are answered when the first of them is done",
        "gateway/workers/settles",
        "            if self.call.left == 0:",
        "            if self.call.left >= 0:",
        tests=_WORKERS,
    ),
    sql(
        "a daemon takes what only a worker in another language knows",
        "                        AND (u.kind = ANY (w.kinds) OR w.kinds IS NULL AND w.kind = 'remote'\n"
        "                             AND w.requested IS NULL)))",
        "                        AND u.kind = ANY (w.kinds)))",
        tests="tests/http/test_mixed_fleet.py",
    ),
    python(
        "who may do less than when the request came is answered",
        "gateway/api/request/gateway",
        "        if not (await authorized(self._authorize, request)).covers(request.state.access):",
        "        if not await authorized(self._authorize, request):",
        tests="tests/http/test_waiting_tokens.py",
    ),
    python(
        "a worker that is asked to be quiet is given jobs",
        "gateway/workers/pool",
        " and worker.requested is None\n",
        "\n",
        tests=_WORKERS,
    ),
    python(
        "a worker that waits does not learn what it is asked",
        "gateway/workers/beats",
        "self._workers.apply(await self._store.news(list(requested)), requested)",
        "self._workers.apply(await self._store.news(list(requested)), dict.fromkeys(requested))",
        tests=_WORKERS,
    ),
    python(
        "an error of an application's own check is logged with its variables",
        "gateway/api/request/failures",
        "exception=said",
        "exc_info=error",
        tests="tests/http/test_waiting_tokens.py",
    ),
    python(
        "a stop of a remote daemon waits for its claims",
        "remote/daemon",
        '            self.worker.heartbeat.state = "stopping"\n            self.worker.renew_now()\n',
        "            pass\n",
        tests=_DAEMON,
    ),
    python(
        "a remote daemon that is quiet claims",
        "remote/daemon",
        "        return super().may_claim and not self.quiet",
        "        return super().may_claim",
        tests=_DAEMON,
    ),
)
