-- Signals: alerts. A rule sends messages: the first about a group of errors at once, unless it has
-- sent one within bundle_s; then the next one has all that came meanwhile. A message is composed
-- when it is sent, of all that is untold. What it has told is noted in the transaction that
-- completes its job, by told().

-- Which deaths make an alert: a job of `kind` in `queue`, which sends it. Declared by code.
CREATE TABLE IF NOT EXISTS alert_rules (
    name         name_text PRIMARY KEY,
    queue name_text NOT NULL, kind name_text NOT NULL,
    queues       text[],             -- deaths in these only; NULL: in all
    on_new       boolean NOT NULL DEFAULT true,  -- at the first death of a group
    deaths       integer CONSTRAINT deaths_must_be_1_to_a_million
                 CHECK (deaths BETWEEN 1 AND 1000000),  -- or at this many of a group
    within_s     integer NOT NULL DEFAULT 600 CONSTRAINT within_s_must_be_1_to_a_day
                 CHECK (within_s BETWEEN 1 AND 86400),  -- ... within this time
    cooldown_s   integer NOT NULL DEFAULT 3600 CONSTRAINT cooldown_s_must_be_0_to_30_days
                 CHECK (cooldown_s BETWEEN 0 AND 2592000),  -- between two alerts of one group
    bundle_s     integer NOT NULL DEFAULT 300 CONSTRAINT bundle_s_must_be_0_to_a_day
                 CHECK (bundle_s BETWEEN 0 AND 86400),  -- between two messages
    job_id uuid, job_at timestamptz, -- the last job, and when it was inserted
    updated_at   timestamptz NOT NULL DEFAULT clock()
);
-- What each rule has told of a group, and when it is to tell the rest.
CREATE TABLE IF NOT EXISTS alerts (
    rule text NOT NULL, group_id bigint NOT NULL,
    told         bigint NOT NULL DEFAULT 0,  -- so many of the group's deaths need no more telling
    at           timestamptz,        -- since then; NULL: there were none before
    many_at      timestamptz,        -- when there were last as many as the rule's `deaths`
    due_at       timestamptz,        -- when the others are to be told; NULL: there are none
    reason       text,               -- of that: new, many, more
    PRIMARY KEY (rule, group_id)
);
CREATE INDEX IF NOT EXISTS alerts_due ON alerts (rule, due_at) WHERE due_at IS NOT NULL;

-- True if p_at lies less than p_for_s before p_now, and not after it, as after a step back of the
-- clock. Locks nothing.
CREATE OR REPLACE FUNCTION is_since(p_at timestamptz, p_now timestamptz, p_for_s int)
RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN coalesce(p_at > p_now - make_interval(secs => p_for_s) AND p_at <= p_now, false);

-- True if a message is not due yet. What lies more than the cool-down ahead was noted before a step
-- back of the clock. Locks nothing.
CREATE OR REPLACE FUNCTION is_later(p_due_at timestamptz, p_cooldown_s int)
RETURNS boolean LANGUAGE sql STABLE
    RETURN coalesce(p_due_at > clock()
                    AND p_due_at <= clock() + make_interval(secs => p_cooldown_s), true);

