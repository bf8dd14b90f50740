-- Signals: deaths, and the groups of errors that they have.

-- One row per death of a job, in the transaction in which it died. `group_id`: NULL until
-- count_deaths() has read it. `error_type` and `error` are those of the attempt: a retry, or the
-- end of the job's history, takes nothing away.
CREATE TABLE IF NOT EXISTS deaths (
    job_id uuid NOT NULL, attempt integer NOT NULL,
    at           timestamptz NOT NULL DEFAULT clock(),
    queue text NOT NULL, kind text NOT NULL,
    error_type text NOT NULL, error text NOT NULL,   -- its first 1,000 characters
    place        text NOT NULL DEFAULT '',           -- see error_place()
    group_id     bigint,
    PRIMARY KEY (job_id, attempt)
);
CREATE INDEX IF NOT EXISTS deaths_new ON deaths (at) WHERE group_id IS NULL;
CREATE INDEX IF NOT EXISTS deaths_group ON deaths (group_id, at);
CREATE INDEX IF NOT EXISTS deaths_at ON deaths (at);

-- One row per queue, kind and error_group() of a death, as long as deaths of it are kept.
CREATE TABLE IF NOT EXISTS error_groups (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text NOT NULL, kind text NOT NULL, error_group uuid NOT NULL,
    error_type text NOT NULL, pattern text NOT NULL,  -- see error_pattern()
    place        text NOT NULL DEFAULT '',            -- see error_place()
    sample_id    uuid NOT NULL,      -- the job that died last
    deaths       bigint NOT NULL,    -- ever
    first_at timestamptz NOT NULL, last_at timestamptz NOT NULL,
    muted_until  timestamptz,        -- no alert before
    UNIQUE (queue, kind, error_group)
);
CREATE INDEX IF NOT EXISTS error_groups_last ON error_groups (last_at);

