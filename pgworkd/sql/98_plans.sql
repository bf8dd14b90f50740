-- How each function runs: its planner settings, its search_path, and whose rights it has. CREATE OR
-- REPLACE has dropped all settings, so this is run after each installation, in its transaction.
--
-- walk     by index, in its order, one plan for all parameters (a generic one): what must take the
--          same way whatever the statistics say, which are wrong for tables that fill and empty.
--          walk_unsorted: never by a sort; walk_replanned: planned anew, for partitions
-- loop     as walk, and joins by index lookups only
-- hash     settles: the primary key at the given ids, hashed against the arrays; see 60_settle.sql
-- by_...   by index, otherwise as the planner decides; _once: by one generic plan
-- days     of the history: for 200 ms at most, in UTC
-- patterns has regular expressions, whose backslashes mean themselves
-- plain    reads or changes a few rows by key
-- inline   a single expression that becomes part of its caller's plan: a function with settings or
--          a search_path is never inlined, so these have neither; what they name is bound when
--          they are created
--
-- Functions with the owner's rights (SECURITY DEFINER) are what inserting needs beyond INSERT, and
-- what needs DDL. Their search_path begins with pg_catalog, and nobody else may call them until
-- `pgworkd grants`, or you, say so.

DO $$
DECLARE
    v_function record;
    v_done     oid[] := '{}';
    v_left     text;
