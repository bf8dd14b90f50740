-- How far the claims of a pool have come among jobs with keys, so that the next one need not begin
-- at the head of the index.

-- Where a claim begins that reaches p_reach_s before these places, NULL: to every head; and no
-- later than p_since. Without `promoted`, promoted jobs are found by their run_at. Locks nothing.
CREATE OR REPLACE FUNCTION starts(p_places claim_place[], p_reach_s float8, p_since float8)
RETURNS claim_place[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY(
        SELECT ROW(p.keyed, p.priority, b.run_at,
                   CASE WHEN b.run_at < p.run_at OR p_since IS NOT NULL
                        THEN '00000000-0000-0000-0000-000000000000'::uuid ELSE p.id END,
                   p.promoted - (p_reach_s * 1e6)::bigint)::claim_place
        FROM unnest(p_places) p,
             LATERAL (SELECT greatest(least(p.run_at - (coalesce(p_reach_s, 1e10) * 1e6)::bigint,
                                            (p_since * 1e6)::bigint), 0) AS run_at) b)
$$;

-- True if a job with keys waits that pick() may find from these places on. (The first ones in an
-- order are selected, because the index must have that order: in another one, EXISTS would visit
-- each limit_key.) Locks nothing.
CREATE OR REPLACE FUNCTION keyed_behind(p_queue text, p_starts claim_place[]) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_above bigint := 2147483648;
    v_place claim_place;
    v_found boolean := false;
BEGIN
    FOREACH v_place IN ARRAY p_starts LOOP  -- in order of priority: see places_after()
        CONTINUE WHEN NOT v_place.keyed;
        v_found := next_priority(p_queue, true, v_above, v_place.priority) IS NOT NULL
           OR (SELECT j.id FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j)
                 AND j.priority = v_place.priority
               AND (j.run_at, j.id) > (to_timestamp(v_place.run_at / 1e6), v_place.id)
             ORDER BY j.run_at, j.id LIMIT 1) IS NOT NULL
           OR (SELECT j.id FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j)
                 AND j.priority = v_place.priority
               AND j.promoted >= to_timestamp(v_place.promoted / 1e6) ORDER BY j.promoted
             LIMIT 1) IS NOT NULL;
        EXIT WHEN v_found;
        v_above := v_place.priority;
    END LOOP;
    RETURN v_found OR next_priority(p_queue, true, v_above) IS NOT NULL;
END $$;

-- Of these rows, which come in order, the last of each priority, with keys and without. Locks
-- nothing.
CREATE OR REPLACE FUNCTION done_of(p_rows tid[]) RETURNS claim_place[]
LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT ROW(g.keyed, g.priority, (extract(epoch FROM j.run_at) * 1000000)::bigint, j.id,
                   NULL)::claim_place
        FROM (SELECT j.serialize_key IS NOT NULL OR j.limit_key IS NOT NULL AS keyed,
                     j.priority, max(m.place) AS place
              FROM unnest(p_rows) WITH ORDINALITY AS m (ctid, place) JOIN jobs j ON j.ctid = m.ctid
              GROUP BY 1, 2) g
        JOIN jobs j ON j.ctid = p_rows[g.place])
$$;

