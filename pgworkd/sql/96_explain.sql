-- Why a job does not run. Each function here only reads, so that it may be asked on a standby.

-- The job that this one stands behind for its serialize_key: the one that holds the key or, if none
-- does, the first in its line. NULL: none. Locks nothing.
CREATE OR REPLACE FUNCTION before_in_line(p_job jobs) RETURNS uuid LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        (SELECT h.id FROM jobs h
         WHERE coalesce(h.serialize_scope, h.queue) = coalesce(p_job.serialize_scope, p_job.queue)
           AND h.serialize_key = p_job.serialize_key AND h.id <> p_job.id
           AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields)),
        (SELECT e.id FROM jobs e
         WHERE coalesce(e.serialize_scope, e.queue) = coalesce(p_job.serialize_scope, p_job.queue)
           AND e.serialize_key = p_job.serialize_key AND e.waiting_on = 0
           AND e.status IN ('blocked', 'pending', 'failed')
           AND (e.run_at, e.id) < (p_job.run_at, p_job.id) AND in_time(e, clock())
         ORDER BY e.run_at, e.id LIMIT 1))
$$;

-- The workers that could claim jobs of this kind and queue now: how many serve the queue, know the
-- kind, and run no suspect, with their slots for it; `kinds`: all that they know, NULL: any. Locks
-- nothing.
CREATE OR REPLACE FUNCTION who_could_run(p_queue text, p_kind text, p_now timestamptz,
                                         OUT workers int, OUT knowing int, OUT slots int,
                                         OUT free int, OUT unsuspected int, OUT suspects uuid[],
                                         OUT kinds text[])
LANGUAGE sql STABLE AS $$
    WITH live AS MATERIALIZED (
        SELECT p.concurrency AS slots, w.kinds, w.kinds IS NULL OR p_kind = ANY (w.kinds) AS knows,
               (SELECT count(*) FROM jobs j WHERE j.status = 'running' AND j.worker_id = w.id
                                              AND j.queue = p_queue) AS busy,
               (SELECT j.id FROM jobs j WHERE j.status = 'running' AND j.worker_id = w.id
                                          AND j.losses > 1 LIMIT 1) AS suspect
        FROM known_pools() p JOIN workers w ON w.id = p.worker_id
        WHERE p.queue = p_queue AND w.state = 'running' AND w.requested IS NULL
          AND w.lost_at IS NULL AND w.lease_until > p_now
    )
    SELECT CASE WHEN NOT pg_is_in_recovery() THEN count(*) END,  -- a standby knows of no pools
           count(*) FILTER (WHERE l.knows), sum(l.slots) FILTER (WHERE l.knows),
           coalesce(sum(greatest(l.slots - l.busy, 0)) FILTER (WHERE l.knows), 0),
           count(*) FILTER (WHERE l.knows AND l.suspect IS NULL),
           array_agg(l.suspect) FILTER (WHERE l.knows AND l.suspect IS NOT NULL),
           CASE WHEN NOT bool_or(l.kinds IS NULL)
                THEN ARRAY(SELECT k.kind FROM live v, unnest(v.kinds) AS k (kind)) END
    FROM live l
$$;

