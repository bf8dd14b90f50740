"""Bugs planted into what one caller of the gateway may do to others, and into how HTTP is spoken."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_SHARES, _BOUNDS, _CALLER = "tests/http/test_shares.py", "tests/http/test_bounds.py", "tests/http/test_caller.py"
_ONCE, _ENQUEUES = "tests/http/test_once.py", "tests/http/test_enqueues.py"
_API = "gateway/api"

BUGS = (
    python(
        "one caller may have all places",
        f"{_API}/request/shares",
        "        if caller is not None and self._of[name] >= max(1, self._most // 2):",
        "        if False:",
        tests=_SHARES,
    ),
    python(
        "one caller may have all connections",
        f"{_API}/request/shares",
        "self._each, self._limit_s = max(1, most * 3 // 4), limit_s",
        "self._each, self._limit_s = most, limit_s",
        tests=_SHARES,
    ),
    python(
        "a stream holds a connection before it has brought a job",
        f"{_API}/routes/bulk",
        "            jobs = await anext(steps, None)  # nothing is held of the database before there are jobs\n"
        "            async with once(request, key) as call:\n",
        "            async with once(request, key) as call:\n                jobs = await anext(steps, None)\n",
        tests=_SHARES,
    ),
    python(
        "a stream goes on when its token is revoked",
        f"{_API}/routes/bulk",
        "async with gateway.while_allowed(request), aclosing",
        "async with aclosing",
        tests=_SHARES,
    ),
    python(
        "a stream may trickle for as long as it likes",
        f"{_API}/routes/bulk",
        "limit.cancelled_caught or total < STREAM_BYTES_PER_S * (anyio.current_time() - began - BODY_S)",
        "limit.cancelled_caught",
        tests=_SHARES,
    ),
    python(
        "a body that takes long is used although its token is revoked",
        f"{_API}/request/route",
        "if self.is_authorized and time.monotonic() - began_s > CHECKED_S:",
        "if False:",
        tests=_SHARES,
    ),
    python(
        "tokens are looked up on the connections of requests",
        f"{_API}/request/gateway",
        "authorize or Tokens(self._lookups)",
        "authorize or Tokens(self.database)",
        tests=_SHARES,
    ),
    python(
        "wrong tokens hold up right ones of their address",
        f"{_API}/request/access",
        "        checked = _Checked(None, 0.0) if token is None else await self._known(token.id)\n",
        "        if token is None or self._failures.wait_s(request.client.host if request.client else '') > 0:\n"
        "            raise self._refusal(request, token)\n"
        "        checked = await self._known(token.id)\n",
        tests=_SHARES,
    ),
    python(
        "a claim that does not wait needs a place",
        f"{_API}/routes/workers",
        "gateway.claims.place(None) if body.wait_s else contextlib.nullcontext()",
        "gateway.claims.place(None)",
        tests=_SHARES,
    ),
    python(
        "who operates a queue says where its jobs are sent",
        f"{_API}/routes/queues",
        '    if "endpoint" in changes:',
        "    if False:",
        tests=_SHARES,
    ),
    python(
        "a stream that was cut short is answered as done",
        f"{_API}/request/gateway",
        "            if self._has_arrived:  # else the body is read meanwhile, which also tells when the caller goes\n"
        "                if IS_CLOSING",
        "            if True:\n                if IS_CLOSING",
        tests=_CALLER,
    ),
    python(
        "the rest of a body that was answered is read for ever",
        f"{_API}/server",
        "        if self._in_body:\n            self._expect(LINGER_S)",
        "        if False:\n            self._expect(LINGER_S)",
        tests=_CALLER,
    ),
    python(
        "of two tokens one is taken",
        f"{_API}/server",
        '_SINGLE = frozenset({b"host", b"authorization", b"pgworkd-secret"})',
        '_SINGLE = frozenset({b"host"})',
        tests=_CALLER,
    ),
    python(
        "a follower of a revoked token goes on beside wrong ones",
        f"{_API}/request/access",
        "        if not was_right and (wait_s",
        "        if (wait_s",
        tests=_SHARES,
    ),
    python(
        "a job that may not be seen is told from one that is not there",
        f"{_API}/routes/visible",
        "            if job_id not in queues or not access",
        "            if job_id in queues and not access",
        tests=_SHARES,
    ),
    python(
        "who may see other queues gets the text of this one",
        f"{_API}/routes/events",
        "tuple((scope, queues and tuple(queues)) for scope, queues in access.scopes.items())",
        "tuple(access.scopes)",
        tests="tests/http/test_events.py",
    ),
    python(
        "a list is encoded for each follower",
        f"{_API}/request/live_lists",
        "        if viewer not in self._texts:",
        "        if True:",
        tests="tests/http/test_events.py",
    ),
    python(
        "a job may wait for those of any queue",
        f"{_API}/routes/visible",
        '    if not wanted or access.allows("enqueue"):',
        "    if True:",
        tests=_SHARES,
    ),
    sql(
        "a batch of another queue takes the payloads of this one",
        "          AND b.dedupe_key = p_dedupe_key AND b.queue = p_queue\n",
        "          AND b.dedupe_key = p_dedupe_key\n",
        tests=_SHARES,
    ),
    python(
        "a job that waits for a key holds up those of others",
        f"{_API}/request/enqueues",
        '_WAIT = frozenset({"dedupe_key", "serialize_key", "after", "on_duplicate"})',
        '_WAIT = frozenset({"after", "on_duplicate"})',
        tests=_ENQUEUES,
    ),
    python(
        "one job that is refused fails those of others",
        f"{_API}/request/enqueues",
        "            if len(taken) == 1:",
        "            if True:",
        tests=_ENQUEUES,
    ),
    python(
        "a caller gets the id of another's job",
        f"{_API}/request/enqueues",
        "zip(taken, ids, strict=True)",
        "zip(taken, reversed(ids), strict=True)",
        tests=_ENQUEUES,
    ),
    python(
        "what waits at a stop is never answered",
        f"{_API}/request/enqueues",
        '            _fail(self._waiting, DatabaseUnavailable("the gateway stops"))\n',
        "",
        tests=_ENQUEUES,
    ),
    python(
        "a lost answer of a single statement says that nothing was done",
        "database/transactions",
        "                    raise unanswered(error) from error\n                raise\n",
        "                    raise\n                raise\n",
        tests=_ENQUEUES,
    ),
    sql(
        "a call with a key is done again",
        "        is_new := FOUND;\n",
        "        is_new := true;\n",
        tests=_ONCE,
    ),
    sql(
        "a key takes any call for its own",
        "SELECT c.sha256 = p_sha256, c.answer INTO same, answer",
        "SELECT true, c.answer INTO same, answer",
        tests=_ONCE,
    ),
    python(
        "a key is that of all callers",
        f"{_API}/request/once",
        "access_of(request).name, key)",
        '"anyone", key)',
        tests=_ONCE,
    ),
    sql(
        "calls with a key are kept for ever",
        "FROM idempotent_calls o WHERE o.at < clock() - interval '1 day'",
        "FROM idempotent_calls o WHERE false",
        tests=_ONCE,
    ),
    python(
        "a line end in a name ends the path",
        f"{_API}/request/names",
        '_OF = {"/": "s", "\\n": "n", "\\r": "r", _MARK: "m"}\n_CHARS',
        '_OF = {"/": "s", "\\n": "s", "\\r": "r", _MARK: "m"}\n_CHARS',
        tests=_BOUNDS,
    ),
    python(
        "load balancers are asked for a host",
        f"{_API}/request/bounds",
        "        is_probe = path in PROBES or",
        "        is_probe =",
        tests=_BOUNDS,
    ),
    python(
        "metrics are served under any host",
        f"{_API}/request/bounds",
        '(path == "/metrics" and not host)',
        'path == "/metrics"',
        tests=_BOUNDS,
    ),
    python(
        "a caller that sends no more gets no answer",
        f"{_API}/server",
        "        self._is_half_closed, self.cycle.keep_alive = True, False",
        "        return None",
        tests=_CALLER,
    ),
    python(
        "a claim waits on when its caller sends no more",
        f"{_API}/server",
        "        for call in self._on_closing:\n            call()\n",
        "",
        tests=_CALLER,
    ),
    python(
        "anyone says where links lead",
        f"{_API}/server",
        "        if self.client is not None and self.client[0] in trusted:",
        "        if self.client is not None:",
        tests=_CALLER,
    ),
    python(
        "a weak tag is another one",
        f"{_API}/routes/jobs",
        'each.strip().removeprefix("W/")',
        "each.strip()",
        tests="tests/http/test_jobs.py",
    ),
)
