-- Batches: creating, adding, sealing. Whoever adds holds FOR KEY SHARE on the batch to the end of
-- its transaction and inserts into batch_additions, no more: no daemon ever waits for it.

DO $$
BEGIN  -- it has no key: a publication of all tables would refuse each DELETE
    IF (SELECT c.relreplident FROM pg_class c
        WHERE c.oid = 'pgworkd.batch_additions'::regclass) <> 'f' THEN
        ALTER TABLE batch_additions REPLICA IDENTITY FULL;
    END IF;
END $$;

-- Creates a batch: a root, or with p_parent a child. If p_dedupe_key is held by an unfinished root
-- of that name and queue (or by a finished one, until its dedupe_until), or the parent has a child
-- of that name, returns that one. p_dedupe_until, or p_dedupe_for_s from now: how long a finished
-- tree keeps the key; 'infinity': for as long as the tree is kept. p_queue NULL: the parent's. For
-- the other columns see `batches`. Raises PW003 if the parent takes no more. Locks the parent FOR
-- KEY SHARE.
CREATE OR REPLACE FUNCTION create_batch(p_name text, p_queue text DEFAULT NULL,
                                        p_kind text DEFAULT NULL, p_parent uuid DEFAULT NULL,
                                        p_stream boolean DEFAULT false,
                                        p_stream_kind text DEFAULT NULL,
                                        p_final boolean DEFAULT false,
                                        p_max_failures int DEFAULT NULL,
                                        p_on_complete jsonb DEFAULT NULL,
                                        p_on_failure jsonb DEFAULT NULL,
                                        p_dedupe_key text DEFAULT NULL,
                                        p_dedupe_until timestamptz DEFAULT NULL,
                                        p_dedupe_for_s float8 DEFAULT NULL,
                                        p_max_attempts int DEFAULT NULL, p_meta jsonb DEFAULT NULL)
RETURNS TABLE (id uuid, created boolean)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_wrong text := CASE
        WHEN num_nonnulls(p_dedupe_until, p_dedupe_for_s) > 1
            THEN 'p_dedupe_until and p_dedupe_for_s are both given: pass one of them'
        WHEN p_dedupe_for_s <= 0 THEN 'p_dedupe_for_s must be above 0'
        WHEN num_nonnulls(p_dedupe_until, p_dedupe_for_s) > 0 AND p_dedupe_key IS NULL
            THEN 'p_dedupe_until and p_dedupe_for_s need a p_dedupe_key' END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        SELECT b.id, false INTO id, created FROM batches b
        WHERE b.parent_id IS NULL AND p_parent IS NULL AND b.name = p_name
          AND b.dedupe_key = p_dedupe_key AND b.queue = p_queue
              AND (b.tree_finished_at IS NULL OR b.dedupe_until IS NOT NULL)
              AND (b.tree_finished_at IS NULL OR b.dedupe_until > clock())
           OR b.parent_id = p_parent AND b.name = p_name;
        EXIT WHEN FOUND;
        INSERT INTO batches AS b (name, queue, kind, parent_id, stream, stream_kind, final,
                                  max_failures, on_complete, on_failure, dedupe_key, dedupe_until,
                                  max_attempts, meta)
        VALUES (p_name, p_queue, p_kind, p_parent, p_stream, p_stream_kind, p_final, p_max_failures,
                p_on_complete, p_on_failure, p_dedupe_key,
                coalesce(p_dedupe_until, clock() + make_interval(secs => p_dedupe_for_s)),
                p_max_attempts, p_meta)
        ON CONFLICT DO NOTHING
        RETURNING b.id, true INTO id, created;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN NEXT;
END $$;

-- Locks a batch that is to take more FOR KEY SHARE; raises PW003 if it takes no more. p_what: what
-- is to be added, 'jobs' or 'children'. Streamed jobs may still have to add the batch's own jobs
-- when it is sealed: a running job of its stream_kind keeps it open.
CREATE OR REPLACE FUNCTION enter_batch(p_batch uuid, p_what text) RETURNS batches
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batch batches;
    v_why   text;