-- The place of a due job among those that claims of one job each take from its queue, from 1, by
-- priority or by turns: see by_turn(). NULL: behind the first 1000 of its class, behind others of
-- its limit_key, of which p_of_key more may start (NULL: any), or a suspect behind another one.
-- p_suspects: some worker may run one; p_kinds: those that some worker knows, NULL: any. Locks
-- nothing.
CREATE OR REPLACE FUNCTION place_of(p_job jobs, p_queue queues, p_of_key int, p_suspects boolean,
                                    p_kinds text[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_turns boolean := coalesce(p_queue.fair OR p_queue.limit_per_key IS NOT NULL
                                OR p_queue.rate_per_key IS NOT NULL, false);
    v_turn  text := coalesce((SELECT r.turn FROM rates r
                              WHERE r.queue = p_job.queue AND r.limit_key = ''), '');
BEGIN
    RETURN (
    WITH due AS MATERIALIZED (
        (SELECT j.*, 1 AS class FROM jobs j
         WHERE j.queue = p_job.queue AND waits_plain(j) AND j.run_at <= p_now
           AND in_time(j, p_now)
         ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1000)
        UNION ALL
        (SELECT j.*, 1 FROM jobs j
         WHERE j.queue = p_job.queue AND waits_keyed(j) AND j.run_at <= p_now
           AND in_time(j, p_now)
         ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1000)
        UNION ALL
        (SELECT j.*, 0 FROM jobs j
         WHERE p_suspects AND j.queue = p_job.queue AND waits_suspect(j) AND j.run_at <= p_now
           AND in_time(j, p_now)
         ORDER BY j.priority DESC, j.run_at, j.id LIMIT 100)
    ), free AS (
        SELECT d.id, coalesce(d.limit_key::text, '') AS key, d.class, d.priority, d.run_at
        FROM due d
        WHERE key_is_free(coalesce(d.serialize_scope, d.queue), d.serialize_key,
                          d.status = 'failed' AND NOT d.yields, d.run_at, d.id)
          AND (p_kinds IS NULL OR coalesce(d.kind, d.queue)::text = ANY (p_kinds)
               OR d.id = p_job.id)
          AND (d.id = p_job.id OR pg_is_in_recovery() OR NOT is_refused('claim', d.id::text))
    ), keys AS (
        SELECT f.key, CASE WHEN f.key = coalesce(p_job.limit_key::text, '')
                           THEN coalesce(p_of_key, 1000000)
                           ELSE (SELECT l.room FROM key_left(p_queue, f.key, (
                               SELECT count(*) FROM jobs j
                               WHERE j.status = 'running' AND j.queue = p_queue.name
                                 AND j.limit_key = f.key)::int, 0, p_now) l) END AS room
        FROM (SELECT DISTINCT f.key FROM free f) f
    ), counted AS (
        SELECT f.*, k.room,
               row_number() OVER (PARTITION BY f.key, f.class
                                  ORDER BY f.priority DESC, f.run_at, f.id) AS turn,
               row_number() OVER (PARTITION BY f.key
                                  ORDER BY f.class, f.priority DESC, f.run_at, f.id) AS nth,
               row_number() OVER (PARTITION BY f.class
                                  ORDER BY f.priority DESC, f.run_at, f.id) AS nth_of_class
        FROM free f JOIN keys k ON k.key = f.key
        WHERE k.room > 0
    )
    SELECT o.place FROM (
        SELECT c.id, row_number() OVER (
            ORDER BY c.class, CASE WHEN v_turns THEN c.turn END,
                     CASE WHEN v_turns THEN c.key <= v_turn END, CASE WHEN v_turns THEN c.key END,
                     c.priority DESC, c.run_at, c.id) AS place
        FROM counted c WHERE c.nth <= c.room AND (c.class = 1 OR c.nth_of_class = 1)) o
    WHERE o.id = p_job.id);
END $$;

-- A name as one word of a command line.
CREATE OR REPLACE FUNCTION in_shell(p_name text) RETURNS text LANGUAGE sql IMMUTABLE
    RETURN CASE WHEN p_name ~ '^[A-Za-z0-9_.@:/+-]+$' THEN p_name
                ELSE '''' || replace(p_name, '''', '''"''"''') || '''' END;

-- What keeps a job from running by its own state, its line and its queue's pause, as explain() says
-- it, in the order in which claim_one() names the first. Locks nothing.
CREATE OR REPLACE FUNCTION held_back(p_job jobs, p_queue queues, p_now timestamptz)
RETURNS TABLE (reason text, says text, ends text, ends_at timestamptz, jobs uuid[])
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_worker record;                             -- that runs it
    v_before uuid;
    v_holds  boolean;                            -- that one has the key
BEGIN
    IF p_job.status = 'running' THEN
        SELECT w.name, w.kind, w.kind <> 'standing' AND (w.lost_at IS NOT NULL
                                                         OR w.lease_until < p_now) AS lost,
               w.lease_until INTO v_worker FROM workers w WHERE w.id = p_job.worker_id;
        IF v_worker.lost THEN
            RETURN QUERY VALUES (
                'lost', format('it runs at worker %s, which does not renew its lease',
                               v_worker.name),
                'a daemon that takes it back', v_worker.lease_until::timestamptz, NULL::uuid[]);
        ELSIF v_worker.kind = 'standing' AND v_worker.name = 'push' THEN
            RETURN QUERY VALUES ('callback', 'its endpoint has it, and has not called back yet',
                                 'the callback, or: pgworkd cancel ' || p_job.id,
                                 p_job.lease_until::timestamptz, NULL::uuid[]);
        ELSE
            RETURN QUERY VALUES ('running', format('it runs at worker %s', v_worker.name),
                                 'its end, or: pgworkd cancel ' || p_job.id,
                                 p_job.lease_until::timestamptz, NULL::uuid[]);
        END IF;
        RETURN;
    ELSIF p_job.status = 'dead' THEN
        RETURN QUERY VALUES ('dead', 'it is dead: ' || coalesce(p_job.error, 'without an error'),
                             'pgworkd retry ' || p_job.id, NULL::timestamptz, NULL::uuid[]);
        RETURN;
    END IF;
    IF NOT in_time(p_job, p_now) THEN
        RETURN QUERY VALUES ('expired', 'its expires_at has passed before it began',
                             'nothing: enqueue a new job', NULL::timestamptz, NULL::uuid[]);
    END IF;
    IF p_job.run_at > p_now AND p_job.status <> 'blocked' THEN
        RETURN QUERY VALUES (
            CASE p_job.status WHEN 'failed' THEN 'retry' ELSE 'future' END,
            CASE p_job.status WHEN 'failed' THEN 'it waits for its retry: ' || p_job.error
                              ELSE 'it is not due yet' END,
            'its run_at', p_job.run_at::timestamptz, NULL::uuid[]);
    END IF;
    IF p_queue.paused_until > p_now THEN
        RETURN QUERY
        SELECT 'paused', coalesce((
                   SELECT format('its queue is paused with the endpoint %s: %s', e.name,
                                 coalesce(e.disabled_why, e.paused_why))
                   FROM endpoints e
                   WHERE e.name = p_queue.endpoint
                     AND (e.disabled_at IS NOT NULL OR e.paused_until >= p_queue.paused_until)),
                   'its queue is paused'),
               'pgworkd resume ' || in_shell(p_job.queue), p_queue.paused_until::timestamptz,
               NULL::uuid[];
    END IF;
    IF p_job.waiting_on > 0 THEN
        RETURN QUERY
        SELECT 'dependency', b.reason,
               CASE WHEN b.stuck_on IS NULL THEN 'the end of these jobs'
                    WHEN EXISTS (SELECT FROM jobs d WHERE d.id = b.stuck_on AND d.status = 'dead')
                        THEN format('pgworkd retry %s, or: pgworkd undepend %s', b.stuck_on,
                                    p_job.id)
                    ELSE format('pgworkd undepend %s, or: pgworkd cancel %1$s', p_job.id) END,
               NULL::timestamptz,
               ARRAY(SELECT d.depends_on FROM job_dependencies d WHERE d.job_id = p_job.id
                     ORDER BY d.depends_on LIMIT 10)
        FROM blocked_jobs b WHERE b.id = p_job.id;
    ELSIF p_job.status <> 'failed' OR p_job.yields THEN
        v_before := before_in_line(p_job);
        SELECT h.status = 'running' OR h.status = 'failed' AND NOT h.yields INTO v_holds
        FROM jobs h WHERE h.id = v_before;
        IF v_before IS NOT NULL THEN
            RETURN QUERY VALUES (
                'key', format('job %s %s its serialize_key', v_before, CASE
                    WHEN v_holds THEN 'holds' ELSE 'is before it in the line of' END),
                'the end of that job', NULL::timestamptz, ARRAY[v_before]);
        ELSIF p_job.status = 'blocked' THEN
            RETURN QUERY VALUES (
                'unblocking', 'it is blocked, though nothing holds its serialize_key any more',
                'a daemon, within a minute', NULL::timestamptz, NULL::uuid[]);
        END IF;
    END IF;
END $$;

-- What keeps a job from running: each row is a reason that is enough by itself, in plain words, and
-- what ends it; `ends_at`: when, where that is known; `jobs`: for which it waits, ten at most. A
-- job that the next claim takes has no row, and an unknown one neither. `order` is exact where jobs
-- start by priority; by turns, and beside suspects, it depends on how many a claim takes. Not seen:
-- a lock that another session holds on the job's row, as the transaction does in which a job with
-- transaction=True runs. Locks nothing.
CREATE OR REPLACE FUNCTION explain(p_id uuid)
RETURNS TABLE (reason text, says text, ends text, ends_at timestamptz, jobs uuid[])
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz := clock();
    v_job     jobs;
    v_queue   queues;
    v_kind    text;
    v_waits   boolean;
    v_held    text[] := '{}';
    v_who     record;
    v_most    int;                               -- of all and of its key that may still start
    v_of_key  int;
    v_running int;
    v_same    int;                               -- that run, of its limit_key
    v_rate    record;
    v_key     record;
    v_place   bigint;
    v_refused refused_rows;
BEGIN
    SELECT * INTO v_job FROM jobs j WHERE j.id = p_id AND j.status <> 'completed';
    IF v_job.id IS NULL THEN
        RETURN QUERY
        SELECT 'ended', CASE f.status WHEN 'completed' THEN 'it has completed'
                                      WHEN 'expired' THEN 'it expired before it could begin'
                                      WHEN 'dead' THEN 'it was dead, and is in the history'
                                      ELSE 'it was ' || f.status END,
               'nothing: enqueue a new job', NULL::timestamptz, NULL::uuid[]
        FROM finished_of(ARRAY[p_id]) f;
        RETURN;
    END IF;
    v_kind := coalesce(v_job.kind, v_job.queue);
    v_waits := v_job.status IN ('pending', 'failed', 'blocked');
    SELECT * INTO v_queue FROM queues q WHERE q.name = v_job.queue;
    FOR reason, says, ends, ends_at, jobs IN SELECT h.* FROM held_back(v_job, v_queue, v_now) h LOOP
        v_held := v_held || reason;
        RETURN NEXT;
    END LOOP;
    IF NOT v_waits THEN
        RETURN;
    END IF;
    IF NOT pg_is_in_recovery() THEN  -- a standby has no row of an unlogged table
        SELECT * INTO v_refused FROM refused_rows r
        WHERE r.what = 'claim' AND r.key = p_id::text AND r.until > v_now;
    END IF;
    v_who := who_could_run(v_job.queue, v_kind, v_now);
    IF v_queue.max_running IS NOT NULL THEN
        v_running := running_in(v_job.queue);
    END IF;
    v_rate := rate_left(v_job.queue, '', v_queue.rate, v_queue.rate_period_s, v_queue.rate_burst,
                        v_now);
    IF v_job.limit_key IS NOT NULL THEN
        v_same := (SELECT count(*) FROM jobs j WHERE j.status = 'running'
                   AND j.queue = v_job.queue AND j.limit_key = v_job.limit_key);
    END IF;
    v_key := rate_left(v_job.queue, v_job.limit_key, v_queue.rate_per_key,
                       v_queue.rate_per_key_period_s, v_queue.rate_per_key_burst, v_now);
    -- A limit that is reached is a reason of its own: the others say how many start, and in what
    -- order.
    v_most := least(nullif(v_who.free, 0),
                    nullif(greatest(v_queue.max_running - v_running, 0), 0),
                    nullif(v_rate.room, 0));
    v_of_key := least(nullif(greatest(v_queue.limit_per_key - v_same, 0), 0),
                      nullif(v_key.room, 0));
    IF v_held <@ '{paused}' AND (v_job.losses < 2 OR v_who.unsuspected > 0) THEN
        v_place := coalesce(place_of(v_job, v_queue, v_of_key, v_who.unsuspected > 0, v_who.kinds,
                                     v_now), 2147483647);
    END IF;
    RETURN QUERY
    SELECT r.reason, r.says, r.ends, r.ends_at, r.jobs
    FROM (VALUES
        (v_refused.key IS NOT NULL, 'refused',
         'a claim was refused because of it: ' || v_refused.error, 'another try',
         v_refused.until, NULL::uuid[]),
        (NOT is_origin((SELECT o.environment FROM origin o)), 'copy',
         'this database is a copy: its jobs belong elsewhere', 'pgworkd adopt', NULL, NULL),
        (v_who.workers = 0, 'no_worker', 'no worker serves its queue',
         CASE WHEN v_queue.endpoint IS NULL THEN 'pgworkd run --queue ' || in_shell(v_job.queue)
              ELSE 'pgworkd push' END, NULL, NULL),
        (v_who.workers > 0 AND v_who.knowing = 0, 'kind',
         format('no worker of its queue has a handler for its kind %s', v_kind),
         'a release that has one', NULL, NULL),
        (v_who.knowing > 0 AND v_who.free = 0, 'slots',
         format('all slots for it are taken: %s', v_who.slots), 'the end of another job', NULL,
         NULL),
        (v_job.losses > 1 AND v_who.knowing > 0 AND v_who.unsuspected = 0, 'suspect',
         format('it was lost with %s workers, and each worker runs one such job at a time',
                v_job.losses), 'the end of these jobs', NULL, v_who.suspects[1:10]),
        (v_queue.max_running <= v_running, 'limit',
         format('%s jobs of its queue run, at most %s may', v_running, v_queue.max_running),
         'the end of another job', NULL, NULL),
        (v_queue.rate > 0 AND v_rate.room < 1, 'rate',
         format('its queue starts at most %s jobs in %s s', v_queue.rate, v_queue.rate_period_s),
         'time', v_now + make_interval(secs => v_rate.again_s), NULL),
        (v_queue.limit_per_key <= v_same, 'limit_key',
         format('%s jobs of its limit_key run, at most %s may', v_same, v_queue.limit_per_key),
         'the end of another job', NULL, ARRAY(
             SELECT j.id FROM jobs j WHERE j.status = 'running' AND j.queue = v_job.queue
               AND j.limit_key = v_job.limit_key LIMIT 10)),
        (v_queue.rate_per_key > 0 AND v_same >= 0 AND v_key.room < 1, 'rate_key',
         format('its limit_key starts at most %s jobs in %s s', v_queue.rate_per_key,
                v_queue.rate_per_key_period_s),
         'time', v_now + make_interval(secs => v_key.again_s), NULL),
        (v_place > coalesce(v_most, 2147483646), 'order', CASE
             WHEN v_place = 2147483647 THEN 'many due jobs of its queue or key come before it'
             ELSE format('due jobs of its queue come before it: %s', v_place - 1) END,
         'their start', NULL, NULL)
    ) AS r (holds, reason, says, ends, ends_at, jobs) WHERE r.holds;
END $$;
