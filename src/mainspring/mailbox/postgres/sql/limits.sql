-- Limits of tasks and keys (see mailbox/limiters.py), and claims in a mailbox that has some.
--
-- A permit is no row of its own: the messages of a limiter that have one are counted. `permits` of a message says which it has:
-- 1 that of its key, which it keeps until it is tried again; 2 that of its task; 3 both; 4 that of the mailbox alone; 5 it was let
-- in, and has none yet; 0 it had one. NULL: none, as nothing limited it. In flight a message has 2, 3 or 4, a dead letter 1 or 0.
--
-- Sends know no limits. Only a claim gives permits, one claim of a mailbox at a time (`lock_limits`). A message in line (state 0)
-- that it may not take waits from then on at the limiter of its key (3) or of its task (4). All that ends a permit, maybe in a
-- transaction of a user's that lasts, locks nothing: it adds a row to `freed_permits`. The next claim (or poll) takes those
-- out, and lets in as many waiting messages as have room: into state 5, of which claims take messages first, but for those in
-- line whose place is before (so keys take turns). So no order of these transactions leaves a message at a limiter that is open.

CREATE OR REPLACE FUNCTION mainspring.lock_limits(box integer) RETURNS void LANGUAGE sql AS $$
    SELECT pg_advisory_xact_lock(hashtext('mainspring limits'), box)
$$;

CREATE OR REPLACE FUNCTION mainspring.blocking_tasks(box integer, least_blocks text) RETURNS text[] LANGUAGE sql STABLE AS $$
-- The tasks of which `least_blocks` ('retry', 'dead') blocks the keys. Its callers ask once for all their messages.
    SELECT ARRAY(SELECT l.task FROM mainspring.task_limits l WHERE l.mailbox = box AND l.blocks IN (least_blocks, 'dead'))
$$;

CREATE OR REPLACE FUNCTION mainspring.kept_permit(of_task text, had integer, front integer, blocking text[]) RETURNS smallint
LANGUAGE sql IMMUTABLE AS $$
-- What a message keeps of the permits that it `had` when its delivery or its life ends: that of its key, where it goes to the
-- front, or its task is one of those `blocking`.
    SELECT (CASE WHEN had IN (1, 3) AND (front = 1 OR of_task = ANY (blocking)) THEN 1 ELSE 0 END)::smallint
$$;

CREATE OR REPLACE FUNCTION mainspring.waits_at(box integer, of_task text) RETURNS boolean LANGUAGE plpgsql AS $$
-- True if a message waits at the limiter of the task. Its callers fix its plan.
BEGIN
    RETURN EXISTS (SELECT FROM mainspring.messages m WHERE m.mailbox = box AND m.task = of_task AND m.state = 4);
END $$;

