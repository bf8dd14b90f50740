-- Who may do what in the schema pgworkd. For a superuser; or for who may create roles and has run `pgworkd migrate`, as the
-- first user of a managed server; or, when the roles exist, for the owner of the schema. In psql or by any driver.
-- Installed first (`pgworkd migrate`); to be run again after each upgrade: a function or table that is new is nobody's but
-- the owner's until then. Only the grants below are left, so grants of your own on these objects to these
-- roles, or to PUBLIC, go. The roles are groups (NOLOGIN): GRANT them to those who log in.
--
--   owner     owns the schema and runs `pgworkd migrate`: log in as it, or ALTER ROLE deploy SET role = ...
--   worker    a daemon, and the commands of operators
--   enqueuer  an application that inserts jobs; reads of jobs: id, queue, dedupe_key and status, which RETURNING id and
--             ON CONFLICT need; never a payload or a result. Who also waits for results needs enqueuer and reader.
--   reader    a dashboard: reads everything, changes nothing; not the tokens of workers or of the gateway
--   gateway   `pgworkd serve`: all three of these, the tokens of its callers, and the endpoints that jobs are sent to
--
-- Functions run with their caller's rights, except those of the owner in 98_plans.sql: each does one thing that needs rights
-- which its callers had better not have.

BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = '5s';  -- a new owner takes each table's lock for an instant: better run it again than queue all work
SET LOCAL pgworkd.owner = {owner};
SET LOCAL pgworkd.worker = {worker};
SET LOCAL pgworkd.enqueuer = {enqueuer};
SET LOCAL pgworkd.reader = {reader};
SET LOCAL pgworkd.gateway = {gateway};

DO $$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY[current_setting('pgworkd.owner'), current_setting('pgworkd.worker'),
                                  current_setting('pgworkd.enqueuer'), current_setting('pgworkd.reader'),
                                  current_setting('pgworkd.gateway')] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = v_role) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
        END IF;
    END LOOP;
END $$;

-- Who is no superuser must be a member of the owner, to give it what it owns and to migrate. Since Postgres 16 who creates a
-- role may grant it, and is no member; before, who may create roles may grant each of them.
DO $$
DECLARE
    v_owner    text := current_setting('pgworkd.owner');
    v_is_newer bool := current_setting('server_version_num')::int >= 160000;
BEGIN
    IF pg_has_role(v_owner, 'USAGE') AND pg_has_role(v_owner, CASE WHEN v_is_newer THEN 'SET' ELSE 'MEMBER' END) THEN
        RETURN;
    END IF;
    EXECUTE format('GRANT %I TO %I', v_owner, current_user) || CASE WHEN v_is_newer THEN ' WITH INHERIT TRUE, SET TRUE' ELSE '' END;
END $$;

-- The gateway has the rights of three others.
DO $$
DECLARE
    v_gateway text := current_setting('pgworkd.gateway');
    v_role    text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY[current_setting('pgworkd.worker'), current_setting('pgworkd.enqueuer'),
                                  current_setting('pgworkd.reader')] LOOP
        IF NOT pg_has_role(v_gateway, v_role, 'USAGE') THEN
            EXECUTE format('GRANT %I TO %I', v_role, v_gateway);
        END IF;
    END LOOP;
END $$;

-- The owner. What a member of it, or a superuser, has made becomes the owner's.
DO $$
DECLARE
    v_owner text := current_setting('pgworkd.owner');
    v_oid   oid := (SELECT r.oid FROM pg_roles r WHERE r.rolname = v_owner);
    v_what  record;
BEGIN
    IF (SELECT n.nspowner FROM pg_namespace n WHERE n.nspname = 'pgworkd') <> v_oid THEN
        EXECUTE format('ALTER SCHEMA pgworkd OWNER TO %I', v_owner);
    END IF;
    FOR v_what IN
        SELECT CASE c.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END AS kind, c.oid::regclass::text AS name
        FROM pg_class c
        WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind IN ('r', 'p', 'v') AND c.relowner <> v_oid
        UNION ALL
        SELECT 'ROUTINE', p.oid::regprocedure::text FROM pg_proc p
        WHERE p.pronamespace = 'pgworkd'::regnamespace AND p.proowner <> v_oid
        UNION ALL
        SELECT CASE t.typtype WHEN 'd' THEN 'DOMAIN' ELSE 'TYPE' END, t.oid::regtype::text
        FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
        WHERE t.typnamespace = 'pgworkd'::regnamespace AND t.typowner <> v_oid
          AND (t.typtype IN ('d', 'e') OR c.relkind = 'c')
    LOOP
        EXECUTE format('ALTER %s %s OWNER TO %I', v_what.kind, v_what.name, v_owner);  -- a name as reg... writes it is quoted
    END LOOP;
