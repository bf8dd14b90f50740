-- When there is something to claim: the depth of a queue, and when its next job is due.

-- How many jobs of a queue could run now if there were free slots; p_most stands for that many or
-- more. Reads what is due, at most p_most entries of an index, and one entry per priority that is
-- not. While a transaction holds back vacuum, the entries of ended jobs stay, and are read each
-- time: some 0.5 ms per thousand. (Claims avoid that, because each pool keeps its place; a caller
-- of this has none.) Locks nothing.
CREATE OR REPLACE FUNCTION depth(p_queue text, p_most int DEFAULT 100000) RETURNS int
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now      timestamptz := clock();
    v_found    int := 0;
    v_above    bigint := 2147483648;
    v_priority int;
BEGIN
    FOR i IN 1..1000 LOOP
        v_priority := greatest(
            (SELECT max(j.priority) FROM jobs j
             WHERE j.queue = p_queue AND waits_plain(j) AND j.priority < v_above),
            (SELECT max(j.priority) FROM jobs j
             WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority < v_above),
            (SELECT max(j.priority) FROM jobs j
             WHERE j.queue = p_queue AND waits_suspect(j) AND j.priority < v_above));
        EXIT WHEN v_priority IS NULL OR v_found >= p_most;
        v_found := v_found + (SELECT count(*) FROM (
            (SELECT FROM jobs j WHERE j.queue = p_queue AND j.priority = v_priority
             AND waits_plain(j) AND j.run_at <= v_now
             ORDER BY j.run_at LIMIT p_most - v_found)
            UNION ALL
            (SELECT FROM jobs j WHERE j.queue = p_queue AND j.priority = v_priority
             AND waits_keyed(j) AND j.run_at <= v_now
             ORDER BY j.run_at LIMIT p_most - v_found)
            UNION ALL
            (SELECT FROM jobs j WHERE j.queue = p_queue AND j.priority = v_priority
             AND waits_suspect(j) AND j.run_at <= v_now
             ORDER BY j.run_at LIMIT p_most - v_found)) due);
        v_above := v_priority;
    END LOOP;
    RETURN least(v_found, p_most);
END $$;

-- Seconds until the next job of each queue is due (0 or less: due now); queues without a waiting
-- job are left out. Reads one index entry per priority and, while vacuum is held back, those of
-- all ended jobs before it. So callers may pass what they know of p_queues[i]: no waiting job was
-- due more than p_ages_s[i] ago (NULL: nothing is known), which skips the entries of ended jobs in
-- the priorities p_known[i] ('{5,0}', descending). Locks nothing.
CREATE OR REPLACE FUNCTION next_due(p_queues text[], p_ages_s float8[] DEFAULT '{}',
                                    p_known text[] DEFAULT '{}')
RETURNS TABLE (queue text, due_in_s float8)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz := clock();
    v_queue    text;
    v_from     timestamptz;
    v_next     timestamptz;
    v_row      record;
    v_probes   int;
    v_top      bigint;
    v_above    bigint;
    v_known    bigint;
BEGIN
    FOR v_place IN 1..coalesce(cardinality(p_queues), 0) LOOP
        v_queue := p_queues[v_place];
        v_from := coalesce(v_now - make_interval(secs => p_ages_s[v_place]), '-infinity');
        v_top := 2147483648;
        SELECT min(j.run_at) INTO v_next FROM jobs j
        WHERE j.queue = v_queue AND waits_suspect(j);
        FOREACH v_known IN ARRAY coalesce(p_known[v_place]::bigint[], '{}') || -2147483649 LOOP
            v_above := v_top;  -- priorities between two that the caller knows
            v_probes := 0;
            LOOP
                SELECT j.priority, j.run_at INTO v_row FROM jobs j
                WHERE j.queue = v_queue AND waits_keyed(j) AND j.priority < v_above
                  AND j.priority > v_known
                ORDER BY j.priority DESC, j.run_at LIMIT 1;
                EXIT WHEN NOT FOUND OR v_probes >= 100;
                v_next := least(v_next, v_row.run_at);
                v_above := v_row.priority;
                v_probes := v_probes + 1;
            END LOOP;
            IF v_row.priority IS NOT NULL THEN
                v_next := least(v_next, (
                    SELECT min(j.run_at) FROM jobs j
                    WHERE j.queue = v_queue AND waits_keyed(j) AND j.priority < v_above
                      AND j.priority > v_known));
            END IF;
            v_above := v_top;
            v_probes := 0;
            LOOP
                SELECT j.priority, j.run_at INTO v_row FROM jobs j
                WHERE j.queue = v_queue AND waits_plain(j) AND j.priority < v_above
                  AND j.priority > v_known
                ORDER BY j.priority DESC, j.run_at LIMIT 1;
                EXIT WHEN NOT FOUND OR v_probes >= 100;
                v_next := least(v_next, v_row.run_at);
                v_above := v_row.priority;
                v_probes := v_probes + 1;
            END LOOP;
            IF v_row.priority IS NOT NULL THEN
                v_next := least(v_next, (
                    SELECT min(j.run_at) FROM jobs j
                    WHERE j.queue = v_queue AND waits_plain(j) AND j.priority < v_above
                      AND j.priority > v_known));
            END IF;
            IF v_known >= -2147483648 THEN
                v_next := least(v_next,
                    (SELECT min(j.run_at) FROM jobs j
                     WHERE j.queue = v_queue AND waits_keyed(j) AND j.priority = v_known
                       AND j.run_at >= v_from),
                    (SELECT min(j.run_at) FROM jobs j
                     WHERE j.queue = v_queue AND waits_plain(j) AND j.priority = v_known
                       AND j.run_at >= v_from));
            END IF;
            v_top := v_known;
        END LOOP;
        IF v_next IS NOT NULL THEN
            queue := v_queue;
            due_in_s := extract(epoch FROM v_next - v_now);
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;
