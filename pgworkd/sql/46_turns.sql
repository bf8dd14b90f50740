-- Turns: limit_keys of a queue with `fair`, or with limits per key, are served one after another.

-- The kinds of the waiting jobs with a limit_key, except p_without, by their hashes; NULL: there
-- are too many. Locks nothing.
CREATE OR REPLACE FUNCTION kinds_waiting(p_queue text, p_without text[]) RETURNS bigint[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_without bigint[] := ARRAY(SELECT hashtextextended(u.kind, 0)
                                FROM unnest(p_without) AS u (kind));
    v_kind    bigint;
    v_kinds   bigint[] := '{}';
BEGIN
    FOR i IN 1..200 LOOP
        v_kind := (SELECT min(hashtextextended(coalesce(j.kind, j.queue)::text, 0)) FROM jobs j
                   WHERE j.queue = p_queue AND waits_keyed(j) AND j.limit_key IS NOT NULL
                     AND hashtextextended(coalesce(j.kind, j.queue)::text, 0)
                         > coalesce(v_kind, -9223372036854775808));
        IF v_kind IS NULL THEN
            RETURN v_kinds;
        END IF;
        IF v_kind <> ALL (v_without) THEN
            v_kinds := v_kinds || v_kind;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- Up to p_room due jobs of one limit_key ('': those with only a serialize_key), besides p_seen and
-- the kinds p_without, in order of (priority, run_at, id). p_kinds: as kinds_waiting() returns
-- them. Locks nothing.
CREATE OR REPLACE FUNCTION of_key(p_queue text, p_key text, p_room int, p_seen tid[],
                                  p_without text[], p_kinds bigint[])
RETURNS tid[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_now      timestamptz := clock();
    v_rows     tid[] := '{}';
    v_above    bigint := 2147483648;
    v_priority int;
    v_probes   int := 0;
    v_each     tid[];                            -- of each kind, the first ones
    v_careful  boolean := is_careful();
BEGIN
    WHILE cardinality(v_rows) < p_room AND v_probes < 100 LOOP
        IF p_kinds IS NULL OR p_key = '' THEN
            v_priority := (
                SELECT max(j.priority) FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j)
                  AND coalesce(j.limit_key::text, '') = p_key
                  AND j.priority < v_above);
            EXIT WHEN v_priority IS NULL;
            v_rows := v_rows || ARRAY(
                SELECT j.ctid FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j)
                  AND coalesce(j.limit_key::text, '') = p_key
                  AND j.priority = v_priority AND j.run_at <= v_now AND j.ctid <> ALL (p_seen)
                  AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                  AND NOT (v_careful AND is_refused('claim', j.id::text))
                ORDER BY j.run_at, j.id LIMIT p_room - cardinality(v_rows));
        ELSE
            v_priority := (
                SELECT max(k.priority)
                FROM unnest(p_kinds) AS u (kind),
                     LATERAL (SELECT j.priority FROM jobs j
                              WHERE j.queue = p_queue AND waits_keyed(j)
                                AND hashtextextended(coalesce(j.kind, j.queue)::text, 0) = u.kind
                                AND j.limit_key = p_key AND - j.priority::bigint > - v_above
                              ORDER BY - j.priority::bigint LIMIT 1) k);
            EXIT WHEN v_priority IS NULL;
            v_each := ARRAY(
                SELECT k.ctid
                FROM unnest(p_kinds) AS u (kind),
                     LATERAL (SELECT j.ctid FROM jobs j
                              WHERE j.queue = p_queue AND waits_keyed(j)
                                AND hashtextextended(coalesce(j.kind, j.queue)::text, 0) = u.kind
                                AND j.limit_key = p_key
                                AND - j.priority::bigint = - v_priority::bigint
                                AND j.run_at <= v_now AND j.ctid <> ALL (p_seen)
                                AND in_time(j, v_now)
                                AND NOT (v_careful AND is_refused('claim', j.id::text))
                              ORDER BY j.run_at, j.id LIMIT p_room - cardinality(v_rows)) k);
            v_rows := v_rows || ARRAY(
                SELECT j.ctid FROM jobs j WHERE j.ctid = ANY (v_each)
                ORDER BY j.run_at, j.id LIMIT p_room - cardinality(v_rows));
        END IF;
        v_above := v_priority;
        v_probes := v_probes + 1;
    END LOOP;
    RETURN v_rows;
