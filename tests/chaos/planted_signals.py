"""Bugs planted into signals: samples, statistics, deaths, alerts and metrics."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_DEATHS, _ALERTS = "tests/sql/test_deaths.py", "tests/sql/test_alerts.py"
_NUMBERS = "tests/http/test_numbers.py"
_SAMPLES, _STATISTICS = "tests/sql/test_samples.py", "tests/engine/test_statistics.py"

BUGS = (
    sql(
        "two sessions count deaths at once",
        "    IF NOT pg_try_advisory_xact_lock(1886873445, 10) THEN\n        RETURN NULL;",
        "    IF false THEN\n        RETURN NULL;",
        tests=_DEATHS,
    ),
    sql(
        "a death is noted for what is retried, too",
        "FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead'\n    ON CONFLICT",
        "FROM jobs j WHERE j.id = ANY (p_ids) AND j.status IN ('dead', 'failed')\n    ON CONFLICT",
        tests=_DEATHS,
    ),
    sql(
        "deaths before the step's are forgotten with it",
        "                deaths = g.deaths + excluded.deaths,",
        "                deaths = excluded.deaths,",
        tests=f"{_DEATHS} {_ALERTS}",
    ),
    sql(
        "a group's first death moves",
        "first_at = least(g.first_at, excluded.first_at)",
        "first_at = excluded.first_at",
        tests=f"{_DEATHS} {_ALERTS}",
    ),
    sql(
        "a muted group makes alerts",
        "AND coalesce(v_group.muted_until <= clock(), true);",
        "AND true;",
        tests=_ALERTS,
    ),
    sql(
        "the death of an alert makes an alert",
        "AND (r.queue <> v_group.queue OR r.kind <> v_group.kind)",
        "AND true",
        tests=_ALERTS,
    ),
    sql(
        "the rules of another application are deleted",
        "WHERE o.updated_at < clock() - interval '1 day'",
        "WHERE o.updated_at < clock() + interval '1 day'",
        tests=_ALERTS,
    ),
    sql(
        "a mute is audited as an unmute",
        "jsonb_build_object('group', p_group, 'muted_until', p_until));",
        "jsonb_build_object('group', p_group, 'muted_until', NULL));",
        tests=_DEATHS,
    ),
    sql(
        "samples stop after a step back of the clock",
        "IF v_last.at <= v_now AND v_due_at > v_now THEN",
        "IF v_due_at > v_now THEN",
        tests=_SAMPLES,
    ),
    sql(
        "an expensive sample is taken every 5 s",
        "v_due_at := v_last.at + make_interval(secs => greatest(5, 20 * v_last.took_s));",
        "v_due_at := v_last.at + make_interval(secs => 5);",
        tests=_SAMPLES,
    ),
    sql(
        "what is scheduled counts as due",
        "count(*) FILTER (WHERE j.status IN ('pending', 'failed') AND j.run_at <= v_now),",
        "count(*) FILTER (WHERE j.status IN ('pending', 'failed')),",
        tests=_SAMPLES,
    ),
    sql(
        "a roll-up loses the failures",
        "sum(g.completed) AS completed, sum(g.failed) AS failed,",
        "sum(g.completed) AS completed, 0 AS failed,",
        tests=_SAMPLES,
    ),
    sql(
        "thinning keeps a second sample of an hour",
        "AND k.at < min(o.at)));",
        "AND k.at < min(o.at) AND false));",
        tests=_SAMPLES,
    ),
    python(
        "statistics are written again with each period",
        "engine/life/signals",
        "rows = [_less(total, self._written.get(key)) for key, total in totals.items()]",
        "rows = [_less(total, None) for key, total in totals.items()]",
        tests=_STATISTICS,
    ),
    python(
        "a stop loses the last statistics",
        "engine/life/signals",
        "        if self._statistics:\n            with anyio.move_on_after(LAST_S):",
        "        if False:\n            with anyio.move_on_after(LAST_S):",
        tests=_STATISTICS,
    ),
    python(
        "kinds are counted without a bound",
        "engine/counters",
        "if self._known[ours] >= KINDS_MAX:",
        "if False:",
        tests=_STATISTICS,
    ),
    python(
        "totals fall when a process dies",
        "metrics/samples",
        'ADDITIVE = frozenset(family.name for family in FAMILIES if family.kind != "gauge")',
        "ADDITIVE = frozenset[str]()",
        tests="tests/unit/test_metrics.py",
    ),
    python(
        "a digest shows line breaks of names",
        "alerts/digest",
        '*(f"  {escaped(line)}" for line in lines)',
        '*(f"  {line}" for line in lines)',
        tests="tests/engine/test_alerts.py",
    ),
    python(
        "jobs sent are not counted",
        "client/sent",
        "        _counts[name] += jobs",
        "        pass",
        tests="tests/unit/test_metrics_otel.py",
    ),
    python(
        "a start is counted when its run has ended",
        "engine/settle/job_events",
        "            self._counters.begun([attempt for attempt in self._in_flight if not attempt.start_counted])\n",
        "",
        tests=f"{_STATISTICS}::test_what_runs_is_counted_as_started_once",
    ),
    python(
        "a start is counted twice",
        "engine/counters",
        "            if each.started is not None and not each.start_counted",
        "            if each.started is not None",
        tests=f"{_STATISTICS}::test_what_runs_is_counted_as_started_once",
    ),
    python(
        "claims that fail have no duration",
        "engine/counters",
        '        self.claims[queue, "failed"] += 1\n        self.claim_s.observe(took_s)\n',
        '        self.claims[queue, "failed"] += 1\n',
        tests=f"{_STATISTICS}::test_a_claim_that_fails_has_a_duration",
    ),
    sql(
        "a retry that is due counts as one that waits",
        "           count(*) FILTER (WHERE j.status IN ('pending', 'failed') AND j.run_at <= v_now),",
        "           count(*) FILTER (WHERE j.status = 'pending' AND j.run_at <= v_now),",
        tests=_SAMPLES,
    ),
    sql(
        "a paused queue is to be scaled",
        "    IF EXISTS (SELECT FROM queues q WHERE q.name = p_queue AND q.paused_until > v_now) THEN",
        "    IF false THEN",
        tests=_SAMPLES,
    ),
    sql(
        "what is cancelled is counted nowhere",
        "    IF v_counts IS NOT NULL THEN",
        "    IF false THEN",
        tests=_SAMPLES,
    ),
    sql(
        "a lock on statistics holds up who cancels",
        "    LOCK TABLE queue_minutes IN ROW EXCLUSIVE MODE NOWAIT;\n",
        "",
        tests=_SAMPLES,
    ),
    sql(
        "counts by older bounds are taken for those of now",
        "           finer_counts(u.waits::bigint[]), finer_counts(u.runs::bigint[]), u.wait_s, u.run_s",
        "           u.waits::bigint[], u.runs::bigint[], u.wait_s, u.run_s",
        tests=_SAMPLES,
    ),
    python(
        "a gateway does not count what it gives",
        "gateway/workers/pool",
        "            self._counters.begun([attempt for attempt, _ in given])\n",
        "",
        tests=_NUMBERS,
    ),
    python(
        "jobs lose the trace of the request that created them",
        "gateway/api/routes/batches",
        "        await at.add(body.payloads, **with_trace({}))",
        "        await at.add(body.payloads)",
        tests="tests/http/test_traces.py",
    ),
    python(
        "the trace of one request goes with the jobs of another",
        "gateway/api/request/route",
        '            traces.RECEIVED.set(traces.received(scope["headers"]))',
        '            found = traces.received(scope["headers"])\n'
        "            traces.RECEIVED.set(found or traces.RECEIVED.get())",
        tests="tests/http/test_traces.py",
    ),
    python(
        "what is usual is forgotten at each restart",
        "engine/counters",
        "        counts = ours if stored is None else [a + b for a, b in zip(ours, stored, strict=True)]",
        "        counts = ours",
        tests="tests/engine/test_slow.py",
    ),
    python(
        "slow runs make slow ones usual",
        "engine/counters",
        "        return percentile(counts, 0.5) if sum(counts) >= least else None",
        "        return percentile(counts, 0.95) if sum(counts) >= least else None",
        tests="tests/engine/test_slow.py",
    ),
    python(
        "a name of ours is on the page twice",
        "metrics/own",
        "if each.name not in _OURS]",
        "]",
        tests="tests/unit/test_metrics_own.py",
    ),
    python(
        "any method is a label",
        "gateway/api/request/numbers",
        "        if route == NO_ROUTE or status == METHOD_NOT_ALLOWED:",
        "        if route == NO_ROUTE:",
        tests=_NUMBERS,
    ),
    python(
        "whose pause it is, is not told",
        "metrics/exporter",
        '        paused[queue, "operator"] = int(is_paused and not by_endpoint)',
        '        paused[queue, "operator"] = int(is_paused)',
        tests="tests/engine/test_exporter.py::test_all_families_as_a_reader",
    ),
    python(
        "a page is compressed for who cannot read that",
        "metrics/server",
        '        if coding in ("gzip", "*"):',
        "        if True:",
        tests="tests/unit/test_metrics_server.py",
    ),
)