END $$;

-- Nobody has what is not granted below.
REVOKE ALL ON SCHEMA pgworkd FROM PUBLIC, {worker}, {enqueuer}, {reader}, {gateway};
REVOKE ALL ON ALL TABLES IN SCHEMA pgworkd FROM PUBLIC, {worker}, {enqueuer}, {reader}, {gateway};
REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgworkd FROM PUBLIC, {worker}, {enqueuer}, {reader}, {gateway};
REVOKE ALL ON ALL ROUTINES IN SCHEMA pgworkd FROM PUBLIC, {worker}, {enqueuer}, {reader}, {gateway};
-- (Default privileges of one schema can only add to those of all: so this is for whatever the owner makes anywhere here.)
ALTER DEFAULT PRIVILEGES FOR ROLE {owner} REVOKE EXECUTE ON ROUTINES FROM PUBLIC;
GRANT USAGE ON SCHEMA pgworkd TO {worker}, {enqueuer}, {reader}, {gateway};

-- Everyone: the time, which views and the defaults of columns ask for.
GRANT EXECUTE ON FUNCTION pgworkd.clock TO {worker}, {enqueuer}, {reader};

-- Reading. A view shows what its owner may see, but its functions are called by who asks.
GRANT SELECT ON pgworkd.schema_version, pgworkd.pools, pgworkd.queues, pgworkd.rates, pgworkd.schedules,
    pgworkd.jobs, pgworkd.finished_jobs, pgworkd.finished_jobs_other, pgworkd.batches, pgworkd.batch_additions,
    pgworkd.job_dependencies, pgworkd.pending_effects, pgworkd.result_waiters, pgworkd.progress, pgworkd.stack_requests, pgworkd.audit,
    pgworkd.refused_rows, pgworkd.samples, pgworkd.queue_samples, pgworkd.queue_minutes, pgworkd.deaths, pgworkd.error_groups, pgworkd.alert_rules, pgworkd.alerts, pgworkd.operations,
    pgworkd.queue_depths, pgworkd.all_jobs, pgworkd.queue_stats, pgworkd.batch_progress, pgworkd.batch_trees, pgworkd.blocked_jobs,
    pgworkd.kept_keys, pgworkd.job_progress, pgworkd.worker_stats, pgworkd.origin
    TO {worker}, {reader};
GRANT SELECT ON pgworkd.workers TO {worker};
GRANT SELECT (id, name, pid, version, state, lease_s, started_at, seen_at, steady_since, lease_until, lost_at, schedules, kinds,
              kind, requested, rules) ON pgworkd.workers TO {reader};  -- not the token, by which a worker is known
GRANT SELECT, INSERT, UPDATE, DELETE ON pgworkd.tokens, pgworkd.idempotent_calls TO {gateway};

-- Where jobs are sent by HTTP: only the gateway, for operators, says where; a worker pauses an endpoint, or disables it, as
-- it answers. A reader does not see what a secret may stand in.
GRANT SELECT, INSERT, DELETE, UPDATE ON pgworkd.endpoints TO {gateway};
GRANT SELECT, UPDATE (paused_until, paused_why, disabled_at, disabled_why, disabled_queues, warned_at, warned_why,
                      updated_at) ON pgworkd.endpoints TO {worker};
GRANT SELECT (name, mode, timeout_s, callback_timeout_s, secret_name, unsigned, allow_private, strict_results, paused_until,
              paused_why, disabled_at, disabled_why, disabled_queues, warned_at, warned_why, created_at, updated_at) ON pgworkd.endpoints TO {reader};
GRANT EXECUTE ON FUNCTION pgworkd.set_endpoint, pgworkd.remove_endpoint, pgworkd.begin_once, pgworkd.end_once, pgworkd.delete_items TO {gateway};
GRANT EXECUTE ON FUNCTION pgworkd.pause_endpoint, pgworkd.disable_endpoint, pgworkd.enable_endpoint, pgworkd.hold_queues,
    pgworkd.note_endpoint, pgworkd.warn_of TO {worker};
