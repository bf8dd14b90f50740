-- Serialize keys: which job of a key may run, and who is next. A key is one of a scope: that of the
-- job's queue when it was inserted, or if that had none, the queue itself.

-- The scope of the serialize_keys of jobs that are inserted into this queue now. Locks nothing.
CREATE OR REPLACE FUNCTION scope_of(p_queue text) RETURNS text LANGUAGE sql STABLE
    RETURN coalesce((SELECT q.serialize_scope::text FROM queues q WHERE q.name = p_queue), p_queue);

-- Refuses another scope for a queue whose jobs have keys of the one before: a key must not be in
-- two. A job that is committed later, by a transaction that has not seen the new scope, gets that
-- from the claim that meets it. Locks the queue and both scopes, so that no claim goes by the old
-- one.
CREATE OR REPLACE FUNCTION queue_rescoped() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_queue text := CASE WHEN TG_OP = 'INSERT' THEN NEW.name ELSE OLD.name END;
BEGIN
    PERFORM lock_queues(array_remove(ARRAY[
        v_queue, CASE WHEN TG_OP <> 'INSERT' THEN OLD.serialize_scope END,
        CASE WHEN TG_OP <> 'DELETE' THEN NEW.serialize_scope END], NULL));
    IF EXISTS (SELECT FROM jobs j WHERE j.queue = v_queue AND j.serialize_key IS NOT NULL
                 AND j.status <> 'completed') THEN
        RAISE EXCEPTION 'queue % has jobs with a serialize_key: its serialize_scope must stay',
            v_queue
            USING ERRCODE = 'check_violation', CONSTRAINT = 'serialize_scope_must_stay_while_used',
                HINT = 'Change it when these have ended, dead ones too, or take another queue.';
    END IF;
    PERFORM set_config('pgworkd.unscoped', '', true);  -- see jobs_key_wanted()
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE OR REPLACE TRIGGER queue_scoped BEFORE INSERT ON queues FOR EACH ROW
    WHEN (NEW.serialize_scope IS NOT NULL) EXECUTE FUNCTION queue_rescoped();
CREATE OR REPLACE TRIGGER queue_rescoped BEFORE UPDATE OF serialize_scope, name ON queues
    FOR EACH ROW WHEN (NEW.serialize_scope IS DISTINCT FROM OLD.serialize_scope
                       OR NEW.name <> OLD.name AND OLD.serialize_scope IS NOT NULL)
    EXECUTE FUNCTION queue_rescoped();
CREATE OR REPLACE TRIGGER queue_unscoped BEFORE DELETE ON queues FOR EACH ROW
    WHEN (OLD.serialize_scope IS NOT NULL) EXECUTE FUNCTION queue_rescoped();

-- True if p_holds, or if no other job holds the serialize_key and no due job stands before
-- (p_run_at, p_id) in its line. A retry holds its key while it waits, unless it yields, even if
-- others have been due for longer. Locks nothing.
CREATE OR REPLACE FUNCTION key_is_free(p_scope text, p_key text, p_holds boolean,
                                       p_run_at timestamptz, p_id uuid)
RETURNS boolean LANGUAGE sql STABLE
    RETURN p_key IS NULL OR p_holds
        OR NOT EXISTS (SELECT FROM jobs h WHERE coalesce(h.serialize_scope, h.queue) = p_scope
                         AND h.serialize_key = p_key AND h.id <> p_id
                       AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields))
       AND NOT EXISTS (SELECT FROM jobs e WHERE coalesce(e.serialize_scope, e.queue) = p_scope
                       AND e.serialize_key = p_key AND e.waiting_on = 0
                       AND e.status IN ('blocked', 'pending', 'failed')
                       AND (e.run_at, e.id) < (p_run_at, p_id)
                       AND in_time(e, clock()));