-- Notes when a rule's next message about a group is due: at once if the group is new, if the rule's
-- number of deaths is reached, or if they are ten times those that were told (reasons `new`, `many`
-- and `more`); at the end of the rule's cool-down if it has told of the group within that. One that
-- it has told of before: at once, unless only numbers matter to it. Locks the row.
CREATE OR REPLACE FUNCTION note_alert(p_rule alert_rules, p_group bigint, p_deaths bigint,
                                      p_is_new boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now    timestamptz := clock();
    v_old    alerts;
    v_recent bigint;  -- deaths within the rule's time
    v_many   boolean := false;
    v_cools  boolean;
    v_due_at timestamptz := v_now;
BEGIN
    SELECT a.* INTO v_old FROM alerts a WHERE a.rule = p_rule.name AND a.group_id = p_group
    FOR UPDATE;
    v_cools := is_since(v_old.at, v_now, p_rule.cooldown_s);
    IF p_rule.deaths <= p_deaths AND NOT is_since(v_old.many_at, v_now, p_rule.cooldown_s) THEN
        SELECT count(*) INTO v_recent FROM (
            SELECT FROM deaths d
            WHERE d.group_id = p_group AND d.at > v_now - make_interval(secs => p_rule.within_s)
            LIMIT 1000000) d;
        v_many := v_recent >= p_rule.deaths;
    END IF;
    IF NOT (p_rule.on_new AND p_is_new OR v_many
            OR coalesce(v_old.told > 0 AND p_deaths >= 10 * v_old.told, false)) THEN
        IF v_old.due_at IS NOT NULL OR v_old.at IS NULL OR NOT (v_cools OR p_rule.on_new) THEN
            RETURN;
        ELSIF v_cools THEN
            v_due_at := v_old.at + make_interval(secs => p_rule.cooldown_s);
        END IF;
    END IF;
    -- Deaths before count if the group is new, or was told of within the cool-down.
    INSERT INTO alerts AS a (rule, group_id, told, at, many_at, due_at, reason)
    VALUES (p_rule.name, p_group,
            CASE WHEN v_many AND NOT p_is_new THEN p_deaths - v_recent ELSE 0 END,
            CASE WHEN v_many AND NOT p_is_new
                 THEN v_now - make_interval(secs => p_rule.within_s) END,
            CASE WHEN v_many THEN v_now END, v_due_at,
            CASE WHEN p_rule.on_new AND p_is_new THEN 'new' WHEN v_many THEN 'many'
                 ELSE 'more' END)
    ON CONFLICT (rule, group_id) DO UPDATE SET
        told = CASE WHEN v_many AND a.due_at IS NULL AND NOT v_cools
                    THEN greatest(a.told, excluded.told) ELSE a.told END,
        at = CASE WHEN v_many AND a.due_at IS NULL AND NOT v_cools THEN excluded.at ELSE a.at END,
        many_at = coalesce(excluded.many_at, a.many_at),
        reason = CASE WHEN a.due_at <= v_now THEN a.reason ELSE excluded.reason END,
        due_at = least(a.due_at, excluded.due_at);
END $$;

-- The rules that have something to tell now, and may: no message of theirs is on its way, and the
-- last one was made bundle_s ago, or if it has died, a cool-down ago. Locks nothing.
CREATE OR REPLACE FUNCTION due_rules() RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT r.name::text FROM alert_rules r LEFT JOIN jobs j ON j.id = r.job_id
        WHERE NOT is_since(r.job_at, clock(), CASE j.status WHEN 'dead'
                           THEN greatest(r.bundle_s, r.cooldown_s) ELSE r.bundle_s END)
          AND EXISTS (SELECT FROM alerts a WHERE a.rule = r.name AND a.due_at IS NOT NULL
                        AND NOT is_later(a.due_at, r.cooldown_s))
          AND coalesce(j.status NOT IN ('pending', 'running', 'failed', 'blocked'), true)
        ORDER BY r.name)
$$;

-- In how many seconds a rule has something to tell and may; less than 0: since then; NULL: none has
-- anything to tell. Locks nothing.
CREATE OR REPLACE FUNCTION next_alert_s() RETURNS float8 LANGUAGE sql STABLE AS $$
    SELECT extract(epoch FROM min(greatest(
               d.due_at, r.job_at + make_interval(secs => CASE j.status WHEN 'dead'
                   THEN greatest(r.bundle_s, r.cooldown_s) ELSE r.bundle_s END))) - clock())::float8
    FROM alert_rules r LEFT JOIN jobs j ON j.id = r.job_id
    CROSS JOIN LATERAL (SELECT min(a.due_at) AS due_at FROM alerts a
                        WHERE a.rule = r.name AND a.due_at IS NOT NULL) d
    WHERE d.due_at IS NOT NULL