END $$;

-- Of the limit_keys after p_after, in rotation, those that have a due job; '' stands for the jobs
-- without a limit_key and is always among them. `firsts`: the job that of_key() would return first
-- for each, besides p_seen; NULL: not known. Checks up to p_looks keys, `reached` is the last of
-- them; `round`: all have been checked. Jobs of the kinds p_without do not count; with p_kinds, as
-- kinds_waiting() returns them, keys with only such jobs are not visited. Locks nothing.
CREATE OR REPLACE FUNCTION next_keys(p_queue text, p_after text, p_looks int, p_now timestamptz,
                                     p_seen tid[], p_without text[], p_kinds bigint[],
                                     OUT keys text[], OUT firsts tid[], OUT reached text,
                                     OUT round boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_key      text := p_after;
    v_priority int;                              -- of the first job of that key, due or not
    v_run_at   timestamptz;
    v_row      tid;                              -- it, if it is to be taken first
    v_due      boolean;
    v_wrapped  boolean := false;
    v_careful  boolean := is_careful();
BEGIN
    keys := '{}';
    firsts := '{}';
    reached := p_after;
    FOR i IN 1..p_looks LOOP
        IF p_kinds IS NULL THEN
            SELECT coalesce(j.limit_key::text, ''), j.priority, j.run_at,
                   CASE WHEN j.run_at <= p_now AND in_time(j, p_now) AND j.ctid <> ALL (p_seen)
                             AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                             AND NOT (v_careful AND is_refused('claim', j.id::text))
                        THEN j.ctid END
            INTO v_key, v_priority, v_run_at, v_row FROM jobs j
            WHERE j.queue = p_queue AND waits_keyed(j) AND coalesce(j.limit_key::text, '') > v_key
            ORDER BY j.queue, coalesce(j.limit_key::text, ''), j.priority DESC, j.run_at, j.id
            LIMIT 1;
        ELSE
            v_key := (
                SELECT min(k.key)
                FROM unnest(p_kinds) AS u (kind),
                     LATERAL (SELECT j.limit_key::text AS key FROM jobs j
                              WHERE j.queue = p_queue AND waits_keyed(j)
                                AND hashtextextended(coalesce(j.kind, j.queue)::text, 0) = u.kind
                                AND j.limit_key > v_key
                              ORDER BY j.limit_key LIMIT 1) k);
        END IF;
        IF v_key IS NULL AND NOT v_wrapped THEN  -- behind the last key comes '', then the first
            v_wrapped := true;
            v_key := '';
        END IF;
        round := v_key IS NULL OR v_wrapped AND v_key > p_after;
        EXIT WHEN round;
        reached := v_key;
        v_due := v_key = '' OR p_without = '{}' AND v_run_at <= p_now
            OR (p_without <> '{}' OR EXISTS (SELECT FROM jobs j
                                             WHERE j.queue = p_queue AND waits_keyed(j)
                                             AND coalesce(j.limit_key::text, '') = v_key
                                             AND j.priority < v_priority))
               AND cardinality(of_key(p_queue, v_key, 1, '{}', p_without, p_kinds)) > 0;
        IF v_due THEN
            keys := keys || v_key;
            firsts := firsts || v_row;
        END IF;
    END LOOP;
END $$;

-- The limit_keys of the first p_most due jobs with keys, in order of (priority, run_at, id), and
-- ''. `complete`: no other key has a due job. Jobs of the kinds p_without are left out afterwards,
-- so that they cost no more. Locks nothing.
CREATE OR REPLACE FUNCTION due_keys(p_queue text, p_most int, p_now timestamptz, p_without text[],
                                    OUT keys text[], OUT complete boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_found    text[] := '{}';
    v_above    bigint := 2147483648;
    v_priority int;
    v_probes   int := 0;
BEGIN
    LOOP
        v_priority := (SELECT max(j.priority) FROM jobs j
                       WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority < v_above);
        complete := v_priority IS NULL;
        EXIT WHEN complete OR v_probes >= 100 OR cardinality(v_found) >= p_most;
        v_found := v_found || ARRAY(
            SELECT CASE WHEN coalesce(j.kind, j.queue)::text <> ALL (p_without)
                        THEN coalesce(j.limit_key::text, '') END FROM jobs j
            WHERE j.queue = p_queue AND j.priority = v_priority AND waits_keyed(j)
              AND j.run_at <= p_now
            ORDER BY j.run_at, j.id LIMIT p_most - cardinality(v_found));
        v_above := v_priority;
        v_probes := v_probes + 1;
    END LOOP;
    complete := complete AND cardinality(v_found) < p_most;
    keys := ARRAY(SELECT DISTINCT u.key FROM unnest(v_found || ''::text) AS u (key)
                  WHERE u.key IS NOT NULL);
END $$;

-- Up to p_room due jobs besides p_seen such that limit_keys take turns: equal shares for the next
-- keys after the one served last, each within its own limits, against which p_taken count. Jobs
-- without a limit_key count as one more key. It checks the next few keys; p_further, if those did
-- not give enough: the keys of the jobs that have been due for longest, which are all due jobs
-- unless those are many. Then it also searches, from where the claim before has got to
-- (`searched`), for keys that have a due job behind those, and serves them first: no key starves.
-- `round`: no key was left out; `again_s`: when a rate will allow the next start. Among the jobs
-- without keys it begins behind p_starts; `ended` and `cut`: what it has walked of their
-- priorities, see in_order() and places_after(); NULL: nothing. The caller holds the queue's lock.
-- Locks the queue's row in `rates`, which stores the turn.
CREATE OR REPLACE FUNCTION by_turn(p_queue queues, p_room int, p_taken tid[], p_seen tid[],
                                   p_now timestamptz, p_further boolean, p_without text[],
                                   p_kinds bigint[], p_starts claim_place[], OUT met tid[],
                                   OUT round boolean, OUT again_s float8, OUT ended int[],
                                   OUT cut int)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_turn     text;
    v_searched text;
    v_most     int := least(greatest(p_room, 15), 1000) + 1;  -- '' may have no job
    v_found    record;
    v_first    text[] := '{}';                   -- to be served before all others
    -- the next in turn; '' stands for the jobs without a limit_key
    v_keys     text[];
    v_key      text;
    v_firsts   tid[];                            -- of v_first and v_keys, as far as known
    v_place    int := 0;
    v_running  int := 0;
    v_taken    jsonb := '{}';                    -- how many this claim has taken before, by key
    v_allowed  record;
    v_room     int;
    v_share    int;
    v_before   int;
    v_plain    tid[];
    v_both     tid[];
    v_cut      int;
BEGIN
    SELECT r.turn, r.searched INTO v_turn, v_searched FROM rates r
    WHERE r.queue = p_queue.name AND r.limit_key = '';
    v_turn := coalesce(v_turn, '');
    IF NOT p_further THEN
        SELECT n.keys, n.firsts, n.round INTO v_keys, v_firsts, round
        FROM next_keys(p_queue.name, v_turn, v_most, p_now, p_seen, p_without, p_kinds) n;
    ELSE
        SELECT d.keys, d.complete INTO v_keys, round
        FROM due_keys(p_queue.name, 500 + cardinality(p_seen), p_now, p_without) d;
        IF NOT round THEN
            SELECT * INTO v_found
            FROM next_keys(p_queue.name, coalesce(v_searched, v_turn), 100, p_now, p_seen,
                           p_without, p_kinds);
            v_first := v_found.keys[:(p_room + 1) / 2];
            v_firsts := v_found.firsts[:(p_room + 1) / 2];
            v_searched := CASE WHEN v_first = v_found.keys THEN v_found.reached
                               ELSE v_first[cardinality(v_first)] END;
        END IF;
        v_keys := ARRAY(SELECT u.key FROM unnest(v_keys) AS u (key) WHERE u.key <> ALL (v_first)
                        ORDER BY u.key <= v_turn, u.key LIMIT v_most + 1);
        round := round AND cardinality(v_keys) <= v_most;
        v_keys := v_keys[:v_most];
    END IF;
    IF cardinality(p_taken) > 0 THEN
        v_taken := (SELECT coalesce(jsonb_object_agg(t.key, t.n), '{}')
                    FROM (SELECT j.limit_key::text AS key, count(*) AS n FROM jobs j
                          WHERE j.ctid = ANY (p_taken) AND j.limit_key IS NOT NULL GROUP BY 1) t);
    END IF;
    met := '{}';
    v_share := ceil(p_room::float8 / nullif(cardinality(v_first || v_keys), 0));
    FOREACH v_key IN ARRAY v_first || v_keys LOOP
        v_place := v_place + 1;
        IF p_queue.limit_per_key IS NOT NULL AND v_key <> '' THEN
            v_running := (SELECT count(*) FROM jobs j
                          WHERE j.queue = p_queue.name AND j.limit_key = v_key
                            AND j.status = 'running');
        END IF;
        v_allowed := key_allowance(p_queue, v_key, v_running,
                                   coalesce((v_taken ->> v_key)::int, 0), p_now);
        v_before := cardinality(met);
        v_room := least(v_share, v_allowed.room, p_room - v_before);
        IF v_key = '' THEN  -- without any key, and with a serialize_key alone, in their order
            SELECT o.met, o.ended INTO v_plain, ended
            FROM in_order(p_queue.name, v_room, false, p_seen, p_without, p_starts) o;
            v_both := ARRAY(
                SELECT j.ctid FROM jobs j
                WHERE j.ctid = ANY (v_plain || of_key(p_queue.name, '', v_room, p_seen, p_without,
                                                      p_kinds))
                ORDER BY j.priority DESC, j.run_at, j.id LIMIT v_room);
            met := met || v_both;
            v_cut := (SELECT max(j.priority) FROM jobs j  -- the first that is left
                      WHERE j.ctid = ANY (v_plain) AND j.ctid <> ALL (v_both));
            v_cut := coalesce(v_cut, CASE WHEN cardinality(v_plain) >= v_room
                                          THEN coalesce((SELECT j.priority FROM jobs j
                                                         WHERE j.ctid = v_plain[v_room]),
                                                        2147483647)
                                          ELSE -2147483648 END);
            ended := ARRAY(SELECT u.priority FROM unnest(ended) AS u (priority)
                           WHERE u.priority > v_cut OR v_cut = -2147483648);
            cut := v_cut;
        ELSIF v_room = 1 AND v_firsts[v_place] IS NOT NULL THEN
            met := met || v_firsts[v_place];
        ELSIF v_room > 0 THEN
            met := met || of_key(p_queue.name, v_key, v_room, p_seen, p_without, p_kinds);
        END IF;
        -- it is the rate that holds the next one back
        IF cardinality(met) - v_before >= v_allowed.room THEN
            again_s := least(again_s, v_allowed.again_s);
        END IF;
        IF v_key <> ALL (v_first) THEN
            v_turn := v_key;
        END IF;
        EXIT WHEN cardinality(met) >= p_room;
    END LOOP;
    INSERT INTO rates AS r (queue, turn, searched) VALUES (p_queue.name, v_turn, v_searched)
    ON CONFLICT (queue, limit_key) DO UPDATE SET turn = excluded.turn, searched = excluded.searched
    WHERE (r.turn, r.searched) IS DISTINCT FROM (excluded.turn, excluded.searched);
END $$;