-- One part of pick(): parks these jobs. Returns how many. Locks their rows.
CREATE OR REPLACE FUNCTION park(p_ids uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH parked AS (UPDATE jobs j SET status = 'blocked' WHERE j.id = ANY (p_ids) RETURNING j.id)
    SELECT all_done(p_ids, count(*)) FROM parked
$$;

-- Chooses up to p_room due jobs of a queue where keys or limits count, besides p_taken, and locks
-- them. They come in order of (priority, run_at, id), or by turns where limits per key or fairness
-- require it. A job whose serialize_key is not free is parked as `blocked`, out of the claim's
-- way, until promote(). Jobs of the kinds p_without are skipped. If very many are to be parked,
-- one claim parks some of them, and jobs without a key pass the others. `again_s`: see
-- allowance().
-- p_places, p_reach_s, p_since: where to begin, see claim(); `places`: where the next claim may
-- begin (by turns: only behind jobs without keys that are left out; without p_renew as given,
-- unless some are left out or many parked). Every waiting, due job at its place or before was
-- taken or parked, is of a kind that was left out, or has become claimable since: if by promote()
-- or move(), `promoted` has the time, which is at or behind that of the place; otherwise callers
-- are notified of a run_at, or find the job by reaching back.
-- The caller holds the queue's lock, as does whoever promotes and may wait for it: what this claim
-- does not see is promoted later than p_now. Rows are locked with SKIP LOCKED.
CREATE OR REPLACE FUNCTION pick(p_queue text, p_room int, p_taken tid[], p_now timestamptz,
                                p_without text[], p_places claim_place[], p_reach_s float8,
                                p_since float8, p_renew boolean, OUT picked tid[],
                                OUT again_s float8, OUT places claim_place[])
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queue  queues;
    v_met    tid[];
    v_take   tid[];
    v_park   tid[];
    v_stray  tid[];                              -- of another scope: see queue_rescoped()
    v_parked tid[];
    v_turns  boolean;
    v_round  boolean;                            -- this one has left out nothing
    v_further boolean := false;                  -- there are more keys than were checked at first
    v_park_max int[] := '{0,64,2000}';           -- how many jobs each round may park
    v_wait_s float8;
    v_room   int;
    v_now    timestamptz := clock();
    v_seen   tid[] := p_taken;                   -- seen before: taken, or locked
    v_rounds int := 0;
    v_starts claim_place[] := CASE WHEN p_reach_s = 0
                                   AND p_since IS NULL THEN coalesce(p_places, '{}')
                                   ELSE starts(p_places, p_reach_s, p_since) END;
    v_done   claim_place[] := '{}';              -- the last ones that are taken or parked
    v_asked  int;
    v_renew  boolean;                            -- this round determines new places
    -- priorities that this round has walked to their end
    v_ended  int[];
    -- where only kinds for other workers are left
    v_passed claim_place[] := '{}';
    -- the first one met, of v_met, that could run and is not taken
    v_stop   int;
    -- of the jobs that turns go by, if some are left out
    v_kinds  bigint[];
    v_below  int;
    -- the priority that was not walked to its end; none: the last there is
    v_cut    int := -2147483648;
    v_count  int;
BEGIN
    SELECT * INTO v_queue FROM queues q WHERE q.name = p_queue;
    v_turns := coalesce(v_queue.fair, false) OR v_queue.limit_per_key IS NOT NULL
        OR v_queue.rate_per_key IS NOT NULL;
    picked := '{}';
    IF v_turns THEN
        v_cut := 2147483647;
        v_kinds := CASE WHEN p_without <> '{}' THEN kinds_waiting(p_queue, p_without) END;
        v_starts := CASE WHEN p_without <> '{}' THEN v_starts ELSE '{}' END;
    END IF;
    LOOP
        v_room := p_room - cardinality(picked);
        IF v_turns THEN
            SELECT t.met, t.round, t.again_s, t.ended, t.cut
            INTO v_met, v_round, v_wait_s, v_ended, v_below
            FROM by_turn(v_queue, v_room, p_taken || picked, v_seen, p_now, v_further, p_without,
                         v_kinds, v_starts) t;
            again_s := least(again_s, v_wait_s);
            v_further := v_further OR NOT v_round;
        -- where one had to be parked there are more; but those without a key need not wait for all
        -- that
        ELSE
            v_round := v_rounds < cardinality(v_park_max);
            v_asked := greatest(v_room, v_park_max[v_rounds + 1]);
            SELECT o.met, o.ended INTO v_met, v_ended
            FROM in_order(p_queue, v_asked, v_round, v_seen, p_without, v_starts) o;
        END IF;
        SELECT (array_agg(y.ctid ORDER BY y.place) FILTER (WHERE y.free))[:v_room],
               array_agg(y.ctid) FILTER (WHERE NOT y.free),
               (array_agg(y.place ORDER BY y.place) FILTER (WHERE y.free))[v_room + 1],
               array_agg(y.ctid) FILTER (WHERE y.free IS NULL)
        INTO v_take, v_park, v_stop, v_stray
        FROM (SELECT x.ctid, x.place, CASE  -- of several with one key only the first is asked for
                  WHEN x.serialize_key IS NULL OR x.status = 'failed' AND NOT x.yields THEN true
                  WHEN x.scope <> coalesce(v_queue.serialize_scope, p_queue) THEN NULL
                  WHEN row_number() OVER (PARTITION BY x.scope, x.serialize_key
                                          ORDER BY x.run_at, x.id) > 1 THEN false
                  ELSE NOT EXISTS (SELECT FROM jobs h
                                   WHERE coalesce(h.serialize_scope, h.queue) = x.scope
                                   AND h.serialize_key = x.serialize_key
                                   AND (h.status = 'running' OR h.status = 'failed'
                                        AND NOT h.yields) AND h.id <> x.id)
                   AND NOT EXISTS (SELECT FROM jobs e
                                   WHERE coalesce(e.serialize_scope, e.queue) = x.scope
                                     AND e.serialize_key = x.serialize_key
                                   AND e.status IN ('blocked', 'pending', 'failed')
                                   AND e.waiting_on = 0
                                   AND (e.run_at, e.id) < (x.run_at, x.id)
                                   AND in_time(e, v_now)) END AS free
              FROM (SELECT j.ctid, m.place, coalesce(j.serialize_scope, j.queue) AS scope,
                           j.serialize_key, j.run_at, j.id, j.status, j.yields
                    FROM unnest(v_met) WITH ORDINALITY AS m (ctid, place) JOIN jobs j
                        ON j.ctid = m.ctid
                    WHERE j.status IN ('pending', 'failed')) x) y;
        IF v_turns AND p_without <> '{}' AND p_places IS NOT NULL AND v_ended IS NOT NULL THEN
            v_cut := v_below;
            v_passed := ARRAY(
                SELECT ROW(false, e.priority, (extract(epoch FROM p_now) * 1000000)::bigint
                           - 1000000, '00000000-0000-0000-0000-000000000000', NULL)::claim_place
                FROM unnest(v_ended) AS e (priority));
        END IF;
        v_renew := v_round AND NOT v_turns AND p_places IS NOT NULL
            AND (p_renew OR v_rounds > 0 OR p_without <> '{}') OR v_renew;
        IF v_round AND v_renew THEN
            v_done := v_done || done_of(v_met[:coalesce(v_stop - 1, cardinality(v_met))]);
            v_cut := CASE WHEN v_stop IS NOT NULL OR cardinality(v_met) >= v_asked
                          THEN coalesce((SELECT j.priority FROM jobs j
                                         WHERE j.ctid = v_met[coalesce(v_stop, v_asked)]),
                                             2147483647)
                          ELSE -2147483648 END;
            -- with keys or without: up to a second ago, for what is due since then may not be
            -- committed yet
            IF p_without <> '{}' THEN
                v_passed := ARRAY(
                    SELECT ROW(k.keyed, p.priority, p.run_at, p.id, NULL)::claim_place
                    FROM (SELECT d.priority, d.run_at, d.id FROM unnest(v_done) d
                          UNION ALL
                          SELECT e.priority, (extract(epoch FROM p_now) * 1000000)::bigint
                              - 1000000, '00000000-0000-0000-0000-000000000000'
                          FROM unnest(v_ended) AS e (priority) WHERE e.priority > v_cut) p,
                         (VALUES (false), (true)) AS k (keyed));
            END IF;
        END IF;
        picked := picked || ARRAY(
            SELECT j.ctid FROM unnest(v_take) WITH ORDINALITY AS m (ctid, place) JOIN jobs j
                ON j.ctid = m.ctid
            WHERE j.status IN ('pending', 'failed') ORDER BY m.place FOR UPDATE OF j SKIP LOCKED);
        v_parked := ARRAY(
            SELECT j.ctid FROM unnest(v_park) AS m (ctid) JOIN jobs j ON j.ctid = m.ctid
            WHERE j.status IN ('pending', 'failed') FOR UPDATE OF j SKIP LOCKED);
        IF is_careful() AND v_parked <> '{}' THEN
            PERFORM in_parts('claim', ARRAY(SELECT j.id::text FROM jobs j
                                            WHERE j.ctid = ANY (v_parked)), 'park(uuid[])');
        ELSE
            UPDATE jobs j SET status = 'blocked' WHERE j.ctid = ANY (v_parked);
            GET DIAGNOSTICS v_count = ROW_COUNT;
            IF v_count < cardinality(v_parked) THEN
                PERFORM raise_kept();
            END IF;
        END IF;
        -- Neither taken nor locked rows must be read again. (Parked ones are not: each row read is
        -- compared with all of these.)
        IF v_stray IS NOT NULL THEN
            UPDATE jobs j
            SET serialize_scope = v_queue.serialize_scope, promoted = clock_after_waiting()
            WHERE j.ctid = ANY (ARRAY(SELECT s.ctid FROM jobs s WHERE s.ctid = ANY (v_stray)
                                      FOR UPDATE SKIP LOCKED));
        END IF;
        v_seen := v_seen || v_take || ARRAY(SELECT unnest(v_park) EXCEPT SELECT unnest(v_parked));
        EXIT WHEN cardinality(picked) >= p_room OR cardinality(v_met) = 0 AND v_round;
        v_rounds := v_rounds + 1;
        -- enough for one claim
        IF v_rounds >= 10 OR NOT v_turns AND v_rounds > cardinality(v_park_max) THEN
            again_s := least(again_s, 0.02);
            EXIT;
        END IF;
    END LOOP;
    -- places of jobs without keys only, and of those for other workers
    IF v_turns AND p_places IS NOT NULL THEN
        p_places := CASE
            WHEN p_without <> '{}'
                THEN ARRAY(SELECT p::claim_place FROM unnest(p_places) p WHERE NOT p.keyed)
            ELSE '{}' END;
        v_renew := p_without <> '{}';
    END IF;
    places := CASE WHEN v_renew IS NOT TRUE THEN p_places
                   ELSE places_after(p_queue, p_places, v_starts, v_done || v_passed, v_cut, picked,
                                     p_now, p_without, p_since IS NOT NULL) END;
END $$;

-- Makes the first of the jobs blocked by each of these keys claimable again, unless another job
-- holds the key. Called by whoever has freed keys, or taken a job out of a line. p_queues and
-- p_keys are parallel; p_queues: the scopes of the keys. Locks these, in order, then one blocked
-- job per key with SKIP LOCKED: if the first is locked, no other passes it, and the key is left to
-- apply_effects(). A caller that must not wait locks no queue; jobs that a claim parks at that
-- moment are found by apply_effects(). (CASE keeps the planner off the index on all blocked jobs.
-- Whether a key is held is looked up once for each, inside: a join would read all holders there
-- are.)
CREATE OR REPLACE FUNCTION promote(p_queues text[], p_keys text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queues text[];
    v_keys   text[];
    v_wake   text[];
BEGIN
    PERFORM lock_queues(p_queues);
    IF no_wait() THEN
        PERFORM put_off(NULL, p_queues => p_queues, p_keys => p_keys);
    END IF;
    WITH first AS MATERIALIZED (
        SELECT k.queue, k.key,
               (SELECT b.ctid FROM jobs b
                WHERE coalesce(b.serialize_scope, b.queue) = k.queue AND b.serialize_key = k.key
                  AND b.status IN ('blocked', 'pending', 'failed') AND b.waiting_on = 0
                  AND CASE WHEN b.status = 'blocked' THEN in_time(b, clock()) ELSE false END
                  AND NOT EXISTS (SELECT FROM jobs h
                                  WHERE coalesce(h.serialize_scope, h.queue) = k.queue
                                    AND h.serialize_key = k.key
                                  AND (h.status = 'running' OR h.status = 'failed'
                                       AND NOT h.yields))
                ORDER BY b.run_at, b.id LIMIT 1) AS row
        FROM (SELECT DISTINCT u.queue, u.key FROM unnest(p_queues, p_keys) AS u (queue, key)) k
    ), ours AS MATERIALIZED (
        SELECT b.ctid AS row FROM jobs b WHERE b.ctid = ANY (ARRAY(SELECT f.row FROM first f))
        FOR UPDATE SKIP LOCKED
    ), moved AS (
        -- for the queue: see pick()
        UPDATE jobs j SET status = 'pending', promoted = clock_after_waiting()
        WHERE j.ctid = ANY (ARRAY(SELECT o.row FROM ours o))
        RETURNING j.queue::text, j.serialize_scope
    )
    SELECT array_agg(f.queue), array_agg(f.key),
           (SELECT array_agg(m.queue) FROM moved m WHERE m.serialize_scope IS NOT NULL)
    INTO v_queues, v_keys, v_wake
    FROM first f WHERE f.row IS NOT NULL AND f.row <> ALL (ARRAY(SELECT o.row FROM ours o));
    IF v_keys IS NOT NULL AND NOT no_wait() THEN
        PERFORM put_off(NULL, p_queues => v_queues, p_keys => v_keys);
    END IF;
    PERFORM wake(p_queues || v_wake);
END $$;