BEGIN
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch USING ERRCODE = 'PW003',
            HINT = 'Check the id: the batch may have been deleted, or its creation rolled back. '
                   'create_batch() makes one.';
    END IF;
    v_why := CASE
        WHEN v_batch.cancelled_at IS NOT NULL THEN 'was cancelled'
        WHEN v_batch.finished_at IS NOT NULL THEN 'is finished'
        WHEN v_batch.sealed_at IS NULL
            THEN (SELECT 'is sealed' WHERE EXISTS (SELECT FROM batch_additions a
                                                   WHERE a.batch_id = p_batch AND a.seals))
        WHEN v_batch.stream_kind IS NULL OR p_what <> 'jobs'
          OR NOT EXISTS (SELECT FROM jobs j WHERE j.batch_id = p_batch AND j.status = 'running'
                           AND j.kind = v_batch.stream_kind)
            THEN 'is sealed' END;
    IF v_why IS NOT NULL THEN
        RAISE EXCEPTION 'batch % (%) %: it takes no more %', p_batch, v_batch.name, v_why, p_what
            USING ERRCODE = 'PW003',
            HINT = CASE v_why
                        WHEN 'is sealed'
                            THEN 'Add all there is before it is sealed, or create another batch.'
                              ELSE 'Create another batch.' END;
    END IF;
    RETURN v_batch;
END $$;

-- Places a new batch in its tree, and refuses what could not be carried out later: at a callback
-- it would be too late. Frees its dedupe_key if a finished tree has kept it for long enough. Locks
-- the parent FOR KEY SHARE, or that root.
CREATE OR REPLACE FUNCTION batch_created() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_parent batches;
BEGIN
    IF NEW.added + NEW.completed + NEW.dead + NEW.cancelled > 0 OR NEW.finished_at IS NOT NULL THEN
        RAISE EXCEPTION
            'batch "%" comes with counters, as from a dump of data only: '
            'its jobs would be counted twice', NEW.name
            USING ERRCODE = '55000',
                HINT = 'Restore under SET session_replication_role = replica; a new batch begins '
                       'without counters.';
    END IF;
    IF NEW.parent_id IS NOT NULL THEN
        v_parent := enter_batch(NEW.parent_id, 'children');
        NEW.queue := coalesce(NEW.queue, v_parent.queue);
        IF NEW.stream AND v_parent.completed > 0 THEN
            RAISE EXCEPTION 'batch % (%) has completed jobs that would be missing in its child "%"',
                v_parent.id, v_parent.name, NEW.name
                USING ERRCODE = 'PW003',
                    HINT = 'Create children that stream before the parent has jobs.';
        ELSIF v_parent.depth >= 32 THEN
            RAISE EXCEPTION 'batch "%" would be at depth 33 of its tree', NEW.name
                USING ERRCODE = '22023',
                HINT = 'A tree is at most 32 deep: put jobs into fewer batches, '
                       'or let a callback begin another tree.';
        END IF;
        NEW.depth := v_parent.depth + 1;
    ELSE
        NEW.depth := 0;
        IF NEW.dedupe_key IS NOT NULL THEN  -- a key is free at the very instant
            UPDATE batches b SET dedupe_until = NULL
            WHERE b.parent_id IS NULL AND b.name = NEW.name AND b.dedupe_key = NEW.dedupe_key
              AND (b.tree_finished_at IS NULL OR b.dedupe_until IS NOT NULL)
              AND b.tree_finished_at IS NOT NULL AND b.dedupe_until <= clock();
        END IF;
    END IF;
    IF NEW.root_id <> coalesce(v_parent.root_id, NEW.id) THEN
        RAISE EXCEPTION 'batch "%" cannot belong to root %', NEW.name, NEW.root_id
            USING ERRCODE = '22023',
            HINT = 'Leave root_id out: a child belongs to the root of its parent, '
                || coalesce(v_parent.root_id, NEW.id) || '.';
    END IF;
    NEW.root_id := coalesce(v_parent.root_id, NEW.id);
    PERFORM check_callback('on_complete', NEW.on_complete);
    PERFORM check_callback('on_failure', NEW.on_failure);
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER batch_created BEFORE INSERT ON batches FOR EACH ROW
    EXECUTE FUNCTION batch_created();

-- A batch stays where it was created: locks and counters go by its root, and a batch below itself
-- has none.
CREATE OR REPLACE FUNCTION batch_moved() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'batch % (%) cannot be moved', OLD.id, OLD.name USING ERRCODE = '22023',
        HINT = 'Leave parent_id, root_id and depth as they are: '
               'create another batch where one is needed.';
END $$;
CREATE OR REPLACE TRIGGER batch_moved BEFORE UPDATE OF id, parent_id, root_id, depth ON batches
    FOR EACH ROW WHEN ((NEW.id, NEW.parent_id, NEW.root_id, NEW.depth)
                       IS DISTINCT FROM (OLD.id, OLD.parent_id, OLD.root_id, OLD.depth))
    EXECUTE FUNCTION batch_moved();