-- An error's first line without what differs from job to job: UUIDs, addresses, paths, quoted
-- text, hexadecimal and other numbers; 500 characters of it at most. What tells errors apart stays:
-- statuses of HTTP, exit codes, names of keys, columns, constraints and attributes. Reads 1,000
-- characters, so that it takes no longer for 1 MB.
CREATE OR REPLACE FUNCTION error_pattern(p_message text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_text text := left(coalesce(p_message, ''), 1000);
    v_cut  boolean := length(v_text) = 1000;
    v_step text[];
BEGIN
    v_text := ltrim(v_text, E' \t\r\n');
    v_cut := v_cut AND strpos(v_text, E'\n') = 0;
    v_text := translate(rtrim(split_part(v_text, E'\n', 1), E' \t\r'), E'\x01', '');
    FOREACH v_step SLICE 1 IN ARRAY ARRAY[
        ARRAY['^lost: worker .* \(id ', 'lost: worker <name> (id '],
        ARRAY['[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}', '<uuid>'],
        ARRAY['[a-z][a-z0-9+.-]*://[^\s''"<>]+', '<url>'],
        ARRAY['[\w.+-]+@[\w-]+(\.[\w-]+)+', '<email>'],
        ARRAY['\meyJ[\w-]+\.[\w-]+(\.[\w-]*)?', '<token>'],
        -- names that belong to the code: their quotes go
        ARRAY['\m(KeyError|attribute|argument|arguments|column|constraint|relation|table|index|'
              'module named|import name|NameError: name|parameter|function|type)(:? )'
              '["'']([a-z_][\w.$]{0,62})["'']', '\1\2\3'],
        ARRAY['["'']([a-z_][\w.$]{0,62})["'']( object (?:has|is)\M)', '\1\2'],
        -- numbers that say which error it is: a mark before them keeps them
        ARRAY['(?c)''?\m([45]\d\d)((?: [A-Z][A-Za-z]+)+)''?', E'\x01\\1\\2'],
        ARRAY['\m([45]\d\d)(?=, message=)', E'\x01\\1'],
        ARRAY['\m(HTTP(?:/[\d.]+)?|status|code|errno|winerror|signal|sqlstate|rc|returncode|'
              'exited with|answered|returned|replied|responded with)([ :=\[]{1,2}-?)(\d{1,3})'
              '(?![.,]?\d)\M', E'\\1\\2\x01\\3'],
        ARRAY['"[^"]*"', '<text>'],
        ARRAY['(?<!\w)''[^'']*''(?!\w)', '<text>'],
        ARRAY['`[^`]*`', '<text>'],
        ARRAY['(?<![\w/.])\.{0,2}(/[\w.@%+~-]+){2,}/?', '<path>'],
        ARRAY['\m[a-z]:\\[^\s:]+', '<path>'],
        ARRAY['(?<![\w/.<>])[\w.@%+~-]+(/[\w.@%+~-]+)*/[\w@%+~-]+\.[a-z]\w{0,5}\M', '<path>'],
        ARRAY['\m\d{1,3}(\.\d{1,3}){3}(:\d+)?\M', '<address>'],
        ARRAY['(?<![\w:])([0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?![\w:])', '<address>'],
        ARRAY['\m0x[0-9a-f]+\M', '<hex>'],
        ARRAY['\m(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{6,}\M', '<hex>'],
        ARRAY['\m[a-f]{8,}\M', '<hex>'],
        ARRAY['(?c)\m(?=[A-Z0-9-]*\d)[A-Z0-9]+(-[A-Z0-9]+){2,}\M', '<id>'],
        ARRAY['(?<![\d\x01]|[\d\x01][.,])\m(\d+([.,]\d+)? ?'
              '(ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)(?![a-z_]) ?)+(?<! )', '<time>'],
        ARRAY['(?<![\d\x01])\d+([.,]\d+)*', '<n>'],
        ARRAY[E'\x01', '']]
    LOOP
        v_text := regexp_replace(v_text, v_step[1], v_step[2], 'gi');
    END LOOP;
    IF v_cut THEN  -- the end of a quoted text may be missing
        v_text := regexp_replace(v_text, '(["`]|(?<!\w)'')[^"`'']*$', '<text>');
    END IF;
    RETURN left(v_text, 500);
END $$;

-- Where an error was raised, as the traceback of Python in its entry of `errors` says: file and
-- function of the innermost frame that is of the application; of all, if none is. No line, which
-- each release moves. Empty without such a traceback.
CREATE OR REPLACE FUNCTION error_place(p_error jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_frame text := (
        SELECT l.line FROM unnest(string_to_array(left(p_error ->> 'traceback', 20000), E'\n'))
            WITH ORDINALITY AS l (line, place)
        WHERE l.line LIKE '  File "%", line %, in %'
        ORDER BY l.line LIKE '  File "<%'
              OR l.line ~ '[/\\](site-packages|dist-packages|python\d[.\d]*)[/\\]', l.place DESC
        LIMIT 1);
BEGIN
    RETURN coalesce(left(regexp_replace(split_part(v_frame, '"', 2), '^.*[/\\]', '')
                         || ', ' || substring(v_frame FROM ', in (.*)$'), 200), '');
END $$;

-- The same for errors that differ only in what error_pattern() leaves out. p_place: error_place().
CREATE OR REPLACE FUNCTION error_group(p_type text, p_message text, p_place text DEFAULT '')
RETURNS uuid
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN left(encode(sha256(convert_to(
        coalesce(p_type, '') || ': ' || error_pattern(p_message)
            || coalesce(E'\n' || nullif(p_place, ''), ''), 'UTF8')), 'hex'), 32)::uuid;
END $$;

-- What a dead job's last attempt said, after its type: as the column `error`, which has no line
-- breaks. Locks nothing.
CREATE OR REPLACE FUNCTION error_message(p_job jobs) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_type    text := p_job.errors -> -1 ->> 'type';
    v_message text := p_job.errors -> -1 ->> 'message';
BEGIN
    IF coalesce(v_message, '') = '' OR strpos(v_message, E'\n') = 0 THEN
        RETURN coalesce(p_job.error, '');
    END IF;
    RETURN coalesce(v_type || ': ', '') || v_message;
END $$;

-- Notes these jobs' deaths, those among them that are dead. Locks nothing.
CREATE OR REPLACE FUNCTION note_deaths(p_ids uuid[]) RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO deaths (job_id, attempt, at, queue, kind, error_type, error, place)
    SELECT j.id, j.attempts, coalesce(j.failed_at, clock()), j.queue, coalesce(j.kind, j.queue),
           left(coalesce(j.errors -> -1 ->> 'type', ''), 200), left(error_message(j), 1000),
           error_place(j.errors -> -1)
    FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead'
    ON CONFLICT (job_id, attempt) DO NOTHING
$$;

-- Counts up to p_limit deaths that are new in their groups: see count_these(); and inserts the jobs
-- of the alerts that are due, also those of earlier deaths: see make_alerts(). Returns how many
-- deaths there were; NULL: another session does it. Locks deaths with SKIP LOCKED, then groups in
-- order, then rules.
CREATE OR REPLACE FUNCTION count_deaths(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_keys   text[];
    v_deaths int;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 10) THEN
        RETURN NULL;
    END IF;
    v_keys := ARRAY(
        SELECT d.job_id || ' ' || d.attempt FROM deaths d
        WHERE d.group_id IS NULL AND NOT is_refused('count_deaths', d.job_id || ' ' || d.attempt)
        ORDER BY d.at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    SELECT coalesce(sum(p.counted::int), 0) INTO v_deaths
    FROM in_parts('count_deaths', v_keys, 'count_these(text[])') AS p (counted);
    PERFORM in_parts('make_alerts', due_rules(), 'make_alerts(text[])');
    RETURN v_deaths;
END $$;

-- One part of count_deaths(): counts these deaths, "job attempt" of each, and notes for each rule
-- and group when the next alert is due: see note_alert(). Not for groups that are muted, or of that
-- rule's own jobs. All in one transaction, so each death counts once. Locks groups in order.
CREATE OR REPLACE FUNCTION count_these(p_keys text[]) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_deaths int := 0;
    v_group  record;
BEGIN
    FOR v_group IN
        WITH new AS MATERIALIZED (
            SELECT d.job_id, d.attempt, d.at, d.queue, d.kind, d.error_type, d.error,
                   d.place, error_group(d.error_type, d.error, d.place) AS error_group
            FROM (SELECT split_part(k, ' ', 1)::uuid AS job_id,
                         split_part(k, ' ', 2)::int AS attempt
                  FROM unnest(p_keys) k) u
            JOIN deaths d ON d.job_id = u.job_id AND d.attempt = u.attempt
        ), counted AS (
            INSERT INTO error_groups AS g (queue, kind, error_group, error_type, pattern, place,
                                           sample_id, deaths, first_at, last_at)
            SELECT n.queue, n.kind, n.error_group, min(n.error_type),
                   error_pattern((array_agg(n.error ORDER BY n.at DESC))[1]), min(n.place),
                   (array_agg(n.job_id ORDER BY n.at DESC))[1], count(*), min(n.at), max(n.at)
            FROM new n GROUP BY n.queue, n.kind, n.error_group
            ORDER BY n.queue, n.kind, n.error_group
            ON CONFLICT (queue, kind, error_group) DO UPDATE SET
                deaths = g.deaths + excluded.deaths,
                sample_id = CASE WHEN excluded.last_at >= g.last_at THEN excluded.sample_id
                                 ELSE g.sample_id END,
                first_at = least(g.first_at, excluded.first_at),
                last_at = greatest(g.last_at, excluded.last_at)
            RETURNING g.*, g.deaths = (SELECT count(*) FROM new n
                                       WHERE n.queue = g.queue AND n.kind = g.kind
                                         AND n.error_group = g.error_group) AS is_new
        ), marked AS (
            UPDATE deaths d SET group_id = c.id
            FROM new n JOIN counted c ON c.queue = n.queue AND c.kind = n.kind
                AND c.error_group = n.error_group
            WHERE d.job_id = n.job_id AND d.attempt = n.attempt
            RETURNING d.group_id
        )
        SELECT c.id, c.queue, c.kind, c.deaths, c.is_new, c.muted_until, m.marked
        FROM counted c JOIN (SELECT k.group_id, count(*) AS marked FROM marked k GROUP BY 1) m
            ON m.group_id = c.id
    LOOP
        v_deaths := v_deaths + v_group.marked;
        PERFORM note_alert(r, v_group.id, v_group.deaths, v_group.is_new) FROM alert_rules r
        WHERE (r.queues IS NULL OR v_group.queue = ANY (r.queues))
          AND (r.queue <> v_group.queue OR r.kind <> v_group.kind)
          AND coalesce(v_group.muted_until <= clock(), true);
    END LOOP;
    IF v_deaths < cardinality(p_keys) THEN
        PERFORM raise_kept();
    END IF;
    RETURN v_deaths;
END $$;

-- Mutes a group of errors until p_until; NULL: not any more. Audited. False: there is none of this
-- id. Locks the group.
CREATE OR REPLACE FUNCTION mute_errors(p_group bigint, p_until timestamptz, p_who text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_old error_groups;
BEGIN
    SELECT * INTO v_old FROM error_groups g WHERE g.id = p_group FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE error_groups g SET muted_until = p_until WHERE g.id = p_group;
    INSERT INTO audit (who, what, queue, before, after)
    VALUES (who(p_who), 'mute', v_old.queue,
            jsonb_build_object('group', p_group, 'muted_until', v_old.muted_until),
            jsonb_build_object('group', p_group, 'muted_until', p_until));
    RETURN true;
END $$;

-- The dead jobs there are, by queue, kind and group of errors, those that died from p_since on
-- (NULL: all); `new`: the group's first death was not before p_new_since. `group_id` NULL: not
-- counted yet, or from before a version that counts. Locks nothing.
CREATE OR REPLACE FUNCTION dead_groups(p_since timestamptz DEFAULT NULL,
                                       p_new_since timestamptz DEFAULT NULL,
                                       p_queue text DEFAULT NULL)
RETURNS TABLE (group_id bigint, queue text, kind text, error_type text, pattern text, dead bigint,
               first_at timestamptz, last_at timestamptz, is_new boolean, muted_until timestamptz,
               sample_id uuid)
LANGUAGE sql STABLE AS $$
    WITH found AS (
        SELECT j.id, j.queue::text AS queue, coalesce(j.kind, j.queue)::text AS kind, j.failed_at,
               d.group_id, CASE WHEN d.group_id IS NULL THEN error_message(j) END AS error,
               coalesce(j.errors -> -1 ->> 'type', '') AS type
        FROM jobs j LEFT JOIN deaths d ON d.job_id = j.id AND d.attempt = j.attempts
        WHERE j.status = 'dead' AND (p_queue IS NULL OR j.queue = p_queue)
          AND (p_since IS NULL OR j.failed_at >= p_since)
    )
    SELECT f.group_id, f.queue, f.kind, g.error_type, g.pattern, count(*), min(f.failed_at),
           max(f.failed_at), g.first_at >= p_new_since, g.muted_until,
           (array_agg(f.id ORDER BY f.failed_at DESC, f.id))[1]
    FROM found f JOIN error_groups g ON g.id = f.group_id
    GROUP BY f.group_id, f.queue, f.kind, g.id
    UNION ALL
    SELECT NULL, a.queue, a.kind, a.type, a.pattern, sum(a.dead)::bigint, min(a.first_at),
           max(a.last_at), min(a.first_at) >= p_new_since, NULL,
           (array_agg(a.sample_id ORDER BY a.last_at DESC, a.sample_id))[1]
    FROM (
        SELECT l.queue, l.kind, l.type, error_pattern(l.error) AS pattern, l.dead, l.first_at,
               l.last_at, l.sample_id
        FROM (SELECT f.queue, f.kind, f.type,
                     left(f.error, 1000) AS error,
                     count(*) AS dead, min(f.failed_at) AS first_at, max(f.failed_at) AS last_at,
                     (array_agg(f.id ORDER BY f.failed_at DESC, f.id))[1] AS sample_id
              FROM found f LEFT JOIN error_groups g ON g.id = f.group_id WHERE g.id IS NULL
              GROUP BY 1, 2, 3, 4) l
    ) a
    GROUP BY a.queue, a.kind, a.type, a.pattern
$$;

-- Retention of deaths and of groups of errors without one; see roll_up(). Deaths of jobs that are
-- still dead go with those, muted groups when they are no longer muted. Locks rows with SKIP
-- LOCKED.
CREATE OR REPLACE FUNCTION forget_deaths(p_keep_dead_days int, p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_rows int;
    v_old  timestamptz := clock() - make_interval(days => p_keep_dead_days);
BEGIN
    DELETE FROM deaths d WHERE d.ctid = ANY (ARRAY(
        SELECT o.ctid FROM deaths o WHERE o.at < v_old AND o.group_id IS NOT NULL
          AND NOT EXISTS (SELECT FROM jobs j WHERE j.id = o.job_id AND j.attempts = o.attempt
                            AND j.status = 'dead')
        ORDER BY o.at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    WITH gone AS (
        DELETE FROM error_groups g WHERE g.id = ANY (ARRAY(
            SELECT o.id FROM error_groups o
            WHERE o.last_at < v_old AND NOT EXISTS (SELECT FROM deaths d WHERE d.group_id = o.id)
              AND coalesce(o.muted_until <= clock(), true)
            ORDER BY o.last_at LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING g.id
    )
    DELETE FROM alerts a USING gone g WHERE a.group_id = g.id;
    RETURN v_rows;
END $$;
