"""Bugs planted into push."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_DAEMON, _CALLBACKS = "tests/push/test_daemon.py", "tests/push/test_callbacks.py"
_CONNECTIONS = "tests/push/test_connections.py"
_GUARD, _MESSAGE, _SQL = "tests/push/test_guard.py", "tests/push/test_message.py", "tests/sql/test_endpoints.py"

BUGS = (
    python(
        "the signature does not cover the time",
        "push/message",
        'signatures(secrets, f"{message_id}.{int(at.timestamp())}.".encode() + content)',
        'signatures(secrets, f"{message_id}.0.".encode() + content)',
        tests=_MESSAGE,
    ),
    python(
        "one public address of a name is enough",
        "push/guard",
        "        if wrong:  # one is enough",
        "        if wrong == addresses:  # one is enough",
        tests=_GUARD,
    ),
    python(
        "an address in IPv6 is not looked into",
        "push/guard",
        'found = getattr(found, "ipv4_mapped", None) or found',
        "found = found",
        tests=_GUARD,
    ),
    python(
        "what comes behind an answer begins the next one",
        "push/connections",
        'states == {h11.DONE} and self._http.trailing_data == (b"", False)',
        "states == {h11.DONE}",
        tests=_CONNECTIONS,
    ),
    python(
        "what comes when no answer is due is one",
        "push/connections",
        "        if self._due is None or self._due.done():\n            self.close()",
        "        if self._due is None or self._due.done():\n            self._http.receive_data(data)",
        tests=_CONNECTIONS,
    ),
    python(
        "a connection is kept although its receiver has not read all",
        "push/connections",
        "        if not is_read or self._transport.get_write_buffer_size() or",
        "        if not is_read or",
        tests=_CONNECTIONS,
    ),
    python(
        "the time that a receiver keeps a connection is not heeded",
        "push/connections",
        "min(IDLE_S, IDLE_S if told is None else int(told[1]) - EARLIER_S)",
        "IDLE_S",
        tests=_CONNECTIONS,
    ),
    python(
        "what may be done once is sent over a connection that was kept",
        "push/connections",
        "(None if anew else self._kept(place))",
        "self._kept(place)",
        tests=_CONNECTIONS,
    ),
    python(
        "a job that may run once is pushed over a connection that was kept",
        "push/daemon/delivery",
        "headers, content, once=once)",
        "headers, content)",
        tests="tests/push/test_delivery.py",
    ),
    python(
        "the kind of a job leads to another path",
        "push/endpoint",
        '        if value in (".", ".."):',
        "        if False:",
        tests="tests/push/test_delivery.py",
    ),
    python(
        "addresses are tried in the order of the name server",
        "push/guard",
        "_in_turns(await self._judged(host))",
        "list(await self._judged(host))",
        tests=_GUARD,
    ),
    python(
        "a secret that others may read is used",
        "push/secrets",
        "            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):",
        "            if False:",
        tests="tests/push/test_secrets.py",
    ),
    python(
        "a request that was not sent is the only attempt",
        "push/daemon/delivery",
        "ending = Ending.RELEASED if once else Ending.FAILED",
        "ending = Ending.FAILED",
        tests=_DAEMON,
    ),
    python(
        "an endpoint that fails is never paused",
        "push/daemon/routes",
        "        if not asks_for_less and self._failures % FAILURES_MAX:",
        "        if not asks_for_less:",
        tests=_DAEMON,
    ),
    python(
        "a daemon that was frozen blames the endpoint",
        "push/daemon/delivery",
        "        if time.monotonic() <= latest:",
        "        if True:",
        tests=_DAEMON,
    ),
    python(
        "a success does not end a row of failures",
        "push/daemon/routes",
        "        self._failures = self._pauses = 0",
        "        pass",
        tests=_DAEMON,
    ),
    python(
        "an endpoint that is gone is asked again",
        "push/daemon/delivery",
        "            await self._disable(target, found)",
        "            pass",
        tests=_DAEMON,
    ),
    python(
        "an attempt is passed on after its request",
        "push/daemon/callbacks",
        "            attempt.worker_id, attempt.handed_over = standing, True",
        "            attempt.handed_over = True",
        tests=_CALLBACKS,
    ),
    python(
        "a stop gives back what may have been accepted",
        "engine/run/runner",
        "        if attempt.handed_over and reason is not Reason.CANCEL:",
        "        if False:",
        tests=_CALLBACKS,
    ),
    python(
        "a request that breaks off waits for no callback",
        "push/daemon/delivery",
        "Verdict(Ending.HANDED_OVER if waits else Ending.FAILED,",
        "Verdict(Ending.FAILED,",
        tests=_CALLBACKS,
    ),
    python(
        "any assignment lets in without a token",
        "gateway/workers/workers",
        "            if pushed is not None and found.worker_id == pushed:\n",
        "            if pushed is None or pushed:\n                return True\n            if pushed is not None:\n",
        tests=_CALLBACKS,
    ),
    sql(
        "a paused endpoint goes on getting jobs",
        "        PERFORM hold_queues(p_name, v_until);",
        "        PERFORM 1;",
        tests=_SQL,
    ),
    sql(
        "a pause of an endpoint ends a longer one of its queue",
        "coalesce(q.paused_until < p_until, true)",
        "true",
        tests=_SQL,
    ),
    sql(
        "enabling an endpoint resumes what an operator has paused",
        "            OR q.paused_until = 'infinity' AND q.name = ANY (v_was.disabled_queues))",
        "            OR q.paused_until = 'infinity')",
        tests=_SQL,
    ),
)
