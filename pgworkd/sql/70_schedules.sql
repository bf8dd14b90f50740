-- Schedules: declaring them, and the chain of their occurrences.

-- A schedule's rule, as it is compared and declared. Inlined.
CREATE OR REPLACE FUNCTION rule_of(s schedules) RETURNS jsonb LANGUAGE sql STABLE
    RETURN jsonb_build_object('queue', s.queue, 'kind', s.kind, 'cron', s.cron,
                              'every_s', s.every_s, 'timezone', s.timezone, 'missed', s.missed,
                              'payload', s.payload, 'missed_grace_s', s.missed_grace_s,
                              'waits_for_retries', s.waits_for_retries);

-- Stores which schedules the code of a worker declares, with their rules (by name, see rule_of()),
-- and brings the table there: one without a row gets it, one that had left the code is enabled
-- again, and a rule is replaced once no other live worker declares it. So a deployment ends with
-- the new rule, whichever of its workers start last, and two services that declare one name do not
-- take it from each other. A row inserted by SQL is left alone, and one that an operator disabled
-- stays disabled. p_worker is NULL before its registration. Returns what is not as declared: of
-- p_rules those under another rule, with that `rule` and a worker that declares it (NULL: the row
-- is locked); and without a rule, enabled schedules of code that no worker declares, if all have
-- declared theirs. Locks the worker's row if it changes, then rows that it changes with SKIP
-- LOCKED.
CREATE OR REPLACE FUNCTION declare_rules(p_worker int, p_rules jsonb)
RETURNS TABLE (name text, rule jsonb, worker text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_ours schedules[] := ARRAY(
        SELECT jsonb_populate_record(NULL::schedules, r.value || jsonb_build_object('name', r.key))
        FROM jsonb_each(p_rules) r ORDER BY r.key);
    v_rules jsonb := (SELECT coalesce(jsonb_object_agg(o.name, rule_of(o)), '{}')
                      FROM unnest(v_ours) o);
    v_names text[] := ARRAY(SELECT o.name FROM unnest(v_ours) o);
BEGIN
    UPDATE workers w SET schedules = v_names, rules = v_rules
    WHERE w.id = p_worker AND (w.schedules, w.rules) IS DISTINCT FROM (v_names, v_rules);
    INSERT INTO schedules (name, queue, kind, cron, every_s, timezone, missed, payload,
                           missed_grace_s, waits_for_retries, source)
    SELECT o.name, o.queue, o.kind, o.cron, o.every_s, o.timezone, o.missed, o.payload,
           o.missed_grace_s, o.waits_for_retries, 'code'
    FROM unnest(v_ours) o WHERE NOT EXISTS (SELECT FROM schedules s WHERE s.name = o.name)
    ON CONFLICT DO NOTHING;
    UPDATE schedules s
    SET queue = o.queue, kind = o.kind, cron = o.cron, every_s = o.every_s, timezone = o.timezone,
        missed = o.missed, payload = o.payload, missed_grace_s = o.missed_grace_s,
        waits_for_retries = o.waits_for_retries,
        enabled = s.enabled OR s.retired_at IS NOT NULL, retired_at = NULL
    FROM unnest(v_ours) o
    WHERE o.name = s.name AND s.name = ANY (ARRAY(
        SELECT f.name::text FROM schedules f
        WHERE f.name = ANY (v_names) AND f.source = 'code'
          AND (f.retired_at IS NOT NULL
               OR rule_of(f) <> v_rules -> f.name AND declarer(f, p_worker) IS NULL)
        ORDER BY f.name FOR UPDATE SKIP LOCKED));
    RETURN QUERY
    SELECT s.name::text, rule_of(s), declarer(s, p_worker) FROM schedules s
    WHERE s.name = ANY (v_names) AND s.source = 'code' AND rule_of(s) <> v_rules -> s.name
    UNION ALL
    SELECT u.name, NULL, NULL FROM declare_schedules(p_worker, v_names) u WHERE NOT u.retired
    ORDER BY 1;
END $$;

-- The name and id of a live worker, other than p_except, that declares this rule of the schedule,
-- or may, as it has not declared any rules; NULL: none does. Locks nothing.
CREATE OR REPLACE FUNCTION declarer(s schedules, p_except int) RETURNS text
LANGUAGE sql STABLE
    RETURN (SELECT w.name || ' (id ' || w.id || ')' FROM workers w
            WHERE w.lost_at IS NULL AND w.lease_until > clock() AND w.id IS DISTINCT FROM p_except
              AND (w.rules -> s.name = rule_of(s)
                   OR w.rules IS NULL AND s.name = ANY (w.schedules))
            ORDER BY w.id LIMIT 1);

-- Declares one schedule, as declare_rules(): for daemons of the version before. Locks as that.
CREATE OR REPLACE FUNCTION put_schedule(p_name text, p_queue text, p_kind text, p_cron text,
                                        p_every_s int, p_timezone text, p_missed text,
                                        p_payload text, p_missed_grace_s real DEFAULT 60,
                                        p_waits_for_retries boolean DEFAULT false) RETURNS void
LANGUAGE sql VOLATILE AS $$
    SELECT FROM declare_rules(NULL, jsonb_build_object(p_name, jsonb_build_object(
        'queue', p_queue, 'kind', p_kind, 'cron', p_cron, 'every_s', p_every_s,
        'timezone', p_timezone, 'missed', p_missed, 'payload', p_payload::jsonb,
        'missed_grace_s', p_missed_grace_s, 'waits_for_retries', p_waits_for_retries)))
$$;

-- All enabled schedules, and whether each lacks an occurrence in its chain. The caller computes
-- the next instants and passes them to restore_occurrences(). Locks nothing.
CREATE OR REPLACE FUNCTION ensure_schedules()
RETURNS TABLE (name text, cron text, every_s int, timezone text, missed text, revision int,
               last_occurrence timestamptz, at timestamptz, broken boolean)
LANGUAGE sql STABLE AS $$
    SELECT s.name, s.cron, s.every_s, s.timezone, s.missed, s.revision, s.last_occurrence, clock(),
           NOT EXISTS (SELECT FROM jobs j WHERE j.schedule = s.name AND j.status <> 'dead'
                         AND (j.failures = 0 OR s.waits_for_retries))
    FROM schedules s WHERE s.enabled ORDER BY s.name
$$;

-- Stores which schedules are declared in the code of a worker, and returns what is wrong:
-- `retired`, its own schedules that were disabled because no worker declared them (put_schedule()
-- enables them), otherwise enabled schedules from code that no worker declares now. Nothing is
-- wrong while some worker has not declared its own. Locks the worker's row if it changes.
CREATE OR REPLACE FUNCTION declare_schedules(p_worker int, p_names text[])
RETURNS TABLE (name text, retired boolean)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE workers w SET schedules = p_names
        WHERE w.id = p_worker AND w.schedules IS DISTINCT FROM p_names;
    RETURN QUERY
    SELECT s.name::text, s.retired_at IS NOT NULL FROM schedules s
    WHERE s.source = 'code'
      AND CASE WHEN s.retired_at IS NOT NULL THEN s.name = ANY (p_names)
               ELSE s.enabled AND NOT EXISTS (SELECT FROM workers w
                                              WHERE w.lost_at IS NULL AND (w.schedules IS NULL
                                              OR s.name = ANY (w.schedules)))
               END
    ORDER BY s.name;
END $$;

-- Disables those of these schedules that no worker declares (see declare_rules()); returns their
-- names. Triggers of the table write the audit and cancel their waiting occurrences. Locks their
-- rows in order of name, then as schedule_ended(), without waiting.
CREATE OR REPLACE FUNCTION retire_schedules(p_names text[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_names text[] := ARRAY(
        SELECT s.name FROM schedules s
        WHERE s.name = ANY (p_names) AND s.source = 'code' AND s.enabled
          AND NOT EXISTS (SELECT FROM workers w
                          WHERE w.lost_at IS NULL AND (w.schedules IS NULL
                                                       OR s.name = ANY (w.schedules)))
        ORDER BY s.name FOR UPDATE);
BEGIN
    PERFORM set_no_wait('on');
    UPDATE schedules s SET enabled = false, retired_at = clock()
        WHERE s.name = ANY (v_names) AND s.enabled;
    RETURN v_names;
END $$;

-- Whether an occurrence that was just claimed for the first time was missed, and is to be skipped:
-- since when workers serve its queue without a gap, if it was due longer before that than its
-- schedule's grace; else NULL. An occurrence that waited although a worker was there (a backlog, a
-- pause, a limit), or was claimed before, was not missed. Locks nothing.
CREATE OR REPLACE FUNCTION missed_since(p_job uuid, p_attempt int) RETURNS timestamptz
LANGUAGE sql STABLE AS $$
    SELECT f.since
    FROM jobs j JOIN schedules s ON s.name = j.schedule
    CROSS JOIN LATERAL (
        SELECT min(w.steady_since) AS since FROM workers w
        WHERE w.lost_at IS NULL AND w.lease_until > clock() AND w.kind <> 'standing'
          AND (w.id = j.worker_id OR EXISTS (SELECT FROM pools p
                                             WHERE p.queue = j.queue AND p.worker_id = w.id
                                               AND p.concurrency > 0))) f
    WHERE j.id = p_job AND j.attempts = p_attempt AND j.attempts = 1 AND j.status = 'running'
      AND s.missed = 'skip'
      AND greatest(j.run_at, j.occurrence) + make_interval(secs => s.missed_grace_s) < f.since
$$;

-- Inserts one occurrence per schedule, unless its chain has one (see jobs_schedule_chain), has
-- passed that instant, or the rule has changed since the caller computed it (revision). Returns
-- the names that got one. Locks the schedules' rows in order of name with SKIP LOCKED, then
-- checks: two callers never both insert. A locked one is left to the daemons' next check of the
-- schedules (see follow()).
CREATE OR REPLACE FUNCTION add_occurrences(p_names text[], p_at timestamptz[], p_revisions int[])
RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_free  text[] := ARRAY(SELECT s.name FROM schedules s WHERE s.name = ANY (p_names)
                            ORDER BY s.name FOR UPDATE SKIP LOCKED);
    v_added text[];
BEGIN
    WITH moved AS (
        UPDATE schedules s SET last_occurrence = n.at, error = NULL
        FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision)
        WHERE s.name = n.name AND s.name = ANY (v_free) AND s.enabled AND s.revision = n.revision
          AND (s.last_occurrence IS NULL OR s.last_occurrence < n.at)
          AND NOT EXISTS (SELECT FROM jobs j WHERE j.schedule = s.name AND j.status <> 'dead'
                          AND (j.failures = 0 OR s.waits_for_retries))
        RETURNING s.*
    ), added AS (
        INSERT INTO jobs (queue, kind, payload, run_at, priority, max_attempts, timeout_s, schedule,
                          occurrence)
        SELECT m.queue, m.kind, m.payload, m.last_occurrence, m.priority, m.max_attempts,
               m.timeout_s, m.name, m.last_occurrence
        FROM moved m
        ON CONFLICT DO NOTHING
        RETURNING schedule
    )
    SELECT array_agg(a.schedule) INTO v_added FROM added a;
    RETURN coalesce(v_added, '{}');
END $$;

-- One part of restore_occurrences(): p_next are rows (name, at, revision). Locks as
-- add_occurrences().
CREATE OR REPLACE FUNCTION restore_these(p_names text[], p_next jsonb) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    SELECT add_occurrences(array_agg(n.name), array_agg(n.at), array_agg(n.revision))
    FROM jsonb_to_recordset(p_next) AS n (name text, at timestamptz, revision int)
    WHERE n.name = ANY (p_names)
$$;

-- The same for daemons that restore broken chains: an occurrence that is refused holds up no
-- others. Locks as add_occurrences().
CREATE OR REPLACE FUNCTION restore_occurrences(p_names text[], p_at timestamptz[],
                                               p_revisions int[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN ARRAY(SELECT jsonb_array_elements_text(p.added)
                 FROM in_parts('restore_occurrences', p_names,
                     'restore_these(text[], jsonb)',
                     (SELECT jsonb_agg(to_jsonb(n))
                      FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision)))
                     AS p (added));
END $$;

-- Adds the next occurrences, as the caller computed them, of the schedules whose occurrence was
-- just settled. If a schedule is locked, daemons are notified to check them all, again until it is
-- free, or if this settle defers. Locks as add_occurrences().
CREATE OR REPLACE FUNCTION follow(p_settled text[], p_names text[], p_at timestamptz[],
                                  p_revisions int[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_names text[];
    v_at    timestamptz[];
    v_revisions int[];
BEGIN
    SELECT array_agg(n.name), array_agg(n.at), array_agg(n.revision) INTO v_names, v_at, v_revisions
    FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision)
    WHERE n.name = ANY (p_settled) AND n.at IS NOT NULL;
    IF v_names IS NULL THEN
        RETURN;
    ELSIF defers() THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
        RETURN;
    END IF;
    PERFORM add_occurrences(v_names, v_at, v_revisions);
    IF (SELECT count(*) FROM schedules s WHERE s.name = ANY (v_names))
       > cardinality(ARRAY(SELECT s.name FROM schedules s WHERE s.name = ANY (v_names)
                           FOR UPDATE SKIP LOCKED)) THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
    END IF;
END $$;

-- Stores why no occurrence can be computed; the chain stops until the rule is changed. Locks the
-- row.
CREATE OR REPLACE FUNCTION fail_schedule(p_name text, p_revision int, p_error text) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE schedules SET error = left(p_error, 4096)
    WHERE name = p_name AND revision = p_revision AND error IS DISTINCT FROM left(p_error, 4096);
    RETURN FOUND;
END $$;

-- A changed rule gets a new revision; its waiting occurrence, if neither due nor begun, is deleted
-- for the new next one. Locks that job, which no claim can hold: it is not due.
CREATE OR REPLACE FUNCTION schedule_changed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM jobs WHERE schedule = OLD.name AND status = 'pending' AND attempts = 0
        AND run_at > clock();
    IF TG_OP = 'DELETE' THEN
        RETURN OLD;
    END IF;
    NEW.revision := OLD.revision + 1;
    NEW.error := NULL;
    NEW.last_occurrence := least(OLD.last_occurrence, clock());
    NEW.in_force_since := clock();
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER schedule_changed BEFORE UPDATE OF
    queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s,
    enabled, missed_grace_s, waits_for_retries
    ON schedules FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*)
    EXECUTE FUNCTION schedule_changed();
CREATE OR REPLACE TRIGGER schedule_deleted BEFORE DELETE ON schedules
    FOR EACH ROW EXECUTE FUNCTION schedule_changed();

-- Cancels the waiting occurrences, due ones and retries, too, of a schedule that was removed or has
-- left the code: nobody may be there to run them. One that runs goes on. Locks them with SKIP
-- LOCKED, then as archive().
CREATE OR REPLACE FUNCTION schedule_ended() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM archive(ARRAY(SELECT j.id FROM jobs j
                          WHERE j.schedule = OLD.name
                            AND j.status IN ('pending', 'failed', 'blocked')
                          FOR UPDATE SKIP LOCKED), 'cancelled',
                    CASE TG_OP WHEN 'DELETE' THEN 'its schedule was removed'
                               ELSE 'its schedule left the code' END);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER schedule_removed AFTER DELETE ON schedules
    FOR EACH ROW EXECUTE FUNCTION schedule_ended();
CREATE OR REPLACE TRIGGER schedule_retired AFTER UPDATE OF retired_at ON schedules
    FOR EACH ROW WHEN (OLD.retired_at IS NULL AND NEW.retired_at IS NOT NULL)
    EXECUTE FUNCTION schedule_ended();

-- Notifies daemons at once of a schedule that was inserted, changed or deleted. Locks nothing.
CREATE OR REPLACE FUNCTION schedules_notify() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('pgworkd', '{"schedules": true}');
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER schedules_notify AFTER INSERT OR DELETE OR UPDATE OF
    queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s,
    enabled, missed_grace_s, waits_for_retries
    ON schedules FOR EACH ROW EXECUTE FUNCTION schedules_notify();

-- Writes every change of a schedule's rule, and its deletion, into the audit, whoever makes it;
-- its last occurrence and its error are no part of the rule. Locks nothing.
CREATE OR REPLACE FUNCTION schedules_audit() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_before jsonb := to_jsonb(OLD) - '{revision,last_occurrence,error,in_force_since}'::text[];
    v_after  jsonb := CASE TG_OP WHEN 'DELETE' THEN '{}'
                           ELSE to_jsonb(NEW)
                               - '{revision,last_occurrence,error,in_force_since}'::text[] END;
BEGIN
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(), 'schedule', OLD.queue,
           jsonb_build_object('schedule', OLD.name) || differing(v_before, v_after),
           jsonb_build_object('schedule', CASE TG_OP WHEN 'DELETE' THEN NULL ELSE NEW.name END)
               || differing(v_after, v_before)
    WHERE v_before <> v_after;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER schedules_audit AFTER DELETE OR UPDATE OF
    name, queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s,
    enabled, missed_grace_s, waits_for_retries ON schedules FOR EACH ROW
        EXECUTE FUNCTION schedules_audit();

-- Enables or disables a schedule; false if it was so before. Raises 22023 if there is none. Locks
-- the row.
CREATE OR REPLACE FUNCTION enable_schedule(p_name text, p_enabled boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_schedule schedules;
BEGIN
    SELECT s.* INTO v_schedule FROM schedules s WHERE s.name = p_name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'schedule "%" does not exist', p_name
            USING ERRCODE = '22023', HINT = 'pgworkd schedules lists them all.';
    END IF;
    UPDATE schedules s SET enabled = p_enabled WHERE s.name = p_name AND s.enabled <> p_enabled;
    -- an operator has decided it now
    UPDATE schedules s SET retired_at = NULL WHERE s.name = p_name AND s.retired_at IS NOT NULL;
    RETURN v_schedule.enabled <> p_enabled;
END $$;

-- Removes a schedule; an occurrence that runs goes on. Raises 22023 if there is none,
-- or if the code of a live worker declares it, which would enter it again. Locks the row.
CREATE OR REPLACE FUNCTION remove_schedule(p_name text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_worker text := (SELECT w.name || ' (id ' || w.id || ')' FROM workers w
                      WHERE w.lost_at IS NULL AND w.lease_until > clock()
                        AND p_name = ANY (w.schedules)
                      ORDER BY w.id LIMIT 1);
BEGIN
    IF v_worker IS NOT NULL AND EXISTS (SELECT FROM schedules s
                                        WHERE s.name = p_name AND s.source = 'code') THEN
        RAISE EXCEPTION 'schedule "%" is declared in the code of worker %', p_name, v_worker
            USING ERRCODE = '22023',
            HINT = 'It would be entered again: disable it, or take it out of the code first.';
    END IF;
    DELETE FROM schedules s WHERE s.name = p_name;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'schedule "%" does not exist', p_name
            USING ERRCODE = '22023', HINT = 'pgworkd schedules lists them all.';
    END IF;
END $$;

-- Inserts a job as the schedule would, due now, apart from its occurrences; returns its id. A
-- disabled schedule may be run, too. Raises 22023 if there is none. Locks nothing.
CREATE OR REPLACE FUNCTION run_schedule(p_name text, p_by text DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_job jobs;
BEGIN
    INSERT INTO jobs AS j (queue, kind, payload, priority, max_attempts, timeout_s)
    SELECT s.queue, s.kind, s.payload, s.priority, s.max_attempts, s.timeout_s FROM schedules s
    WHERE s.name = p_name
    RETURNING j.* INTO v_job;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'schedule "%" does not exist', p_name
            USING ERRCODE = '22023', HINT = 'pgworkd schedules lists them all.';
    END IF;
    INSERT INTO audit (who, what, queue, job_id, before, after)
    VALUES (who(p_by), 'schedule', v_job.queue, v_job.id,
            jsonb_build_object('schedule', p_name, 'run_now', NULL),
            jsonb_build_object('schedule', p_name, 'run_now', v_job.run_at));
    RETURN v_job.id;
END $$;
