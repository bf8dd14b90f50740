-- The locks of queues, and transactions that must not wait for one.

-- True in a transaction that must not wait for locks, nor hold those that others wait for: a
-- settle that skips locked rows, maintenance, and verbs that an application may call in a long
-- transaction. What cannot be done then is deferred, see put_off().
CREATE OR REPLACE FUNCTION no_wait() RETURNS boolean LANGUAGE sql STABLE
    RETURN coalesce(current_setting('pgworkd.no_wait', true), '') NOT IN ('', 'frees');

-- Sets that until the end of the transaction, or until it is called with its answer, the previous
-- value. 'apply': set by apply_effects(); 'frees': by the same, once it has locked the queues, so
-- that it may wait for what they guard.
CREATE OR REPLACE FUNCTION set_no_wait(p_value text) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_was text := coalesce(current_setting('pgworkd.no_wait', true), '');
BEGIN
    PERFORM set_config('pgworkd.no_wait', p_value, true);
    RETURN v_was;
END $$;

-- True in a transaction that defers all effects of the ends of jobs, since something refuses one of
-- them: see put_off().
CREATE OR REPLACE FUNCTION defers() RETURNS boolean LANGUAGE sql STABLE
    RETURN coalesce(current_setting('pgworkd.no_wait', true), '') = 'defer';

-- For a settle: defers its effects. Returns p_attempts, as unlocked() does. Locks nothing.
CREATE OR REPLACE FUNCTION deferred(p_attempts int[]) RETURNS int[]
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_no_wait('defer');
    RETURN p_attempts;
END $$;

-- Locks a queue until the end of the transaction. Two queues may share a lock, which only costs
-- time.
CREATE OR REPLACE FUNCTION lock_queue(p_queue text) RETURNS void LANGUAGE sql VOLATILE
    RETURN pg_advisory_xact_lock(1886873446, hashtext(p_queue));

-- Locks these queues, always in the same order. A caller that frees keys of several queues needs
-- all of them at once: to lock one more later would be out of order. Does nothing in a transaction
-- that must not wait: see promote().
CREATE OR REPLACE FUNCTION lock_queues(p_queues text[]) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT lock_queue(q.queue)
    FROM (SELECT u.queue FROM unnest(p_queues) AS u (queue) WHERE NOT no_wait() GROUP BY u.queue
          ORDER BY hashtext(u.queue)) q
$$;
