-- The locks of queues, and transactions that must not wait for one.

-- True while nothing may be waited for, nor a lock be held that others wait for: in a settle that
-- skips what is locked, in maintenance, and in verbs that an application may call in a transaction
-- that lasts. What cannot be done then is put off.
CREATE OR REPLACE FUNCTION no_wait() RETURNS boolean LANGUAGE sql STABLE
    RETURN coalesce(current_setting('pgworkd.no_wait', true), '') NOT IN ('', 'frees');

-- Says so from now on, to the end of the transaction or until the answer, what held before, is
-- given here. 'apply': by apply_effects() itself; 'frees': by it, too, once it has locked the
-- queues, so that it may wait for what they guard.
CREATE OR REPLACE FUNCTION say_no_wait(p_say text) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_was text := coalesce(current_setting('pgworkd.no_wait', true), '');
BEGIN
    PERFORM set_config('pgworkd.no_wait', p_say, true);
    RETURN v_was;
END $$;

-- Locks a queue to the end of the transaction. Locks of different queues may coincide; that only
-- costs time.
CREATE OR REPLACE FUNCTION lock_queue(p_queue text) RETURNS void LANGUAGE sql VOLATILE
    RETURN pg_advisory_xact_lock(1886873446, hashtext(p_queue));

-- Locks these queues, all in the same order whoever does so. Who frees keys of several queues needs
-- all of them at once: to lock one more later would be out of order. Does nothing for who may not
-- wait: see promote().
CREATE OR REPLACE FUNCTION lock_queues(p_queues text[]) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT lock_queue(q.queue)
    FROM (SELECT u.queue FROM unnest(p_queues) AS u (queue) WHERE NOT no_wait() GROUP BY u.queue
          ORDER BY hashtext(u.queue)) q
$$;