BEGIN
    FOR v_function IN
        WITH bundles (bundle, settings) AS (VALUES
            ('plain', ''),
            ('no_jit', 'jit=off'),
            ('by_index', 'enable_seqscan=off'),
            ('by_index_no_jit', 'enable_seqscan=off jit=off'),
            ('by_index_once', 'enable_seqscan=off plan_cache_mode=force_generic_plan'),
            ('by_index_no_jit_once', 'enable_seqscan=off jit=off
                plan_cache_mode=force_generic_plan'),
            ('by_index_200ms', 'lock_timeout=200ms enable_seqscan=off jit=off'),
            ('walk', 'enable_seqscan=off enable_bitmapscan=off jit=off
                plan_cache_mode=force_generic_plan'),
            ('walk_replanned', 'enable_seqscan=off enable_bitmapscan=off jit=off
                plan_cache_mode=force_custom_plan'),
            ('walk_unsorted', 'enable_seqscan=off enable_bitmapscan=off enable_sort=off jit=off
                plan_cache_mode=force_generic_plan'),
            ('loop', 'enable_seqscan=off enable_bitmapscan=off enable_hashjoin=off
                enable_mergejoin=off enable_nestloop=on jit=off
                plan_cache_mode=force_generic_plan'),
            ('loop_200ms', 'lock_timeout=200ms enable_seqscan=off enable_bitmapscan=off
                enable_hashjoin=off enable_mergejoin=off jit=off'),
            ('hash', 'enable_seqscan=off enable_bitmapscan=off enable_nestloop=off
                enable_mergejoin=off jit=off work_mem=64MB plan_cache_mode=force_generic_plan'),
            ('days', 'lock_timeout=200ms TimeZone=UTC default_table_access_method=heap'),
            ('patterns', 'standard_conforming_strings=on')
        ), functions (bundle, names) AS (VALUES
            ('inline', '
                add_error became burst clock clock_after_waiting deadline defers histogram_bounds
                in_shell
                in_time is_awaited is_careful is_later is_no_rows_fault is_ours is_since is_within
                item_key key_is_free lock_queue made_at new_id no_wait notify_pools payload_key
                rule_of waits_keyed waits_plain waits_suspect'),
            ('plain', '
                add_jobs adopt all_done answer_stack append_minutes apply_frees archive_dead
                ask_worker batch_created batch_moved belong cancel_dependents cancel_these carefully
                check_callback check_settled complete_own count_deaths count_down count_ended
                count_these declare_alerts declare_rules declare_schedules declarer deferred
                differing disable_endpoint done_of drop_pool due_rules enable_endpoint
                enable_schedule error_group error_message expire expire_these fail_schedule
                finer_counts
                first_run_at follow forget_audit forget_batches forget_calls forget_deaths
                forget_kept forget_operations forget_progress forget_stacks forget_tokens
                forget_undated
                forget_workers free_these
                give_back had_time heartbeat hold_queues in_parts is_origin job_added
                jobs_inserted keep_keys key_allowance key_has_room key_left
                keyed_behind kinds_elsewhere
                known_pools live_gateways lock_queues lock_trees_of make_alerts may_stay_open
                mend_sequences missed_since mute_errors next_alert_s next_priority note_alert
                note_deaths note_endpoint note_operation of_key operation_step
                overdue_jobs park pause_endpoint percentile places_after presume_dead
                promote_lines promote_these put_off put_schedule queue_dated queue_rerouted
                queue_rescoped scope_of
                queues_audit queues_changed raise_kept rate_left rates_follow refuse
                refuse_claims remove_endpoint remove_schedule report_refused rescue rescue_jobs
                restore_these retire_schedules retry_delay_s roll_up schedules_audit
                schedules_notify server_id set_endpoint set_no_wait set_pool set_queue spend
                reset_rate standing_worker starts sum_minutes thin_samples told try_to_claim wake
                warn_of who worker_ended'),
            ('no_jit', '
                dead_groups mend_dependencies sample_queues throughput usual_runs'),
            ('by_index', '
                abandon add_occurrences additions_checked allowance ask_stack batch_sealed
                begin_once cancel
                cancel_batch create_batch delete_batch delete_items discard edit enqueue
                enqueue_once end_once enter_batch expire_jobs free_batch_key free_key free_keys
                jobs_key_wanted move of_finished_tree register reopened restore_occurrences retry
                run_schedule schedule_changed schedule_ended seal_batch sign_off start_operation
                stop_operation stream_created
                take_back unblock unblock_lines undepend'),
            ('by_index_no_jit', '
                apply_effects ensure_schedules'),
            ('by_index_once', '
                after_ended archive is_refused'),
            ('by_index_no_jit_once', '
                wanted'),
            ('walk', '
                became_all before_in_line check_dependencies depend dependencies_added explain
                fail_overdue forget_rates free_batches held_back lock_trees next_due notify_waiters
                pass_on payloads place_of promote running_in running_of stuck_lines
                unlocked who_could_run with_below'),
            ('walk_replanned', '
                finished_of jobs_of matching result_of'),
            ('walk_unsorted', '
                by_turn claim claim_for claim_one depth due_keys in_order kinds_waiting
                may_run_suspect next_keys pick pick_suspect'),
            ('loop', '
                advance apply_ends await_results batch_ended batch_results batch_tree call_back
                cancel_below extend fenced fold hand_over heartbeats list_held mend_batches
                mend_these report_progress stop_jobs stream wait_less'),
            ('loop_200ms', '
                forget_rows'),
            ('by_index_200ms', '
                advance_operations'),
            ('hash', '
                settle_completed settle_ended settle_failed settle_released'),
            ('days', '
                days_ruled_out drop_partition ensure_partitions prune rule_out_days validate_days'),
            ('patterns', '
                error_pattern error_place')
        ), owners (names) AS (VALUES ('
                add_jobs additions_checked await_results batch_sealed create_batch delete_items
                depend dependencies_added drop_partition enqueue enqueue_once
                ensure_partitions forget_rows job_added jobs_inserted jobs_key_wanted rule_out_days
                seal_batch stream_created validate_days')
        )
        SELECT p.oid, p.oid::regprocedure AS signature, b.settings,
               p.proname = ANY (regexp_split_to_array(o.names, '\s+')) AS is_owners
        FROM owners o, functions f LEFT JOIN bundles b ON b.bundle = f.bundle
        JOIN pg_proc p ON p.pronamespace = 'pgworkd'::regnamespace
                      AND p.proname = ANY (regexp_split_to_array(f.names, '\s+'))
        WHERE b.bundle IS NOT NULL OR f.bundle = 'inline' ORDER BY p.proname
    LOOP
        v_done := v_done || v_function.oid;
        CONTINUE WHEN v_function.settings IS NULL;
        EXECUTE format('ALTER FUNCTION %s SET search_path = %s, pg_temp %s', v_function.signature,
                       CASE WHEN v_function.is_owners THEN 'pg_catalog, pgworkd'
                            ELSE 'pgworkd, pg_catalog' END,
                       regexp_replace(v_function.settings, '(\w+)=(\w+)', 'SET \1 = ''\2''', 'g')
                       || CASE WHEN v_function.is_owners THEN ' SECURITY DEFINER' ELSE '' END);
        IF v_function.is_owners THEN
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', v_function.signature);
        END IF;
    END LOOP;
    SELECT string_agg(p.oid::regprocedure::text, ', ') INTO v_left FROM pg_proc p
    WHERE p.pronamespace = 'pgworkd'::regnamespace AND p.oid <> ALL (v_done)
      AND p.xmin = pg_current_xact_id()::xid;  -- made by this script
    IF v_left IS NOT NULL OR cardinality(v_done) = 0 THEN
        RAISE EXCEPTION 'these functions have no entry in 98_plans.sql: %', coalesce(v_left, 'all')
            USING ERRCODE = 'XX000', HINT = 'Without one they would run with the plans, and by the '
                                            'search_path, of any caller.';
    END IF;
END $$;