GRANT EXECUTE ON FUNCTION pgworkd.server_id, pgworkd.is_origin, pgworkd.became, pgworkd.became_all, pgworkd.result_of, pgworkd.with_below, pgworkd.batch_results, pgworkd.batch_tree, pgworkd.depth, pgworkd.next_priority, pgworkd.known_pools, pgworkd.made_at, pgworkd.finished_of, pgworkd.jobs_of,
    pgworkd.waits_plain, pgworkd.waits_keyed, pgworkd.waits_suspect, pgworkd.histogram_bounds, pgworkd.percentile, pgworkd.throughput, pgworkd.error_message, pgworkd.error_pattern, pgworkd.error_place, pgworkd.error_group, pgworkd.dead_groups, pgworkd.rule_of,
    pgworkd.explain, pgworkd.place_of, pgworkd.before_in_line, pgworkd.held_back, pgworkd.in_shell, pgworkd.key_left, pgworkd.rate_left, pgworkd.who_could_run, pgworkd.key_is_free, pgworkd.in_time, pgworkd.running_in, pgworkd.burst
    TO {worker}, {reader};

-- Inserting: the columns that are an application's to say. All else goes by functions that say what they do.
GRANT SELECT ON pgworkd.schema_version TO {enqueuer};  -- pgworkd enqueue asks whether it fits
GRANT INSERT (id, queue, kind, payload, meta, priority, run_at, expires_at, max_attempts, timeout_s, dedupe_key, dedupe_until,
              serialize_key, limit_key, yields, batch_id),
      SELECT (id, queue, dedupe_key, status)
    ON pgworkd.jobs TO {enqueuer};
GRANT EXECUTE ON FUNCTION pgworkd.new_id, pgworkd.payload_key, pgworkd.item_key, pgworkd.enqueue, pgworkd.enqueue_once, pgworkd.depend, pgworkd.create_batch, pgworkd.add_jobs,
    pgworkd.seal_batch, pgworkd.await_results
    TO {worker}, {enqueuer};

-- Working. To lock a row (FOR UPDATE) takes UPDATE. The history and the audit are only added to; forget_rows() and
-- drop_partition() alone make them shorter, and leave the last days. What waiting jobs wait for, and batches, come by depend() and create_batch().
GRANT INSERT, UPDATE, DELETE ON pgworkd.jobs, pgworkd.workers, pgworkd.pools, pgworkd.queues, pgworkd.rates, pgworkd.schedules,
    pgworkd.progress, pgworkd.stack_requests, pgworkd.refused_rows, pgworkd.samples, pgworkd.queue_samples, pgworkd.queue_minutes, pgworkd.deaths, pgworkd.error_groups, pgworkd.alert_rules, pgworkd.alerts, pgworkd.operations
    TO {worker};