-- At the end of a transaction that has created a child that streams: sessions that ended jobs of
-- the parent meanwhile could not see the child. (What its own transaction ended is in `added`.)
-- Locks as check_dependencies(), then the root, so that whoever is about to end jobs sees the
-- child; see batch_ended().
CREATE OR REPLACE FUNCTION stream_created() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_parent text;
BEGIN
    PERFORM check_dependencies(), lock_trees(ARRAY[NEW.id]);
    PERFORM fold(ARRAY[NEW.parent_id]);
    SELECT p.name INTO v_parent
    FROM batches c JOIN batches p ON p.id = c.parent_id
    WHERE c.id = NEW.id AND p.completed > c.added;
    IF FOUND THEN
        RAISE EXCEPTION 'batch % (%) has completed jobs that would be missing in its child "%"',
            NEW.parent_id, v_parent, NEW.name
            USING ERRCODE = 'PW003',
                HINT = 'Create children that stream before the parent has jobs.';
    END IF;
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t
                   WHERE t.tgrelid = 'pgworkd.batches'::regclass
                     AND t.tgname = 'stream_created') THEN
        CREATE CONSTRAINT TRIGGER stream_created AFTER INSERT ON batches
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.stream)
                EXECUTE FUNCTION stream_created();
    END IF;
END $$;

-- Raises unless call_back() can insert such a job.
CREATE OR REPLACE FUNCTION check_callback(p_column text, p_job jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_known text[] :=
        '{queue,kind,payload,priority,max_attempts,timeout_s,meta,serialize_key,limit_key}';
    v_wrong text := (SELECT min(k.key) FROM jsonb_object_keys(p_job) AS k (key)
                     WHERE k.key <> ALL (v_known));
BEGIN
    v_wrong := CASE
        WHEN v_wrong IS NOT NULL THEN format('knows no "%s"', v_wrong)
        WHEN p_job ->> 'queue' IS NULL THEN 'names no queue'
        WHEN p_job -> 'payload' ? 'batch'
            THEN 'has a payload with "batch", where the facts of the batch will stand'
        WHEN octet_length(p_job::text) > 1048576 THEN 'is larger than 1 MiB' END;
    IF p_job IS NOT NULL AND v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '% %', p_column, v_wrong USING ERRCODE = '22023',
            HINT = 'Give an object with "queue" and, of ' || array_to_string(v_known[2:], ', ')
                || ', what is needed.';
    END IF;
    PERFORM jsonb_populate_record(NULL::jobs, p_job);  -- raises what is wrong with the values
END $$;

-- Counts a job into its batch, after it was really inserted: ON CONFLICT may have skipped it.
-- Raises PW003 if the batch takes no more. (Jobs inserted as `counted` are skipped: enqueuers have
-- no right to that column. The condition of the trigger is all that jobs without a batch pay.)
-- Locks the batch FOR KEY SHARE.
CREATE OR REPLACE FUNCTION job_added() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM enter_batch(NEW.batch_id, 'jobs');
    INSERT INTO batch_additions (batch_id, added) VALUES (NEW.batch_id, 1);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER jobs_batched AFTER INSERT ON jobs
    FOR EACH ROW WHEN (NEW.batch_id IS NOT NULL AND NEW.counted IS NOT TRUE)
        EXECUTE FUNCTION job_added();

-- At the end of a transaction that has added jobs to a batch: cancels them if the batch was
-- cancelled meanwhile, by a cancel_batch() that did not see them yet. Cancellations since the
-- transaction's snapshot (REPEATABLE READ), or at the same instant, are left to mend_batches().
-- Never waits. Locks as cancel_batch(), all with SKIP LOCKED.
CREATE OR REPLACE FUNCTION additions_checked() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_was  text;
    v_jobs record;
BEGIN
    IF (SELECT b.cancelled_at FROM batches b WHERE b.id = NEW.batch_id) IS NULL
       -- one row of many has done it
       OR current_setting('pgworkd.additions_checked', true) = NEW.batch_id::text THEN
        RETURN NULL;
    END IF;
    v_was := set_no_wait('on');
    LOOP
        SELECT s.waiting, s.running INTO v_jobs FROM stop_jobs(ARRAY[NEW.batch_id], 10000, true) s;
        EXIT WHEN cardinality(v_jobs.waiting || v_jobs.running) = 0;
        PERFORM archive(v_jobs.waiting, 'cancelled', 'its batch was cancelled', false);
    END LOOP;
    PERFORM set_no_wait(v_was), set_config('pgworkd.additions_checked', NEW.batch_id::text, true);
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t
                   WHERE t.tgrelid = 'pgworkd.batch_additions'::regclass
                     AND t.tgname = 'additions_checked') THEN
        CREATE CONSTRAINT TRIGGER additions_checked AFTER INSERT ON batch_additions
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NOT NEW.seals)
                EXECUTE FUNCTION additions_checked();
    END IF;