$$;

-- One part of count_deaths(): inserts the job of these rules' next message. Locks the rules in
-- order of name.
CREATE OR REPLACE FUNCTION make_alerts(p_rules text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_rule alert_rules;
    v_id   uuid;
BEGIN
    FOR v_rule IN SELECT r.* FROM alert_rules r WHERE r.name = ANY (p_rules)
                  ORDER BY r.name FOR UPDATE LOOP
        INSERT INTO jobs (queue, kind, payload)
        VALUES (v_rule.queue, v_rule.kind, jsonb_build_object('rule', v_rule.name))
        RETURNING id INTO v_id;
        IF v_id IS NULL THEN
            PERFORM raise_kept();
        END IF;
        UPDATE alert_rules r SET job_id = v_id, job_at = clock() WHERE r.name = v_rule.name;
    END LOOP;
END $$;

-- Notes that a rule has told of these groups, of each the deaths up to this number; what has come
-- since is due later. In the transaction that completes the message's job: if that does not commit,
-- the message is sent again. Waits for count_deaths(); locks the rows.
CREATE OR REPLACE FUNCTION told(p_rule text, p_groups bigint[], p_deaths bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_cooldown_s int := (SELECT r.cooldown_s FROM alert_rules r WHERE r.name = p_rule);
BEGIN
    PERFORM pg_advisory_xact_lock(1886873445, 10);  -- nobody counts meanwhile
    DELETE FROM alerts a WHERE a.rule = p_rule AND a.group_id = ANY (p_groups)
        AND NOT EXISTS (SELECT FROM error_groups g WHERE g.id = a.group_id);
    UPDATE alerts a
    SET told = t.deaths, at = clock(),
        due_at = CASE WHEN g.deaths >= 10 * t.deaths THEN clock()
                      WHEN g.deaths > t.deaths
                      THEN clock() + make_interval(secs => coalesce(v_cooldown_s, 0)) END,
        reason = CASE WHEN g.deaths > t.deaths THEN 'more' END
    FROM unnest(p_groups, p_deaths) AS t (group_id, deaths)
    JOIN error_groups g ON g.id = t.group_id
    WHERE a.rule = p_rule AND a.group_id = t.group_id AND a.told <= t.deaths;
END $$;

-- Stores the alert rules of a daemon's code, rows of alert_rules as a JSON array, and that they are
-- declared now. Deletes those that no daemon has declared for a day and no worker has a handler of:
-- what dies while all daemons of an application are down still makes its alerts. Locks the rows
-- of these rules in order of name, others with SKIP LOCKED.
CREATE OR REPLACE FUNCTION declare_alerts(p_rules jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO alert_rules AS r (name, queue, kind, queues, on_new, deaths, within_s, cooldown_s,
                                  bundle_s)
    SELECT n.name, n.queue, n.kind, n.queues, n.on_new, n.deaths, n.within_s, n.cooldown_s,
           coalesce(n.bundle_s, 300)
    FROM jsonb_populate_recordset(NULL::alert_rules, p_rules) n ORDER BY n.name
    ON CONFLICT (name) DO UPDATE SET
        queue = excluded.queue, kind = excluded.kind, queues = excluded.queues,
        on_new = excluded.on_new, deaths = excluded.deaths, within_s = excluded.within_s,
        cooldown_s = excluded.cooldown_s, bundle_s = excluded.bundle_s, updated_at = clock();
    DELETE FROM alert_rules r WHERE r.name = ANY (ARRAY(
        SELECT o.name::text FROM alert_rules o
        WHERE o.updated_at < clock() - interval '1 day'
          AND NOT EXISTS (SELECT FROM workers w WHERE w.lost_at IS NULL AND o.kind = ANY (w.kinds))
        ORDER BY o.name FOR UPDATE SKIP LOCKED));
END $$;