GRANT INSERT ON pgworkd.finished_jobs, pgworkd.audit, pgworkd.pending_effects TO {worker};
GRANT INSERT, UPDATE ON pgworkd.origin TO {worker};
GRANT UPDATE, DELETE ON pgworkd.batches, pgworkd.result_waiters TO {worker};
GRANT DELETE ON pgworkd.batch_additions, pgworkd.job_dependencies, pgworkd.pending_effects TO {worker};
GRANT EXECUTE ON FUNCTION
    pgworkd.belong, pgworkd.adopt, pgworkd.register, pgworkd.heartbeat, pgworkd.wanted, pgworkd.sign_off, pgworkd.set_pool, pgworkd.drop_pool, pgworkd.kinds_elsewhere, pgworkd.worker_ended, pgworkd.notify_pools, pgworkd.wake,
    pgworkd.live_gateways, pgworkd.had_time, pgworkd.standing_worker, pgworkd.heartbeats, pgworkd.abandon, pgworkd.ask_worker, pgworkd.ask_stack, pgworkd.answer_stack, pgworkd.forget_stacks,
    pgworkd.claim_for, pgworkd.claim_one, pgworkd.may_run_suspect, pgworkd.deadline, pgworkd.hand_over, pgworkd.fenced, pgworkd.extend, pgworkd.list_held, pgworkd.take_back, pgworkd.fail_overdue, pgworkd.overdue_jobs, pgworkd.retry_delay_s,
    pgworkd.claim, pgworkd.may_stay_open, pgworkd.carefully, pgworkd.is_careful, pgworkd.is_refused, pgworkd.is_no_rows_fault, pgworkd.raise_kept, pgworkd.refuse, pgworkd.refuse_claims, pgworkd.try_to_claim,
    pgworkd.is_within, pgworkd.is_since, pgworkd.is_later, pgworkd.payloads, pgworkd.clock_after_waiting, pgworkd.next_due, pgworkd.first_run_at,
    pgworkd.no_wait, pgworkd.set_no_wait, pgworkd.put_off, pgworkd.apply_effects, pgworkd.unlocked, pgworkd.free_batches,
    pgworkd.lock_queue, pgworkd.lock_queues, pgworkd.scope_of, pgworkd.reset_rate, pgworkd.allowance,
    pgworkd.key_allowance, pgworkd.key_has_room, pgworkd.spend, pgworkd.pick, pgworkd.pick_suspect, pgworkd.starts, pgworkd.keyed_behind,
    pgworkd.done_of, pgworkd.places_after, pgworkd.in_order, pgworkd.of_key, pgworkd.next_keys, pgworkd.kinds_waiting,
    pgworkd.due_keys, pgworkd.by_turn,
    pgworkd.promote,
    pgworkd.settle_completed, pgworkd.check_settled, pgworkd.defers, pgworkd.deferred, pgworkd.complete_own, pgworkd.settle_failed, pgworkd.settle_released, pgworkd.settle_ended,
    pgworkd.keep_keys, pgworkd.after_ended, pgworkd.archive, pgworkd.count_ended, pgworkd.add_error,
    pgworkd.declare_rules, pgworkd.declarer, pgworkd.put_schedule, pgworkd.ensure_schedules, pgworkd.add_occurrences, pgworkd.follow, pgworkd.fail_schedule,
    pgworkd.declare_schedules, pgworkd.retire_schedules, pgworkd.missed_since, pgworkd.enable_schedule, pgworkd.remove_schedule,
    pgworkd.run_schedule,
    pgworkd.in_parts, pgworkd.all_done, pgworkd.archive_dead, pgworkd.cancel_dependents, pgworkd.cancel_these, pgworkd.count_down, pgworkd.forget_batches, pgworkd.forget_progress,
    pgworkd.forget_workers, pgworkd.free_these, pgworkd.give_back, pgworkd.park, pgworkd.presume_dead, pgworkd.promote_these, pgworkd.restore_these,
    pgworkd.report_refused, pgworkd.rescue_jobs, pgworkd.expire_these, pgworkd.promote_lines,
    pgworkd.mend_these, pgworkd.apply_ends, pgworkd.apply_frees, pgworkd.restore_occurrences,
    pgworkd.rescue, pgworkd.running_of, pgworkd.expire_jobs, pgworkd.expire, pgworkd.free_keys, pgworkd.unblock, pgworkd.stuck_lines, pgworkd.unblock_lines, pgworkd.forget_rates, pgworkd.ensure_partitions,
    pgworkd.days_ruled_out, pgworkd.rule_out_days, pgworkd.validate_days, pgworkd.drop_partition, pgworkd.forget_rows, pgworkd.prune,
    pgworkd.set_queue, pgworkd.who, pgworkd.differing, pgworkd.matching, pgworkd.cancel, pgworkd.retry, pgworkd.discard,
    pgworkd.edit, pgworkd.free_key, pgworkd.free_batch_key, pgworkd.undepend, pgworkd.cancel_batch, pgworkd.of_finished_tree, pgworkd.delete_batch,
    pgworkd.lock_trees, pgworkd.lock_trees_of, pgworkd.batch_ended, pgworkd.stream, pgworkd.fold, pgworkd.advance,
    pgworkd.call_back, pgworkd.cancel_below, pgworkd.stop_jobs, pgworkd.reopened, pgworkd.mend_batches,
    pgworkd.is_awaited, pgworkd.pass_on, pgworkd.wait_less, pgworkd.mend_dependencies, pgworkd.notify_waiters, pgworkd.report_progress,
    pgworkd.sample_queues, pgworkd.append_minutes, pgworkd.usual_runs, pgworkd.finer_counts, pgworkd.sum_minutes, pgworkd.thin_samples, pgworkd.roll_up, pgworkd.note_deaths, pgworkd.count_deaths, pgworkd.count_these, pgworkd.note_alert, pgworkd.due_rules, pgworkd.next_alert_s, pgworkd.make_alerts, pgworkd.told, pgworkd.declare_alerts, pgworkd.mute_errors, pgworkd.forget_deaths,
    pgworkd.start_operation, pgworkd.note_operation, pgworkd.stop_operation, pgworkd.operation_step, pgworkd.advance_operations, pgworkd.forget_operations
    TO {worker};
COMMIT;
