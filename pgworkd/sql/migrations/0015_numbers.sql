-- Version 15. Does nothing in a fresh database, and nothing from version 15 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 15) THEN
        RETURN;
    END IF;
    ALTER TABLE IF EXISTS queue_minutes
        ADD COLUMN IF NOT EXISTS cancelled bigint NOT NULL DEFAULT 0,
        ADD COLUMN IF NOT EXISTS expired bigint NOT NULL DEFAULT 0;
    -- They return more columns.
    DROP FUNCTION IF EXISTS throughput(timestamptz, timestamptz, int, text, text),
        wanted(int, text, text[]);
    -- What alerts have told until now is told; a job that waits tells of its own group.
    DROP FUNCTION IF EXISTS error_group(text, text), make_alert(alert_rules, bigint, boolean);
    ALTER TABLE IF EXISTS deaths ADD COLUMN IF NOT EXISTS place text NOT NULL DEFAULT '';
    ALTER TABLE IF EXISTS error_groups ADD COLUMN IF NOT EXISTS place text NOT NULL DEFAULT '';
    IF to_regclass('pgworkd.alerts') IS NOT NULL THEN
        ALTER TABLE alert_rules
            ADD COLUMN IF NOT EXISTS bundle_s integer NOT NULL DEFAULT 300
                CONSTRAINT bundle_s_must_be_0_to_a_day CHECK (bundle_s BETWEEN 0 AND 86400),
            ADD COLUMN IF NOT EXISTS job_id uuid, ADD COLUMN IF NOT EXISTS job_at timestamptz;
        ALTER TABLE alerts
            ADD COLUMN IF NOT EXISTS told bigint NOT NULL DEFAULT 0,
            ADD COLUMN IF NOT EXISTS many_at timestamptz,
            ADD COLUMN IF NOT EXISTS due_at timestamptz, ADD COLUMN IF NOT EXISTS reason text,
            ALTER COLUMN at DROP NOT NULL;
        IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'alerts'::regclass
                     AND a.attname = 'job_id' AND NOT a.attisdropped) THEN
            UPDATE alerts a SET told = g.deaths FROM error_groups g WHERE g.id = a.group_id;
            UPDATE alerts a
            SET told = 0, at = NULL, due_at = a.at,
                reason = coalesce(j.payload ->> 'reason', 'more')
            FROM jobs j
            WHERE j.id = a.job_id AND j.status IN ('pending', 'running', 'failed', 'blocked');
            ALTER TABLE alerts DROP COLUMN job_id;
        END IF;
    END IF;
    ALTER TABLE IF EXISTS queues ADD COLUMN IF NOT EXISTS max_attempts attempts_limit,
        ADD COLUMN IF NOT EXISTS timeout_s period_s,
        ADD COLUMN IF NOT EXISTS serialize_scope name_text;
    -- Keys may be those of several queues: indexes are made anew, a trigger and a function changed.
    DROP INDEX IF EXISTS jobs_serialize, jobs_line;
    DROP FUNCTION IF EXISTS key_is_free(text, text, boolean, timestamptz, uuid), abandon(int, uuid);
    -- Readers may call these now: made anew, they get the rights of dead_groups(), see below.
    DROP FUNCTION IF EXISTS running_in(text),
        rate_allowance(timestamptz, int, real, int, timestamptz),
        spent_until(text, text, int, real, int, timestamptz);
    ALTER TABLE IF EXISTS jobs ADD COLUMN IF NOT EXISTS serialize_scope name_text;
    ALTER TABLE IF EXISTS batches
        ADD COLUMN IF NOT EXISTS max_attempts attempts_limit,
        ADD COLUMN IF NOT EXISTS meta payload_object;
    DROP FUNCTION IF EXISTS
        create_batch(text, text, text, uuid, boolean, text, boolean, int, jsonb, jsonb, text,
                     timestamptz, float8),
        enqueue(text, jsonb, text, int, timestamptz, float8, timestamptz, int, float8, jsonb, text,
                timestamptz, float8, text, text, text, text, uuid),
        enqueue_once(uuid, text, jsonb, text, int, timestamptz, float8, timestamptz, int, float8,
                     jsonb, text, timestamptz, float8, text, text, text);
    -- Keys of jobs of batches are unique in their batch, also those that ended jobs have left.
    UPDATE jobs j SET dedupe_key = k.batch_id || '/' || j.dedupe_key
    FROM (SELECT i.id, coalesce(i.batch_id, (SELECT f.batch_id FROM finished_jobs f
                                             WHERE i.status = 'completed' AND f.id = i.id
                                             LIMIT 1)) AS batch_id
          FROM jobs i WHERE i.dedupe_key IS NOT NULL) k
    WHERE j.id = k.id AND k.batch_id IS NOT NULL AND char_length(j.dedupe_key) <= 475
      AND octet_length(j.dedupe_key) <= 1499;
    -- Plain UPDATEs that would end a job, or have its runs share numbers, are told what to call.
    UPDATE jobs SET started_at = NULL WHERE attempts = 0 AND started_at IS NOT NULL;
    ALTER TABLE jobs
        DROP CONSTRAINT IF EXISTS status_must_be_one_of_a_live_job,
        DROP CONSTRAINT IF EXISTS a_job_is_ended_by_cancel_status_must_be_of_a_live_one,
        DROP CONSTRAINT IF EXISTS attempts_never_fall_to_run_a_job_again_call_retry,
        ADD CONSTRAINT a_job_is_ended_by_cancel_status_must_be_of_a_live_one
            CHECK (status <= 'dead' OR status = 'completed' AND dedupe_until IS NOT NULL),
        ADD CONSTRAINT attempts_never_fall_to_run_a_job_again_call_retry
            CHECK (attempts > 0 OR started_at IS NULL);
    IF to_regclass('pgworkd.endpoints') IS NOT NULL THEN
        UPDATE endpoints e
        SET timeout_s = least(e.timeout_s, 410),
            callback_timeout_s = least(e.callback_timeout_s, 420 - least(e.timeout_s, 410))
        WHERE e.mode = 'callback' AND e.timeout_s + e.callback_timeout_s > 420;
        ALTER TABLE endpoints
            DROP CONSTRAINT IF EXISTS endpoint_timeouts_of_callbacks_must_be_7_min_together,
            ADD CONSTRAINT endpoint_timeouts_of_callbacks_must_be_7_min_together
                CHECK (mode <> 'callback' OR timeout_s + callback_timeout_s <= 420);
    END IF;
    -- Functions that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', l.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES ('append_minutes', 'finer_counts'), ('append_minutes', 'usual_runs'),
                         ('archive', 'count_ended'), ('error_group', 'error_place'),
                         ('count_deaths', 'note_alert'), ('count_deaths', 'due_rules'),
                         ('count_deaths', 'make_alerts'), ('count_deaths', 'told'),
                         ('count_deaths', 'is_since'), ('count_deaths', 'is_later'),
                         ('delete_batch', 'of_finished_tree'), ('new_id', 'payload_key'),
                         ('claim_for', 'claim_one'), ('claim', 'may_run_suspect'),
                         ('claim', 'may_stay_open'),
                         ('new_id', 'item_key'), ('queues_changed', 'queue_rescoped'),
                         ('wake', 'scope_of'), ('dead_groups', 'explain'),
                         ('dead_groups', 'place_of'), ('dead_groups', 'before_in_line'),
                         ('dead_groups', 'held_back'), ('dead_groups', 'key_left'),
                         ('dead_groups', 'in_shell'),
                         ('dead_groups', 'rate_left'), ('claim', 'reset_rate'),
                         ('dead_groups', 'who_could_run'), ('dead_groups', 'burst'),
                         ('dead_groups', 'in_time'), ('dead_groups', 'key_is_free'),
                         ('dead_groups', 'running_in'),
                         ('count_deaths', 'next_alert_s'), ('ask_worker', 'ask_stack'),
                         ('heartbeat', 'answer_stack'), ('forget_progress', 'forget_stacks'),
                         ('cancel', 'start_operation'), ('cancel', 'note_operation'),
                         ('cancel', 'stop_operation'), ('cancel', 'operation_step'),
                         ('cancel', 'advance_operations'), ('cancel', 'forget_operations'))
                AS l (old, name) ON l.old = o.value ->> 'name'), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
    PERFORM set_config('pgworkd.relations_like', (
        coalesce(nullif(current_setting('pgworkd.relations_like', true), ''), '{}')::jsonb
        || '{"operations": "progress", "stack_requests": "progress"}')::text, false);
END $migration$;