END $$;

-- Adds a job for each payload, counted at once; returns their ids, in that order (p_ids: drawn by
-- the caller). What is not given is the batch's. Raises PW003 if the batch takes no more. Locks
-- the batch FOR KEY SHARE.
CREATE OR REPLACE FUNCTION add_jobs(p_batch uuid, p_payloads jsonb[], p_kind text DEFAULT NULL,
                                    p_queue text DEFAULT NULL, p_priority int DEFAULT NULL,
                                    p_run_at timestamptz DEFAULT NULL,
                                    p_max_attempts int DEFAULT NULL,
                                    p_timeout_s float8 DEFAULT NULL, p_meta jsonb DEFAULT NULL,
                                    p_ids uuid[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batch batches := enter_batch(p_batch, 'jobs');
    v_ids   uuid[];
BEGIN
    WITH added AS (
        INSERT INTO jobs (id, batch_id, counted, queue, kind, payload, priority, run_at,
                          max_attempts, timeout_s, meta)
        SELECT coalesce(p.id, new_id()), p_batch, true, coalesce(p_queue, v_batch.queue),
               coalesce(p_kind, v_batch.kind), p.payload,
               coalesce(p_priority, 0), coalesce(p_run_at, clock()),
               coalesce(p_max_attempts, v_batch.max_attempts), p_timeout_s, p_meta
        FROM unnest(p_payloads, p_ids) WITH ORDINALITY AS p (payload, id, place) ORDER BY p.place
        RETURNING id
    )
    SELECT coalesce(array_agg(a.id), '{}') INTO v_ids FROM added a;
    IF cardinality(v_ids) > 0 THEN
        INSERT INTO batch_additions (batch_id, added) VALUES (p_batch, cardinality(v_ids));
    END IF;
    RETURN v_ids;
END $$;

-- Seals a batch: when the caller commits, nothing more can be added to it, and if nothing is left
-- to do, it is finished. False if it was sealed, cancelled or finished before. Raises PW003 if
-- there is no such batch, or if its parent still streams into it: then it is sealed when the
-- parent is finished. Does not wait for transactions that add. Locks the batch FOR KEY SHARE.
CREATE OR REPLACE FUNCTION seal_batch(p_batch uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batch  batches;
    v_parent text;
BEGIN
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch
            USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    ELSIF num_nonnulls(v_batch.sealed_at, v_batch.cancelled_at, v_batch.finished_at) > 0
          OR EXISTS (SELECT FROM batch_additions a WHERE a.batch_id = p_batch AND a.seals) THEN
        RETURN false;
    ELSIF v_batch.stream THEN
        v_parent := (SELECT p.name FROM batches p
                     WHERE p.id = v_batch.parent_id AND p.finished_at IS NULL);
        IF v_parent IS NOT NULL THEN
            RAISE EXCEPTION 'batch % (%) cannot be sealed while % streams into it', p_batch,
                v_batch.name, v_parent
                USING ERRCODE = 'PW003',
                    HINT = 'Seal the parent: when that is finished this one is sealed by itself.';
        END IF;
    END IF;
    INSERT INTO batch_additions (batch_id, seals) VALUES (p_batch, true);
    RETURN true;
END $$;

-- At the end of a transaction that seals: carries it out, for all batches at once, so that trees
-- are locked in their order. Seals under REPEATABLE READ, which might not see other ends, are left
-- to the next one, or to mend_batches(). Locks as check_dependencies(), then the roots.
CREATE OR REPLACE FUNCTION batch_sealed() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_batches uuid[];
BEGIN
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
        v_batches := ARRAY(SELECT DISTINCT a.batch_id FROM batch_additions a WHERE a.seals);
        IF cardinality(v_batches) > 0 THEN
            -- its turn may come later, but jobs are locked before trees
            PERFORM check_dependencies();
            PERFORM lock_trees(v_batches);
            PERFORM fold(v_batches);
            PERFORM advance(v_batches, true);
        END IF;
    END IF;
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t
                   WHERE t.tgrelid = 'pgworkd.batch_additions'::regclass
                     AND t.tgname = 'batch_sealed') THEN
        CREATE CONSTRAINT TRIGGER batch_sealed AFTER INSERT ON batch_additions
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.seals)
                EXECUTE FUNCTION batch_sealed();
    END IF;
END $$;