-- Where the next claim may begin. p_places are the places before, p_starts where this one began,
-- p_done its last rows that are taken or parked, and what it has passed. It has walked priorities
-- above p_cut to the end, p_cut itself up to there, and none below. p_back: p_starts went back
-- because something had become claimable. Keeps 180 places, those of taken or parked jobs first,
-- in descending order of priority. Locks nothing.
CREATE OR REPLACE FUNCTION places_after(p_queue text, p_places claim_place[],
                                        p_starts claim_place[], p_done claim_place[], p_cut int,
                                        p_picked tid[], p_now timestamptz, p_without text[],
                                        p_back boolean) RETURNS claim_place[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now      bigint := extract(epoch FROM p_now) * 1000000;
    v_row      record;
    v_at       bigint;
    v_id       uuid;
    v_promoted bigint;
    v_from     timestamptz;
    v_until    timestamptz;
    v_places   claim_place[] := '{}';
BEGIN
    FOR v_row IN
        SELECT coalesce(o.keyed, d.keyed) AS keyed, coalesce(o.priority, d.priority) AS priority,
               o.run_at, o.id, o.promoted, s.run_at AS start_at, s.id AS start_id,
               s.promoted AS start_promoted, d.run_at AS done_at, d.id AS done_id
        FROM unnest(p_places) WITH ORDINALITY AS o (keyed, priority, run_at, id, promoted, place)
        LEFT JOIN unnest(p_starts) s ON s.keyed = o.keyed AND s.priority = o.priority
        FULL JOIN (SELECT DISTINCT ON (x.keyed, x.priority) x.* FROM unnest(p_done) x
                   ORDER BY x.keyed, x.priority, x.run_at DESC, x.id DESC) d
                       ON d.keyed = o.keyed AND d.priority = o.priority
        ORDER BY d.priority IS NULL, o.place
    LOOP
        IF v_row.priority = p_cut OR v_row.priority < p_cut AND p_back THEN
            v_at := v_row.start_at;
            v_id := v_row.start_id;
        ELSE
            v_at := v_row.run_at;
            v_id := v_row.id;
        END IF;
        IF v_at > v_now THEN  -- the clock was set back
            v_at := v_now;
            v_id := '00000000-0000-0000-0000-000000000000';
        END IF;
        IF v_row.priority >= p_cut AND v_row.done_at IS NOT NULL
           AND (v_at IS NULL OR (v_row.done_at, v_row.done_id) > (v_at, v_id)) THEN
            v_at := v_row.done_at;
            v_id := v_row.done_id;
        END IF;
        CONTINUE WHEN v_at IS NULL;
        v_from := to_timestamp(v_row.start_promoted / 1e6);
        v_until := to_timestamp(v_at / 1e6);
        v_promoted := CASE WHEN v_row.keyed THEN v_now END;
        IF v_row.keyed AND v_row.priority < p_cut THEN
            v_promoted := least(v_row.promoted, v_now);
        ELSIF v_row.keyed AND v_from IS NOT NULL THEN  -- there may be some that are not taken
            v_promoted := least(v_now, (
                SELECT (extract(epoch FROM j.promoted) * 1000000)::bigint FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority = v_row.priority
                  AND j.promoted >= v_from AND (j.run_at, j.id) <= (v_until, v_id)
                  AND j.ctid <> ALL (p_picked)
                  AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                ORDER BY j.promoted LIMIT 1));
        END IF;
        v_places := v_places || ROW(v_row.keyed, v_row.priority, v_at, v_id,
                                    v_promoted)::claim_place;
        EXIT WHEN cardinality(v_places) >= 180;
    END LOOP;
    -- as in_order() reads them
    RETURN ARRAY(SELECT p::claim_place FROM unnest(v_places) p ORDER BY p.keyed, p.priority DESC);
END $$;

-- Up to p_room due jobs in order of (priority, run_at, id), besides p_seen and the kinds
-- p_without; those with keys only if p_keyed. Begins behind p_starts, or at the head of a priority
-- that is not among them, and includes jobs that were promoted before those places; if more than
-- 64 of a priority were, in that order. `ended`: the priorities that have no more. Locks nothing.
CREATE OR REPLACE FUNCTION in_order(p_queue text, p_room int, p_keyed boolean, p_seen tid[],
                                    p_without text[], p_starts claim_place[], OUT met tid[],
                                    OUT ended int[])
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now      timestamptz := clock();
    v_above    bigint := 2147483648;
    v_priority int;
    v_room     int := p_room;
    v_probes   int := 0;
    -- the next known priority of jobs without keys, ...
    v_plain    int;
    v_keyed    int;                              -- ... and with them
    v_start    claim_place;
    v_plain_at claim_place;
    v_keyed_at claim_place;
    v_plain_from timestamptz;
    v_plain_id uuid;
    v_from     timestamptz;
    v_id       uuid;
    v_promoted timestamptz;
    v_first    tid[];                            -- before that place, promoted since
    v_careful  boolean := is_careful();
BEGIN
    met := '{}';
    ended := '{}';
    WHILE v_room > 0 AND v_probes < 1000 LOOP
        v_plain := NULL;
        v_keyed := NULL;
        FOREACH v_start IN ARRAY p_starts LOOP  -- a loop is much quicker than a query here
            IF v_start.priority >= v_above THEN
                CONTINUE;
            ELSIF v_start.keyed THEN
                v_keyed := v_start.priority;
                v_keyed_at := v_start;
                EXIT;  -- those without keys come first
            ELSIF v_plain IS NULL THEN
                v_plain := v_start.priority;
                v_plain_at := v_start;
            END IF;
        END LOOP;
        v_priority := greatest(v_plain, CASE WHEN p_keyed THEN v_keyed END,
            next_priority(p_queue, false, v_above, coalesce(v_plain, -2147483649)),
            CASE WHEN p_keyed
                 THEN next_priority(p_queue, true, v_above, coalesce(v_keyed, -2147483649)) END);
        EXIT WHEN v_priority IS NULL;
        v_plain_from := '-infinity';
        v_plain_id := '00000000-0000-0000-0000-000000000000';
        IF v_priority = v_plain THEN
            v_plain_from := to_timestamp(v_plain_at.run_at / 1e6);
            v_plain_id := v_plain_at.id;
        END IF;
        v_from := '-infinity';
        v_id := '00000000-0000-0000-0000-000000000000';
        v_promoted := NULL;
        v_first := '{}';
        IF v_priority = v_keyed THEN
            v_from := to_timestamp(v_keyed_at.run_at / 1e6);
            v_id := v_keyed_at.id;
            v_promoted := to_timestamp(v_keyed_at.promoted / 1e6);
        END IF;
        IF p_keyed AND v_promoted IS NOT NULL THEN
            v_first := ARRAY(
                SELECT j.ctid FROM jobs j
                WHERE j.queue = p_queue AND j.priority = v_priority AND waits_keyed(j)
                  AND j.run_at <= v_now
                  AND j.promoted >= v_promoted AND (j.run_at, j.id) <= (v_from, v_id)
                  AND j.ctid <> ALL (p_seen) AND in_time(j, v_now)
                  AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                  AND NOT (v_careful AND is_refused('claim', j.id::text))
                ORDER BY j.promoted, j.run_at, j.id LIMIT greatest(v_room, 64));
        END IF;
        met := met || ARRAY(
              SELECT all_lines.ctid FROM (
                  (SELECT j.ctid, j.run_at, j.id FROM jobs j
                   WHERE j.queue = p_queue AND j.priority = v_priority AND waits_plain(j)
                     AND j.run_at <= v_now
                     AND (j.run_at, j.id) > (v_plain_from, v_plain_id)
                     AND j.ctid <> ALL (p_seen) AND in_time(j, v_now)
                     AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                     AND NOT (v_careful AND is_refused('claim', j.id::text))
                   ORDER BY j.run_at, j.id LIMIT v_room)
                  UNION ALL
                  (SELECT j.ctid, j.run_at, j.id FROM jobs j
                   WHERE p_keyed AND j.queue = p_queue AND j.priority = v_priority
                     AND waits_keyed(j) AND j.run_at <= v_now
                     AND (j.run_at, j.id) > (v_from, v_id)
                     AND j.ctid <> ALL (p_seen) AND in_time(j, v_now)
                     AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                     AND NOT (v_careful AND is_refused('claim', j.id::text))
                   ORDER BY j.run_at, j.id LIMIT v_room)
                  UNION ALL
                  (SELECT j.ctid, j.run_at, j.id FROM jobs j WHERE j.ctid = ANY (v_first)
                   ORDER BY j.run_at, j.id)) all_lines
              ORDER BY all_lines.run_at, all_lines.id LIMIT v_room);
        v_above := v_priority;
        v_probes := v_probes + 1;
        v_room := p_room - cardinality(met);
        IF v_room > 0 THEN
            ended := ended || v_priority;
        END IF;
    END LOOP;
END $$;
