-- When there is something to claim: the depth of a queue, and when its next job is due.

-- The highest priority below p_above and above p_below of the waiting jobs of a queue, with keys or
-- without; NULL if there is none. Every walk over priorities takes its steps by this. Its planner
-- settings are its caller's, because to set them costs more than the look-up. Locks nothing.
CREATE OR REPLACE FUNCTION next_priority(p_queue text, p_keyed boolean, p_above bigint,
                                         p_below bigint DEFAULT -2147483649) RETURNS int
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_keyed THEN
        RETURN (SELECT j.priority FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j)
                  AND j.priority < p_above AND j.priority > p_below
                ORDER BY j.priority DESC LIMIT 1);
    END IF;
    RETURN (SELECT j.priority FROM jobs j
            WHERE j.queue = p_queue AND waits_plain(j)
              AND j.priority < p_above AND j.priority > p_below
            ORDER BY j.priority DESC LIMIT 1);
END $$;

-- The first run_at, from p_from on, of the waiting jobs of a queue that have this priority, with
-- keys or without; NULL if there is none. Planner settings: see next_priority(). Locks nothing.
CREATE OR REPLACE FUNCTION first_run_at(p_queue text, p_keyed boolean, p_priority int,
                                        p_from timestamptz DEFAULT '-infinity') RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_keyed THEN
        RETURN (SELECT min(j.run_at) FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority = p_priority
                  AND j.run_at >= p_from);
    END IF;
    RETURN (SELECT min(j.run_at) FROM jobs j
            WHERE j.queue = p_queue AND waits_plain(j) AND j.priority = p_priority
              AND j.run_at >= p_from);
END $$;

-- How many jobs of a queue could run now if there were free slots, none while it is paused; p_most
-- stands for that many or more. Reads what is due, at most p_most entries of an index, and one
-- entry per priority that is not. While a transaction holds back vacuum, the entries of ended jobs
-- stay, and are read each time: some 0.5 ms per thousand. (Claims avoid that, because each pool
-- keeps its place; a caller of this has none.) Locks nothing.
CREATE OR REPLACE FUNCTION depth(p_queue text, p_most int DEFAULT 100000) RETURNS int
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now      timestamptz := clock();
    v_found    int := 0;
    v_above    bigint := 2147483648;
    v_priority int;
BEGIN
    IF EXISTS (SELECT FROM queues q WHERE q.name = p_queue AND q.paused_until > v_now) THEN
        RETURN 0;
    END IF;
    FOR i IN 1..1000 LOOP
        v_priority := greatest(
            next_priority(p_queue, false, v_above), next_priority(p_queue, true, v_above),
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
    v_top      bigint;
    v_above    bigint;
    v_known    bigint;
    v_keyed    boolean;
    v_priority int;
BEGIN
    FOR v_place IN 1..coalesce(cardinality(p_queues), 0) LOOP
        v_queue := p_queues[v_place];
        v_from := coalesce(v_now - make_interval(secs => p_ages_s[v_place]), '-infinity');
        v_top := 2147483648;
        SELECT min(j.run_at) INTO v_next FROM jobs j
        WHERE j.queue = v_queue AND waits_suspect(j);
        FOREACH v_known IN ARRAY coalesce(p_known[v_place]::bigint[], '{}') || -2147483649 LOOP
            FOREACH v_keyed IN ARRAY ARRAY[true, false] LOOP
                v_above := v_top;  -- priorities between two that the caller knows
                FOR i IN 1..100 LOOP
                    v_priority := next_priority(v_queue, v_keyed, v_above, v_known);
                    EXIT WHEN v_priority IS NULL;
                    v_next := least(v_next, first_run_at(v_queue, v_keyed, v_priority));
                    v_above := v_priority;
                END LOOP;
                IF v_priority IS NOT NULL THEN  -- more than anyone should use: read them all
                    v_next := least(v_next, CASE WHEN v_keyed
                        THEN (SELECT min(j.run_at) FROM jobs j
                              WHERE j.queue = v_queue AND waits_keyed(j) AND j.priority < v_above
                                AND j.priority > v_known)
                        ELSE (SELECT min(j.run_at) FROM jobs j
                              WHERE j.queue = v_queue AND waits_plain(j) AND j.priority < v_above
                                AND j.priority > v_known) END);
                END IF;
                IF v_known >= -2147483648 THEN
                    v_next := least(v_next,
                                    first_run_at(v_queue, v_keyed, v_known::int, v_from));
                END IF;
            END LOOP;
            v_top := v_known;
        END LOOP;
        IF v_next IS NOT NULL THEN
            queue := v_queue;
            due_in_s := extract(epoch FROM v_next - v_now);
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;