CREATE OR REPLACE FUNCTION mainspring.free_permits(box integer, tasks text[], keys text[]) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Note that messages which may have had permits have left, and wake receives if others wait for these. It takes no lock.
DECLARE freed bigint;
BEGIN
    INSERT INTO mainspring.freed_permits (mailbox, task, key)
        SELECT DISTINCT box, f.task, CASE WHEN l.key_concurrency IS NOT NULL OR l.key_rate_limit IS NOT NULL THEN f.key END
        FROM unnest(tasks, keys) AS f (task, key) JOIN mainspring.task_limits l ON l.mailbox = box AND l.task = f.task;
    IF EXISTS (SELECT FROM mainspring.mailboxes b WHERE b.id = box AND b.listened_until > clock_timestamp()) THEN
        IF EXISTS (SELECT FROM mainspring.task_limits l WHERE l.mailbox = box AND l.task = '') THEN
            freed := cardinality(tasks);
        ELSE
            SELECT count(*) INTO freed FROM unnest(tasks, keys) AS f (task, key) WHERE (
                SELECT true FROM mainspring.messages m WHERE m.mailbox = box AND m.task = f.task AND m.state = 4 LIMIT 1
            ) OR (
                SELECT true FROM mainspring.messages m
                WHERE m.mailbox = box AND m.task = f.task AND m.state = 3 AND m.task_key = f.key LIMIT 1
            );
        END IF;
        IF freed > 0 THEN
            PERFORM pg_notify('mainspring', box || ' ' || freed);
        END IF;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.room_at(
    most integer, used bigint, burst integer, rate_interval float8, spent_until float8, at float8
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
-- How many permits a limiter may give now, by its concurrency and by its rate. NULL is no limit.
    SELECT least(2147483647, CASE WHEN most IS NOT NULL THEN greatest(most - used, 0) END,
        CASE WHEN burst IS NOT NULL
            THEN greatest(floor(burst - (greatest(spent_until, at) - at) / rate_interval), 0)::bigint END)
$$;

CREATE OR REPLACE FUNCTION mainspring.opens_at(
    burst integer, rate_interval float8, spent_until float8, let_in bigint, at float8
) RETURNS float8 LANGUAGE sql IMMUTABLE AS $$
-- When a rate allows the next message to be let in: infinity, where one must be claimed before; NULL, where it does now.
    SELECT CASE WHEN let_in >= burst THEN 'infinity'::float8
        ELSE nullif(greatest(greatest(spent_until, at) + (let_in - burst + 1) * rate_interval, at), at) END
$$;

CREATE OR REPLACE FUNCTION mainspring.use_of_task(box integer, of_task text, OUT in_flight bigint, OUT let_in bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- How many messages of a task with limits are in flight, and how many are let in.
BEGIN
    SELECT count(*) FILTER (WHERE p.permits IN (2, 3)), (
        SELECT count(*) FROM mainspring.messages m WHERE m.mailbox = box AND m.task = of_task AND m.state = 5
    ) INTO in_flight, let_in FROM mainspring.messages p WHERE p.mailbox = box AND p.task = of_task AND p.permits > 0;
END $$;

CREATE OR REPLACE FUNCTION mainspring.room_of_task(box integer, of_task text, at float8) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- How many more messages of a task may be claimed, whatever their keys.
DECLARE
    l mainspring.task_limits;
    most integer;
    used bigint;
BEGIN
    SELECT t.* INTO l FROM mainspring.task_limits t WHERE t.mailbox = box AND t.task = of_task;
    most := CASE WHEN l.paused THEN 0 ELSE coalesce(l.changed_concurrency, l.concurrency) END;
    IF most > 0 THEN
        used := (SELECT u.in_flight FROM mainspring.use_of_task(box, of_task) AS u);
    END IF;
    RETURN mainspring.room_at(most, coalesce(used, 0), l.rate_burst, l.rate_per / l.rate_limit, l.spent_until, at);
END $$;

CREATE OR REPLACE FUNCTION mainspring.set_openings(box integer, tasks text[], keys text[], at float8) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Note when the rates of these limiters (a task's own: no key) allow the next message, where one waits.
BEGIN
    UPDATE mainspring.task_limits t SET opens_at = CASE WHEN mainspring.waits_at(box, t.task) THEN
            mainspring.opens_at(t.rate_burst, t.rate_per / t.rate_limit, t.spent_until,
                (SELECT u.let_in FROM mainspring.use_of_task(box, t.task) AS u), at) END
        WHERE t.mailbox = box AND t.rate_limit IS NOT NULL
            AND t.task = ANY (ARRAY(SELECT g.task FROM unnest(tasks, keys) AS g (task, key) WHERE g.key IS NULL));
    UPDATE mainspring.key_rates r SET waits = n.opens IS NOT NULL, due = coalesce(n.opens, r.spent_until)
        FROM (
            SELECT g.task, g.key, CASE WHEN (
                SELECT true FROM mainspring.messages m
                WHERE m.mailbox = box AND m.task = g.task AND m.state = 3 AND m.task_key = g.key LIMIT 1
            ) THEN mainspring.opens_at(l.key_rate_burst, l.key_rate_per / l.key_rate_limit, k.spent_until, (
                SELECT count(*) FILTER (WHERE p.permits = 5) FROM mainspring.messages p
                WHERE p.mailbox = box AND p.task = g.task AND p.permits > 0 AND p.task_key = g.key
            ), at) END AS opens
            FROM (SELECT DISTINCT u.task, u.key FROM unnest(tasks, keys) AS u (task, key) WHERE u.key IS NOT NULL) AS g
                JOIN mainspring.task_limits l ON l.mailbox = box AND l.task = g.task AND l.key_rate_limit IS NOT NULL
                JOIN mainspring.key_rates k ON k.mailbox = box AND k.task = g.task AND k.key = g.key
        ) AS n
        WHERE r.mailbox = box AND r.task = n.task AND r.key = n.key;
END $$;

CREATE OR REPLACE FUNCTION mainspring.next_opening(box integer) RETURNS float8
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- Seconds until a message may be let in, as far as that is known; NULL where none waits for an instant.
DECLARE opens float8;
BEGIN
    IF EXISTS (SELECT FROM mainspring.freed_permits f WHERE f.mailbox = box) THEN
        RETURN 0.01;
    END IF;
    opens := least((
        SELECT min(t.opens_at) FROM mainspring.task_limits t WHERE t.mailbox = box
    ), (
        SELECT r.due FROM mainspring.key_rates r WHERE r.mailbox = box AND r.waits ORDER BY r.due LIMIT 1
    ));
    RETURN CASE WHEN opens < 'infinity' THEN greatest(0, opens - extract(epoch FROM clock_timestamp())::float8) END;
END $$;

CREATE OR REPLACE FUNCTION mainspring.is_limited(l mainspring.task_limits) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT l.paused OR coalesce(l.concurrency, l.rate_limit, l.key_concurrency, l.key_rate_limit, l.changed_concurrency) IS NOT NULL
        OR l.blocks <> 'running'
$$;

CREATE OR REPLACE FUNCTION mainspring.let_in(box integer) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Let in what may be claimed by now, at most 1000 messages of each limiter; how many. The caller has `lock_limits`.
DECLARE
    at float8 := extract(epoch FROM clock_timestamp());
    one record;
    of_tasks text[] := '{}';
    of_keys text[] := '{}';
    looked text[];
    room bigint;
    moved bigint;
    total integer := 0;
BEGIN
    WITH gone AS (
        DELETE FROM mainspring.freed_permits f WHERE f.ctid = ANY (ARRAY(
            SELECT g.ctid FROM mainspring.freed_permits g WHERE g.mailbox = box LIMIT 1000 FOR UPDATE SKIP LOCKED
        )) RETURNING f.task, f.key
    ), due AS (
        SELECT r.task, r.key FROM mainspring.key_rates r WHERE r.mailbox = box AND r.waits AND r.due <= at ORDER BY r.due LIMIT 1000
    ), of_limiters AS (
        SELECT g.task, g.key FROM gone g UNION SELECT d.task, d.key FROM due d
            UNION SELECT t.task, NULL FROM mainspring.task_limits t WHERE t.mailbox = box AND t.opens_at <= at
    )
    SELECT array_agg(DISTINCT o.task), array_agg(o.task) FILTER (WHERE o.key IS NOT NULL),
            array_agg(o.key) FILTER (WHERE o.key IS NOT NULL)
        INTO looked, of_tasks, of_keys FROM of_limiters o;
    WITH rooms AS MATERIALIZED (
        SELECT g.task, g.key, l.paused OR l.rate_limit IS NOT NULL OR coalesce(l.changed_concurrency, l.concurrency) IS NOT NULL
                AS by_task, least(1000, l.key_concurrency - u.used - (
                SELECT count(*) FROM mainspring.dead d
                WHERE d.mailbox = box AND d.task = g.task AND d.task_key = g.key AND d.permits > 0
            ), CASE WHEN l.key_rate_limit IS NOT NULL THEN floor(l.key_rate_burst - (greatest((
                SELECT r.spent_until FROM mainspring.key_rates r WHERE r.mailbox = box AND r.task = g.task AND r.key = g.key
            ), at) - at) * l.key_rate_limit / l.key_rate_per) - u.let_in END)::integer AS room
        FROM unnest(of_tasks, of_keys) AS g (task, key)
            LEFT JOIN mainspring.task_limits l ON l.mailbox = box AND l.task = g.task
            CROSS JOIN LATERAL (
                SELECT count(*) FILTER (WHERE p.permits IN (1, 3, 5)) AS used, count(*) FILTER (WHERE p.permits = 5) AS let_in
                FROM mainspring.messages p
                WHERE p.mailbox = box AND p.task = g.task AND p.permits > 0 AND p.task_key = g.key
            ) AS u
        WHERE (
            SELECT true FROM mainspring.messages m
            WHERE m.mailbox = box AND m.task = g.task AND m.state = 3 AND m.task_key = g.key LIMIT 1
        )
    ), first AS MATERIALIZED (
        SELECT r.task, r.key, r.by_task, r.room, w.place FROM rooms r CROSS JOIN LATERAL (
            SELECT m.ctid AS place FROM mainspring.messages m
            WHERE m.mailbox = box AND m.task = r.task AND m.state = 3 AND m.task_key = r.key
            ORDER BY m.rank, m.pos LIMIT greatest(r.room, 0) FOR UPDATE SKIP LOCKED
        ) AS w
    ), moved_ones AS (
        UPDATE mainspring.messages m SET state = CASE WHEN f.by_task THEN 4 ELSE 5 END, permits = 5
        FROM first f WHERE m.ctid = f.place RETURNING f.task, f.key
    ), again AS (
        INSERT INTO mainspring.freed_permits (mailbox, task, key)
        SELECT box, r.task, r.key FROM rooms r
        WHERE r.room = 1000 OR (SELECT count(*) FROM first f WHERE f.task = r.task AND f.key = r.key) < (
            SELECT count(*) FROM (
                SELECT FROM mainspring.messages m
                WHERE m.mailbox = box AND m.task = r.task AND m.state = 3 AND m.task_key = r.key LIMIT greatest(r.room, 0)
            ) AS w
        )  -- more than 1000, or another transaction works on one
    )
    SELECT count(*) INTO total FROM moved_ones;
    FOR one IN
        SELECT g.task FROM unnest(looked) AS g (task) WHERE mainspring.waits_at(box, g.task)
    LOOP
        room := mainspring.room_of_task(box, one.task, at)
            - (SELECT u.let_in FROM mainspring.use_of_task(box, one.task) AS u);
        UPDATE mainspring.messages m SET state = 5, permits = CASE WHEN m.permits = 1 THEN 1 ELSE 5 END
            WHERE m.ctid = ANY (ARRAY(
                SELECT w.ctid FROM mainspring.messages w WHERE w.mailbox = box AND w.task = one.task AND w.state = 4
                ORDER BY w.rank, w.pos LIMIT least(greatest(room, 0), 1000) FOR UPDATE SKIP LOCKED
            ));
        GET DIAGNOSTICS moved = ROW_COUNT;
        total := total + moved;
        IF moved < room AND mainspring.waits_at(box, one.task) THEN
            INSERT INTO mainspring.freed_permits (mailbox, task) VALUES (box, one.task);
        END IF;
    END LOOP;
    PERFORM mainspring.set_openings(box, of_tasks || looked, of_keys, at) WHERE cardinality(looked) > 0;
    DELETE FROM mainspring.key_rates r WHERE r.ctid = ANY (ARRAY(
        SELECT k.ctid FROM mainspring.key_rates k WHERE k.mailbox = box AND NOT k.waits AND k.due <= at ORDER BY k.due LIMIT 1000
    ));
    DELETE FROM mainspring.task_limits t
        WHERE t.mailbox = box AND t.task = ANY (looked) AND NOT mainspring.is_limited(t) AND NOT EXISTS (
            SELECT FROM mainspring.messages m WHERE m.mailbox = box AND m.task = t.task AND m.state IN (3, 4, 5));
    RETURN total;
END $$;

CREATE OR REPLACE FUNCTION mainspring.admit(
    box integer, candidates tid[], at float8, OUT admitted tid[], OUT at_keys tid[], OUT at_tasks tid[], OUT rated_tasks text[],
    OUT rated_keys text[]
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Which of these messages get their permits, and which have to wait at the limiter of their key or of their task. All are in
-- line, or all are let in. One in line has no room of its key that another one has been given, which waits at the limiter of the
-- task: that one came first. Rates are spent for those that are admitted; `rated_tasks` and `rated_keys` are the limiters with a
-- rate that were asked. All keys are read in one statement: a call for each
-- costs several times as much.
DECLARE
    in_line smallint := 0;  -- see `last_place`
    at_key smallint := 3;
BEGIN
    WITH given AS (
        SELECT m.ctid AS place, m.task, m.task_key AS key, m.rank, m.pos, m.permits IS NOT DISTINCT FROM 1 AS keeps,
            m.state = 5 AS is_let_in
        FROM mainspring.messages m WHERE m.ctid = ANY (candidates)
    ), of_keys AS (
        SELECT g.*, l.task IS NOT NULL AS is_limited, l.rate_limit, l.rate_per, l.key_concurrency, l.key_rate_limit,
            l.key_rate_per, l.key_rate_burst,
            g.key IS NOT NULL AND (l.key_concurrency IS NOT NULL OR l.key_rate_limit IS NOT NULL) AS by_key,
            row_number() OVER (PARTITION BY g.task, g.key, g.keeps ORDER BY g.rank, g.pos) AS nth
        FROM given g LEFT JOIN mainspring.task_limits l ON l.mailbox = box AND l.task = g.task
    ), with_room AS MATERIALIZED (  -- else each room is worked out twice
        SELECT o.*, CASE WHEN NOT o.by_key OR o.nth > 1 THEN NULL
            WHEN o.keeps THEN o.key_concurrency - u.in_flight
            WHEN (
                SELECT true FROM mainspring.messages m WHERE m.mailbox = box AND m.task = o.task AND m.state = in_line
                    AND m.task_key = o.key AND m.rank = o.rank AND m.pos < o.pos LIMIT 1
            ) THEN 0 WHEN (
                SELECT true FROM mainspring.messages m WHERE m.mailbox = box AND m.task = o.task AND m.state = at_key
                    AND m.task_key = o.key AND (m.rank, m.pos) < (o.rank, o.pos) LIMIT 1
            ) THEN 0 ELSE least(
                o.key_concurrency - u.in_flight - u.kept - (
                    SELECT count(*) FROM mainspring.dead d
                    WHERE d.mailbox = box AND d.task = o.task AND d.task_key = o.key AND d.permits > 0
                ), CASE WHEN o.key_rate_limit IS NOT NULL THEN floor(o.key_rate_burst - (greatest((
                    SELECT r.spent_until FROM mainspring.key_rates r WHERE r.mailbox = box AND r.task = o.task AND r.key = o.key
                ), at) - at) * o.key_rate_limit / o.key_rate_per) END
            ) - CASE WHEN o.is_let_in THEN 0 ELSE u.let_in END END AS room
        FROM of_keys o CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE p.permits = 3) AS in_flight, count(*) FILTER (WHERE p.permits = 1) AS kept,
                count(*) FILTER (WHERE p.permits = 5) AS let_in
            FROM mainspring.messages p
            WHERE o.by_key AND o.nth = 1 AND p.mailbox = box AND p.task = o.task AND p.permits > 0 AND p.task_key = o.key
        ) AS u
    ), of_tasks AS (
        SELECT w.*, NOT w.by_key OR w.nth <= coalesce(max(w.room) OVER (PARTITION BY w.task, w.key, w.keeps), w.nth) AS passes FROM with_room w
    ), in_order AS (
        SELECT o.*, row_number() OVER (PARTITION BY o.task, o.passes ORDER BY o.rank, o.pos) AS nth_of_task FROM of_tasks o
    ), with_task_room AS (
        SELECT i.*, CASE WHEN i.is_limited AND i.passes AND i.nth_of_task = 1 THEN mainspring.room_of_task(box, i.task, at) END
            AS task_room FROM in_order i
    ), judged AS MATERIALIZED (
        SELECT w.*, CASE WHEN NOT w.is_limited THEN 2 WHEN NOT w.passes THEN 3
            WHEN w.nth_of_task <= max(w.task_room) OVER (PARTITION BY w.task, w.passes) THEN 2 ELSE 4 END AS verdict
        FROM with_task_room w
    ), spent_by_tasks AS (
        UPDATE mainspring.task_limits l SET spent_until = greatest(l.spent_until, at) + s.many * l.rate_per / l.rate_limit
        FROM (
            SELECT j.task, count(*) AS many FROM judged j WHERE j.verdict = 2 AND j.rate_limit IS NOT NULL GROUP BY j.task
        ) AS s WHERE l.mailbox = box AND l.task = s.task
    ), spent_by_keys AS (
        INSERT INTO mainspring.key_rates AS r (mailbox, task, key, spent_until, waits, due)
        SELECT box, j.task, j.key, at + count(*) * j.key_rate_per / j.key_rate_limit, false,
            at + count(*) * j.key_rate_per / j.key_rate_limit
        FROM judged j WHERE j.verdict = 2 AND j.by_key AND j.key_rate_limit IS NOT NULL
        GROUP BY j.task, j.key, j.key_rate_per, j.key_rate_limit
        ON CONFLICT (mailbox, task, key) DO UPDATE
            SET spent_until = greatest(r.spent_until, at) + excluded.spent_until - at, waits = false,
                due = greatest(r.spent_until, at) + excluded.spent_until - at
    )
    SELECT array_agg(j.place) FILTER (WHERE j.verdict = 2), array_agg(j.place) FILTER (WHERE j.verdict = 3),
            array_agg(j.place) FILTER (WHERE j.verdict = 4),
            array_agg(j.task) FILTER (WHERE j.rate_limit IS NOT NULL)
                || array_agg(j.task) FILTER (WHERE j.by_key AND j.key_rate_limit IS NOT NULL),
            array_agg(NULL::text) FILTER (WHERE j.rate_limit IS NOT NULL)
                || array_agg(j.key) FILTER (WHERE j.by_key AND j.key_rate_limit IS NOT NULL)
        INTO admitted, at_keys, at_tasks, rated_tasks, rated_keys FROM judged j;
END $$;

CREATE OR REPLACE FUNCTION mainspring.claim_within_limits(
    box integer, want integer, visibility float8, known smallint[], floors bigint[], since float8, waits boolean
) RETURNS TABLE (
    id text, body bytea, lease integer, deliveries integer, attempts integer, enqueued_at float8, first_received_at float8,
    reply_to text, headers text, checkpoint bytea, history text, rank smallint, pos bigint
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- What `claim` does, in a mailbox with limits. In the last row, `attempts` says how many messages were let in that others may
-- claim.
--
-- Once it has found something it looks no further when it comes to messages that have to wait; else when it has put 1000 of
-- them to their limiters.
DECLARE
    at timestamptz;
    now float8;
    until timestamptz;
    missing integer;
    room integer;
    in_flight_counts boolean;
    limited text[];
    level record;
    before bigint;
    candidates tid[];
    judged record;
    aside integer := 0;
    number integer;
    rated_tasks text[] := '{}';
    rated_keys text[] := '{}';
    is_over boolean := false;
    lowest boolean := cardinality(floors) = 0;
    moved integer;
    new_in integer;
    through timestamptz;
BEGIN
    SELECT s.moved, s.through INTO moved, through FROM mainspring.sweep_from(box, to_timestamp(since), 1000) AS s;
    PERFORM mainspring.lock_limits(box);
    new_in := mainspring.let_in(box);
    at := clock_timestamp();
    now := extract(epoch FROM at);
    until := at + visibility * interval '1 second';
    limited := ARRAY(SELECT l.task FROM mainspring.task_limits l WHERE l.mailbox = box);
    room := mainspring.room_of_mailbox(box);
    in_flight_counts := room IS NOT NULL;
    missing := least(want, room);
    want := missing;
    WHILE missing > 0 LOOP
        FOR level IN
            SELECT r.rank, s.part, s.state, CASE WHEN lowest THEN 0 ELSE coalesce(floors[array_position(known, r.rank)], 0) END AS floor
            FROM mainspring.ranks r CROSS JOIN (VALUES (1, 0), (2, 5), (3, 0)) AS s (part, state)
            WHERE r.mailbox = box ORDER BY r.rank, s.part
        LOOP
            before := CASE WHEN level.part = 1 THEN (
                SELECT m.pos FROM mainspring.messages m
                WHERE m.mailbox = box AND m.state = 5 AND m.rank = level.rank ORDER BY m.pos LIMIT 1
            ) ELSE 9223372036854775807 END;
            LOOP
                EXIT WHEN before IS NULL;
                IF level.state = 5 THEN
                    candidates := ARRAY(
                        SELECT m.ctid FROM mainspring.messages m
                        WHERE m.mailbox = box AND m.state = 5 AND m.rank = level.rank
                            AND (m.expires_at IS NULL OR m.expires_at > at)
                        ORDER BY m.pos LIMIT missing FOR UPDATE SKIP LOCKED);
                ELSE
                    candidates := ARRAY(
                        SELECT m.ctid FROM mainspring.messages m
                        WHERE m.mailbox = box AND m.state = 0 AND m.rank = level.rank AND m.pos >= level.floor
                            AND m.pos < before AND (m.expires_at IS NULL OR m.expires_at > at)
                        ORDER BY m.pos LIMIT missing FOR UPDATE SKIP LOCKED);
                END IF;
                EXIT WHEN cardinality(candidates) = 0;
                SELECT a.* INTO judged FROM mainspring.admit(box, candidates, now) AS a;
                rated_tasks := rated_tasks || judged.rated_tasks;
                rated_keys := rated_keys || judged.rated_keys;
                IF judged.at_keys IS NOT NULL OR judged.at_tasks IS NOT NULL THEN
                    aside := aside + mainspring.set_aside(box, judged.at_keys, judged.at_tasks, level.state = 5);
                END IF;
                RETURN QUERY
                    UPDATE mainspring.messages m SET state = 2, due = until, lease = m.lease + 1,
                        deliveries = m.deliveries + 1, first_received_at = coalesce(m.first_received_at, at),
                        permits = CASE WHEN m.task = ANY (limited) THEN CASE WHEN m.task_key IS NULL THEN 2 ELSE 3 END
                            WHEN in_flight_counts THEN 4 END
                    WHERE m.ctid = ANY (judged.admitted)
                    RETURNING m.id, m.body, m.lease, m.deliveries, m.attempts,
                        date_part('epoch', m.enqueued_at), date_part('epoch', m.first_received_at),
                        m.reply_to, m.headers, m.checkpoint, m.history, m.rank, m.pos;
                GET DIAGNOSTICS number = ROW_COUNT;
                is_over := missing = number OR aside >= CASE WHEN want > missing - number THEN 1 ELSE 1000 END;
                EXIT WHEN is_over OR cardinality(candidates) < missing;
                missing := missing - number;
                number := 0;
            END LOOP;
            missing := missing - coalesce(number, 0);
            number := 0;
            EXIT WHEN is_over;
        END LOOP;
        EXIT WHEN is_over OR lowest;
        lowest := true;
    END LOOP;
    SELECT array_agg(g.task), array_agg(g.key) INTO rated_tasks, rated_keys
        FROM (SELECT DISTINCT r.task, r.key FROM unnest(rated_tasks, rated_keys) AS r (task, key)) AS g
        WHERE CASE WHEN g.key IS NULL THEN (
            SELECT true FROM mainspring.messages m WHERE m.mailbox = box AND m.task = g.task AND m.state = 4 LIMIT 1
        ) ELSE (
            SELECT true FROM mainspring.messages m
            WHERE m.mailbox = box AND m.task = g.task AND m.state = 3 AND m.task_key = g.key LIMIT 1
        ) END;
    PERFORM mainspring.set_openings(box, rated_tasks, rated_keys, now) WHERE rated_tasks IS NOT NULL;
    new_in := greatest(new_in - want + missing, 0);
    IF new_in > 0 THEN
        PERFORM mainspring.notify(box, new_in);
    END IF;
    IF missing < want THEN
        INSERT INTO mainspring.tallies (mailbox, pending, in_flight) VALUES (box, missing - want, want - missing);
    ELSIF waits THEN
        first_received_at := CASE WHEN is_over OR moved >= 1000 THEN 0
            ELSE least(mainspring.next_due(box), mainspring.next_opening(box)) END;
        deliveries := CASE WHEN mainspring.listen(box) OR aside > 0 THEN 1 ELSE 0 END;
    ELSE
        PERFORM mainspring.check_mailbox(box);
    END IF;
    lease := moved;
    attempts := new_in;
    enqueued_at := extract(epoch FROM through);
    id := NULL;
    RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION mainspring.set_aside(box integer, at_keys tid[], at_tasks tid[], were_let_in boolean) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- Let messages wait at the limiters of their keys, and of their tasks; how many.
DECLARE number integer;
BEGIN
    WITH here AS (
        UPDATE mainspring.messages m SET state = CASE WHEN m.ctid = ANY (at_keys) THEN 3 ELSE 4 END,
            permits = CASE WHEN m.ctid = ANY (at_keys) THEN 0 WHEN m.permits = 1 THEN 1 WHEN m.task_key IS NOT NULL THEN 5 ELSE 0 END
        WHERE m.ctid = ANY (at_keys || at_tasks) RETURNING m.task, m.task_key, m.state
    ), freed AS (  -- another one may have the room of one that was let in
        INSERT INTO mainspring.freed_permits (mailbox, task, key)
        SELECT box, h.task, NULL FROM here h WHERE were_let_in UNION
        SELECT box, h.task, h.task_key FROM here h WHERE were_let_in AND h.state = 3
    )
    SELECT count(*) INTO number FROM here;
    RETURN number;
END $$;

CREATE OR REPLACE FUNCTION mainspring.room_of_mailbox(box integer) RETURNS integer LANGUAGE plpgsql AS $$
-- How many more messages may be in flight by the limits of the whole mailbox; NULL: any number.
DECLARE
    most integer;
BEGIN
    SELECT CASE WHEN l.paused THEN 0 ELSE coalesce(l.changed_concurrency, l.concurrency) END INTO most
        FROM mainspring.task_limits l WHERE l.mailbox = box AND l.task = '';
    RETURN CASE WHEN most IS NOT NULL THEN greatest(0, most - (
        SELECT coalesce(sum(t.in_flight), 0) FROM mainspring.tallies t WHERE t.mailbox = box)) END;
END $$;

CREATE OR REPLACE FUNCTION mainspring.poll_limits(box integer, OUT moved integer, OUT pending integer, OUT due_in float8)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- What a poll does in a mailbox with limits: let in what may be, unless a claim does so just now; how many claims may find.
BEGIN
    moved := CASE WHEN pg_try_advisory_xact_lock(hashtext('mainspring limits'), box) THEN mainspring.let_in(box) ELSE 0 END;
    pending := least(mainspring.room_of_mailbox(box), (
        SELECT count(*) FROM (SELECT FROM mainspring.messages m WHERE m.mailbox = box AND m.state = 0 LIMIT 100) AS found
    ) + (
        SELECT count(*) FROM (SELECT FROM mainspring.messages m WHERE m.mailbox = box AND m.state = 5 LIMIT 100) AS found
    ));
    due_in := mainspring.next_opening(box);
END $$;

CREATE OR REPLACE FUNCTION mainspring.change_limits(box integer, changes text) RETURNS integer LANGUAGE plpgsql AS $$
-- Change limits, as JSON says it; how many messages may be claimed now. What is as it was costs no write.
DECLARE
    change record;
    l mainspring.task_limits;
    before mainspring.task_limits;
    name text;
    changed boolean := false;
    pending integer := 0;
BEGIN
    PERFORM mainspring.lock_limits(box);
    FOR change IN SELECT * FROM json_to_recordset(changes::json) AS c (
        task text, is_declared boolean, concurrency integer, rate_limit integer, rate_per float8, rate_burst integer,
        key_concurrency integer, key_rate_limit integer, key_rate_per float8, key_rate_burst integer, blocks text,
        paused boolean, changed_concurrency integer
    ) LOOP
        SELECT t.* INTO before FROM mainspring.task_limits t WHERE t.mailbox = box AND t.task = change.task;
        l := before;
        IF l.task IS NULL THEN
            l := ROW(box, change.task, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'running', false, NULL, '-infinity', NULL);
        END IF;
        IF change.is_declared THEN
            l.concurrency := change.concurrency;
            l.rate_limit := change.rate_limit;
            l.rate_per := change.rate_per;
            l.rate_burst := change.rate_burst;
            l.key_concurrency := change.key_concurrency;
            l.key_rate_limit := change.key_rate_limit;
            l.key_rate_per := change.key_rate_per;
            l.key_rate_burst := change.key_rate_burst;
            l.blocks := change.blocks;
        END IF;
        l.paused := coalesce(change.paused, l.paused);
        IF change.changed_concurrency IS NOT NULL THEN
            l.changed_concurrency := nullif(change.changed_concurrency, 0);
        END IF;
        CONTINUE WHEN before IS NOT DISTINCT FROM l OR (before.task IS NULL AND NOT mainspring.is_limited(l));
        changed := true;
        DELETE FROM mainspring.task_limits t WHERE t.mailbox = box AND t.task = change.task;
        INSERT INTO mainspring.task_limits SELECT l.*;
        INSERT INTO mainspring.freed_permits (mailbox, task) VALUES (box, change.task);
        INSERT INTO mainspring.freed_permits (mailbox, task, key)
            SELECT box, change.task, k FROM mainspring.keys_that_wait(box, change.task) AS k;
    END LOOP;
    IF changed THEN
        PERFORM mainspring.let_in(box);
        pending := (SELECT p.pending FROM mainspring.poll_limits(box) AS p);
        PERFORM mainspring.notify(box, pending);
    END IF;
    RETURN pending;
END $$;

CREATE OR REPLACE FUNCTION mainspring.set_task(box integer, ids text[], leases integer[], to_task text)
RETURNS TABLE (n bigint, rank smallint, pos bigint, is_pending boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- Release a message in flight as one of another task, if that has limits. Its row is that of `nack`, or says nothing where it stays
-- as it is. None: the lease is not held.
--
-- It has its old place, but comes behind the messages of its key and its new task that were sent before it.
DECLARE
    was record;
    last bigint;
BEGIN
    SELECT m.id, m.task, m.task_key, m.permits, m.rank, m.enqueued_at INTO was FROM mainspring.messages m
        WHERE m.id = ids[1] AND m.lease = leases[1] AND m.mailbox = box AND m.state + 0 = 2 AND m.due > clock_timestamp() FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF was.task IS NULL OR was.task = to_task
        OR NOT EXISTS (SELECT FROM mainspring.task_limits l WHERE l.mailbox = box AND l.task = to_task) THEN
        RETURN QUERY SELECT 1::bigint, NULL::smallint, NULL::bigint, false;
        RETURN;
    END IF;
    last := (
        SELECT max(w.pos) FROM unnest('{0,3,4,5}'::smallint[]) AS s (state) CROSS JOIN LATERAL (
            SELECT m.pos FROM mainspring.messages m WHERE m.mailbox = box AND m.task = to_task AND m.state = s.state
                AND m.task_key = was.task_key AND m.rank = was.rank AND m.enqueued_at <= was.enqueued_at
            ORDER BY m.pos DESC LIMIT 1
        ) AS w);
    UPDATE mainspring.messages m SET task = to_task, permits = CASE WHEN m.permits > 0 THEN 4 END, pos = greatest(m.pos, last + 1)
        WHERE m.id = was.id AND m.mailbox = box;
    RETURN QUERY SELECT b.n, b.rank, b.pos, b.is_pending
        FROM mainspring.nack(box, ids, leases, ARRAY[0::float8], ARRAY[0], ARRAY[1], ARRAY[NULL::text]) AS b;
    IF was.permits > 0 THEN
        PERFORM mainspring.free_permits(box, ARRAY[was.task], ARRAY[was.task_key]);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.keys_that_wait(box integer, of_task text) RETURNS SETOF text
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The keys of a task that have messages waiting at their limiters.
DECLARE name text := NULL;
BEGIN
    LOOP
        SELECT m.task_key INTO name FROM mainspring.messages m WHERE m.mailbox = box AND m.task = of_task AND m.state = 3
            AND m.task_key >= coalesce(name, '') AND m.task_key IS DISTINCT FROM name ORDER BY m.task_key LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN NEXT name;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION mainspring.limits(box integer) RETURNS TABLE (
    task text, concurrency integer, rate_limit integer, rate_per float8, rate_burst integer, key_concurrency integer,
    key_rate_limit integer, key_rate_per float8, key_rate_burst integer, blocks text, paused boolean,
    changed_concurrency integer, running bigint, waiting bigint
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- The tasks with limits, the messages of each that are in flight or let in, and those that wait at its limiters. What is in line
-- of a task that has no room waits, too: no claim has put it there yet.
DECLARE at float8 := extract(epoch FROM clock_timestamp());
BEGIN
    PERFORM mainspring.sweep_all(box);
    RETURN QUERY
        SELECT l.task, l.concurrency, l.rate_limit, l.rate_per, l.rate_burst, l.key_concurrency, l.key_rate_limit, l.key_rate_per,
            l.key_rate_burst, l.blocks, l.paused, l.changed_concurrency,
            CASE WHEN l.task = '' THEN (SELECT coalesce(sum(t.in_flight), 0)::bigint FROM mainspring.tallies t WHERE t.mailbox = box)
                ELSE (SELECT u.in_flight + u.let_in FROM mainspring.use_of_task(box, l.task) AS u) END,
            (SELECT count(*) FROM mainspring.messages m WHERE m.mailbox = box AND m.task = l.task AND m.state = ANY (
                CASE WHEN mainspring.room_of_task(box, l.task, at) = 0 THEN '{0,3,4}' ELSE '{3,4}' END::smallint[]))
        FROM mainspring.task_limits l WHERE l.mailbox = box AND mainspring.is_limited(l) ORDER BY l.task;
END $$;
