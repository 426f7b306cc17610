-- Sends. A call stores all its rows, or none.
--
-- The settings of these functions fix their plans: whichever rows the tables hold when a plan is made, and whether or not
-- anybody ever ran ANALYZE, each statement goes by the index made for it.

CREATE OR REPLACE FUNCTION mainspring.mailbox(named text) RETURNS integer LANGUAGE plpgsql AS $$
-- The number of the mailbox of that name, which is made where there is none.
DECLARE number integer;
BEGIN
    LOOP
        SELECT b.id INTO number FROM mainspring.mailboxes b WHERE b.name = named;
        EXIT WHEN FOUND;
        INSERT INTO mainspring.mailboxes (name, opened_at) VALUES (named, clock_timestamp()) ON CONFLICT DO NOTHING;
    END LOOP;
    INSERT INTO mainspring.ranks SELECT number, 0
        WHERE NOT EXISTS (SELECT FROM mainspring.ranks r WHERE r.mailbox = number AND r.rank = 0) ON CONFLICT DO NOTHING;
    UPDATE mainspring.mailboxes b SET opened_at = clock_timestamp()
        WHERE b.id = number AND b.opened_at < clock_timestamp() - interval '1 hour';
    RETURN number;
END $$;

CREATE OR REPLACE FUNCTION mainspring.mailboxes_named(names text[]) RETURNS TABLE (name text, number integer) LANGUAGE sql AS $$
-- The same for many. All callers give the names in one order, so that none waits for another that waits for it.
    SELECT n, mainspring.mailbox(n) FROM unnest(names) AS n
$$;

CREATE OR REPLACE FUNCTION mainspring.add_ranks(box integer, new_ranks smallint[]) RETURNS void LANGUAGE sql AS $$
    INSERT INTO mainspring.ranks SELECT box, r FROM unnest(new_ranks) AS r ON CONFLICT DO NOTHING
$$;

CREATE OR REPLACE FUNCTION mainspring.notify(box integer, gained bigint) RETURNS void LANGUAGE plpgsql AS $$
-- Notify other processes, when this transaction commits, of messages that became pending (0: of one that is due later).
BEGIN
    IF EXISTS (SELECT FROM mainspring.mailboxes b WHERE b.id = box AND b.listened_until > clock_timestamp()) THEN
        PERFORM pg_notify('mainspring', box || ' ' || gained);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.notify_sent(box integer, gained bigint) RETURNS void LANGUAGE plpgsql AS $$
-- The same after a send. The mailbox must exist: no receive would find a message in one that was dropped.
DECLARE listened_until timestamptz;
BEGIN
    SELECT b.listened_until INTO listened_until FROM mainspring.mailboxes b WHERE b.id = box;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the mailbox was dropped' USING ERRCODE = 'MS002';
    END IF;
    IF listened_until > clock_timestamp() THEN
        PERFORM pg_notify('mainspring', box || ' ' || gained);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.send(box integer, ids text[], bodies bytea[]) RETURNS void LANGUAGE plpgsql AS $$
-- Messages without options.
DECLARE at timestamptz := clock_timestamp();
BEGIN
    INSERT INTO mainspring.messages (id, mailbox, state, rank, pos, enqueued_at, body)
        SELECT g.id, box, 0, 0, nextval('mainspring.positions'), at, g.body FROM unnest(ids, bodies) AS g (id, body);
    INSERT INTO mainspring.tallies (mailbox, pending) VALUES (box, cardinality(ids));
    PERFORM mainspring.notify_sent(box, cardinality(ids));
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_with_options(
    box integer, ids text[], bodies bytea[], delays float8[], ranks smallint[], reply_tos text[], all_headers text[],
    lives float8[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    at timestamptz := clock_timestamp();
    late bigint;
BEGIN
    INSERT INTO mainspring.messages
            (id, mailbox, state, rank, pos, enqueued_at, due, expires_at, reply_to, headers, body)
        SELECT g.id, box, CASE WHEN g.delay > 0 THEN 1 ELSE 0 END, g.rank, nextval('mainspring.positions'), at,
            CASE WHEN g.delay > 0 THEN at + g.delay * interval '1 second' END, at + g.life * interval '1 second',
            g.reply_to, g.headers, g.body
        FROM unnest(ids, bodies, delays, ranks, reply_tos, all_headers, lives)
            AS g (id, body, delay, rank, reply_to, headers, life);
    SELECT count(*) INTO late FROM unnest(delays) AS d WHERE d > 0;
    INSERT INTO mainspring.tallies (mailbox, pending, delayed) VALUES (box, cardinality(ids) - late, late);
    PERFORM mainspring.notify_sent(box, cardinality(ids) - late);
END $$;

CREATE OR REPLACE FUNCTION mainspring.last_place(
    box integer, of_task text, of_key text, of_rank smallint, is_limited boolean
) RETURNS bigint LANGUAGE plpgsql AS $$
-- The last place of a key, of its messages that are in line or, where anything `is_limited`, wait at a limiter or are let in.
-- The states are variables, which keeps the planner from the index of the line: there the messages of other keys are between.
-- Its callers fix its plan: a function's settings cost more than a read by an index, and this one is called for each key.
DECLARE
    in_line smallint := 0;
    at_key smallint := 3;
    at_task smallint := 4;
    let_in smallint := 5;
BEGIN
    RETURN greatest((
        SELECT m.pos FROM mainspring.messages m WHERE m.mailbox = box AND m.task = of_task AND m.state = in_line
            AND m.task_key = of_key AND m.rank = of_rank ORDER BY m.pos DESC LIMIT 1
    ), CASE WHEN is_limited THEN (
        SELECT m.pos FROM mainspring.messages m WHERE m.mailbox = box AND m.task = of_task AND m.state = at_key
            AND m.task_key = of_key AND m.rank = of_rank ORDER BY m.pos DESC LIMIT 1
    ) END, CASE WHEN is_limited THEN (
        SELECT m.pos FROM mainspring.messages m WHERE m.mailbox = box AND m.task = of_task AND m.state = at_task
            AND m.task_key = of_key AND m.rank = of_rank ORDER BY m.pos DESC LIMIT 1
    ) END, CASE WHEN is_limited THEN (
        SELECT m.pos FROM mainspring.messages m WHERE m.mailbox = box AND m.task = of_task AND m.state = let_in
            AND m.task_key = of_key AND m.rank = of_rank ORDER BY m.pos DESC LIMIT 1
    ) END);
END $$;

CREATE OR REPLACE FUNCTION mainspring.first_place(box integer, of_rank smallint, is_limited boolean) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The place of the first message that is in line or, where anything `is_limited`, let in.
BEGIN
    RETURN least((
        SELECT m.pos FROM mainspring.messages m
        WHERE m.mailbox = box AND m.state = 0 AND m.rank = of_rank ORDER BY m.pos LIMIT 1
    ), CASE WHEN is_limited THEN (
        SELECT m.pos FROM mainspring.messages m
        WHERE m.mailbox = box AND m.state = 5 AND m.rank = of_rank ORDER BY m.pos LIMIT 1
    ) END);
END $$;

CREATE OR REPLACE FUNCTION mainspring.first_at_task(box integer, of_task text, of_rank smallint) RETURNS bigint
LANGUAGE plpgsql AS $$
-- The place of the first message that waits at the limiter of a task. Its callers fix its plan.
BEGIN
    RETURN (SELECT m.pos FROM mainspring.messages m
        WHERE m.mailbox = box AND m.task = of_task AND m.state = 4 AND m.rank = of_rank ORDER BY m.pos LIMIT 1);
END $$;

CREATE OR REPLACE FUNCTION mainspring.place_of(
    box integer, of_task text, of_key text, of_rank smallint, of_weight float8
) RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The place of a message that comes to the line: at the tail, or, with a key, one step behind the last one of its key, and not
-- before the first one, which is in line, let in, or waits at the limiter of the same task. So keys take turns. It takes no lock:
-- two messages of a key that come at the same time may have the same place.
DECLARE
    tail bigint := nextval('mainspring.positions');
    is_limited boolean;
BEGIN
    IF of_key IS NULL THEN
        RETURN tail;
    END IF;
    is_limited := EXISTS (SELECT FROM mainspring.task_limits l WHERE l.mailbox = box);
    RETURN greatest(
        coalesce(least(mainspring.first_place(box, of_rank, is_limited),
            CASE WHEN is_limited THEN mainspring.first_at_task(box, of_task, of_rank) END), tail),
        mainspring.last_place(box, of_task, of_key, of_rank, is_limited) + (1000 / coalesce(of_weight, 1))::bigint);
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_tasks(
    box integer, ids text[], bodies bytea[], delays float8[], ranks smallint[], reply_tos text[], all_headers text[],
    lives float8[], tasks text[], keys text[], weights float8[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- Messages of tasks; those with a key have the places that `place_of` gives. It reads what `last_place` reads, for all keys in
-- one statement: a call for each costs several times as much.
DECLARE
    at timestamptz := clock_timestamp();
    in_line smallint := 0;  -- see `last_place`
    waiting_states smallint[] := '{3,4,5}';
    late bigint;
    level smallint;
    first bigint;
    tail bigint;
    is_limited boolean := EXISTS (SELECT FROM mainspring.task_limits l WHERE l.mailbox = box);
BEGIN
    FOR level IN SELECT DISTINCT r FROM unnest(ranks) AS r LOOP
        first := mainspring.first_place(box, level, is_limited);
        tail := nextval('mainspring.positions');
        WITH given AS MATERIALIZED (
            SELECT g.*, g.delay > 0 AS is_late, nextval('mainspring.positions') AS pos,
                (1000 / coalesce(g.weight, 1))::bigint AS step
            FROM unnest(ids, bodies, delays, ranks, reply_tos, all_headers, lives, tasks, keys, weights) WITH ORDINALITY
                AS g (id, body, delay, rank, reply_to, headers, life, task, key, weight, n)
            WHERE g.rank = level
        ), waiting AS MATERIALIZED (  -- not read unless anything is limited
            SELECT t.task, mainspring.first_at_task(box, t.task, level) AS pos
            FROM (SELECT DISTINCT g.task FROM given g WHERE g.key IS NOT NULL) AS t
        ), in_turn AS (
            SELECT g.*, sum(g.step) OVER line - first_value(g.step) OVER line AS ahead,
                CASE WHEN g.key IS NOT NULL AND NOT g.is_late AND row_number() OVER line = 1 THEN greatest(
                    coalesce(
                        least(first, CASE WHEN is_limited THEN (SELECT w.pos FROM waiting w WHERE w.task = g.task) END), tail
                    ), greatest((
                        SELECT m.pos FROM mainspring.messages m WHERE m.mailbox = box AND m.task = g.task AND m.state = in_line
                            AND m.task_key = g.key AND m.rank = level ORDER BY m.pos DESC LIMIT 1
                    ), CASE WHEN is_limited THEN (
                        SELECT max(w.pos) FROM unnest(waiting_states) AS s (state) CROSS JOIN LATERAL (
                            SELECT m.pos FROM mainspring.messages m WHERE m.mailbox = box AND m.task = g.task AND m.state = s.state
                                AND m.task_key = g.key AND m.rank = level ORDER BY m.pos DESC LIMIT 1
                        ) AS w
                    ) END) + g.step
                ) END AS start
            FROM given g WINDOW line AS (PARTITION BY g.task, g.key, g.is_late ORDER BY g.n)
        )
        INSERT INTO mainspring.messages
                (id, mailbox, state, rank, pos, enqueued_at, due, expires_at, reply_to, headers, body, task, task_key, weight)
            SELECT t.id, box, CASE WHEN t.is_late THEN 1 ELSE 0 END, level,
                CASE WHEN t.key IS NULL THEN t.pos WHEN t.is_late THEN 0
                    ELSE max(t.start) OVER (PARTITION BY t.task, t.key, t.is_late) + t.ahead END,
                at, CASE WHEN t.is_late THEN at + t.delay * interval '1 second' END, at + t.life * interval '1 second',
                t.reply_to, t.headers, t.body, t.task, t.key, t.weight
            FROM in_turn t;
    END LOOP;
    SELECT count(*) INTO late FROM unnest(delays) AS d WHERE d > 0;
    INSERT INTO mainspring.tallies (mailbox, pending, delayed) VALUES (box, cardinality(ids) - late, late);
    PERFORM mainspring.notify_sent(box, cardinality(ids) - late);
END $$;

CREATE OR REPLACE FUNCTION mainspring.dead_letter_expired(box integer, key text) RETURNS void LANGUAGE plpgsql AS $$
-- Do what a sweep would do with the message that has this key, if it has expired and is not in flight. Wait for one that
-- another transaction works on. No other message is touched: the caller may be in a transaction that lasts.
DECLARE
    at timestamptz := clock_timestamp();
    was mainspring.messages;
BEGIN
    DELETE FROM mainspring.messages m WHERE m.mailbox = box AND m.dedup_key = key AND m.expires_at <= at
        AND (m.state <> 2 OR m.due <= at) RETURNING m.* INTO was;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO mainspring.dead (place, mailbox, dead_at, enqueued_at, first_received_at, lease, deliveries,
            attempts, rank, id, body, reply_to, headers, dedup_key, history, checkpoint, task, task_key, weight, permits, error,
            error_type, traceback)
        VALUES (nextval('mainspring.positions'), box, was.expires_at, was.enqueued_at, was.first_received_at, was.lease,
            was.deliveries, was.attempts + CASE WHEN was.state = 2 THEN 1 ELSE 0 END, was.rank, was.id, was.body,
            was.reply_to, was.headers, was.dedup_key, was.history, was.checkpoint, was.task, was.task_key, was.weight,
            CASE WHEN was.permits > 0 AND was.deliveries > 0
                THEN mainspring.kept_permit(was.task, was.permits, 0, (SELECT mainspring.blocking_tasks(box, 'dead'))) END,
            'it was not done before its time (expires_in) ran out', 'MessageExpiredError', '');
    INSERT INTO mainspring.tallies (mailbox, delayed, pending, in_flight, dead) VALUES (box,
        CASE WHEN was.state = 1 THEN -1 ELSE 0 END, CASE WHEN was.state NOT IN (1, 2) THEN -1 ELSE 0 END,
        CASE WHEN was.state = 2 THEN -1 ELSE 0 END, 1);
    IF was.task IS NOT NULL THEN
        PERFORM mainspring.free_permits(box, ARRAY[was.task], ARRAY[was.task_key]);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_dedup(
    box integer, new_id text, new_body bytea, delay float8, new_rank smallint, new_reply_to text, new_headers text,
    life float8, dedup text, of_task text, of_key text, of_weight float8
) RETURNS text LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- One message with a dedup key; its id, or that of the unfinished one with the same key. One that has expired is finished,
-- unless it is in flight.
DECLARE
    at timestamptz := clock_timestamp();
    found_id text;
    is_over boolean;
    late boolean := delay > 0;
BEGIN
    LOOP
        SELECT m.id, m.expires_at <= clock_timestamp() AND (m.state <> 2 OR m.due <= clock_timestamp())
            INTO found_id, is_over FROM mainspring.messages m WHERE m.mailbox = box AND m.dedup_key = dedup;
        IF is_over THEN
            PERFORM mainspring.dead_letter_expired(box, dedup);
            CONTINUE;
        ELSIF found_id IS NOT NULL THEN
            RETURN found_id;
        END IF;
        INSERT INTO mainspring.messages
                (id, mailbox, state, rank, pos, enqueued_at, due, expires_at, reply_to, headers, body, dedup_key, task,
                task_key, weight)
            VALUES (new_id, box, CASE WHEN late THEN 1 ELSE 0 END, new_rank,
                CASE WHEN late OR of_key IS NULL THEN nextval('mainspring.positions')
                    ELSE mainspring.place_of(box, of_task, of_key, new_rank, of_weight) END,
                at, CASE WHEN late THEN at + delay * interval '1 second' END, at + life * interval '1 second',
                new_reply_to, new_headers, new_body, dedup, of_task, of_key, of_weight)
            ON CONFLICT (mailbox, dedup_key) WHERE dedup_key IS NOT NULL DO NOTHING;
        IF FOUND THEN
            INSERT INTO mainspring.tallies (mailbox, pending, delayed)
                VALUES (box, CASE WHEN late THEN 0 ELSE 1 END, CASE WHEN late THEN 1 ELSE 0 END);
            PERFORM mainspring.notify_sent(box, CASE WHEN late THEN 0 ELSE 1 END);
            RETURN new_id;
        END IF;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION mainspring.try_send_dedup(
    box integer, new_id text, new_body bytea, delay float8, new_rank smallint, new_reply_to text, new_headers text,
    life float8, dedup text, of_task text, of_key text, of_weight float8
) RETURNS text LANGUAGE plpgsql AS $$
-- The same; NULL where another transaction, which has sent the key, has not ended by the lock_timeout.
BEGIN
    RETURN mainspring.send_dedup(box, new_id, new_body, delay, new_rank, new_reply_to, new_headers, life, dedup, of_task,
        of_key, of_weight);
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_many_dedup(
    box integer, ids text[], bodies bytea[], delays float8[], ranks smallint[], reply_tos text[], all_headers text[],
    lives float8[], dedups text[], tasks text[], keys text[], weights float8[], lock_wait float8, apart boolean
) RETURNS SETOF text LANGUAGE plpgsql AS $$
-- The same for many, in a transaction of the mailbox's own. It waits `lock_wait` seconds for another one that has sent a key; then
-- it fails, or (`apart`) does so without that message, whose id is NULL. The COMMIT has no such end: it waits for others that
-- commit notifications just now, who are no reason to give up.
DECLARE one record;
BEGIN
    PERFORM set_config('lock_timeout', lock_wait * 1000 || 'ms', true);
    FOR one IN SELECT * FROM unnest(ids, bodies, delays, ranks, reply_tos, all_headers, lives, dedups, tasks, keys, weights)
        AS g (id, body, delay, rank, reply_to, headers, life, dedup, task, key, weight)
    LOOP
        IF apart THEN
            RETURN NEXT mainspring.try_send_dedup(
                box, one.id, one.body, one.delay, one.rank, one.reply_to, one.headers, one.life, one.dedup,
                one.task, one.key, one.weight);
        ELSE
            RETURN NEXT mainspring.send_dedup(
                box, one.id, one.body, one.delay, one.rank, one.reply_to, one.headers, one.life, one.dedup,
                one.task, one.key, one.weight);
        END IF;
    END LOOP;
    PERFORM set_config('lock_timeout', '0', true);
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_dedup_within(
    box integer, new_id text, new_body bytea, delay float8, new_rank smallint, new_reply_to text, new_headers text,
    life float8, dedup text, of_task text, of_key text, of_weight float8, patience float8
) RETURNS text LANGUAGE plpgsql AS $$
-- The same, in a sender's own transaction; NULL where the other has not ended after `patience` seconds, or by the lock_timeout
-- of this transaction, which goes on as if nothing had been tried.
DECLARE
    theirs text := current_setting('lock_timeout');
    named text;
BEGIN
    patience := least(patience, nullif(extract(epoch FROM theirs::interval), 0)) * 1000;
    PERFORM set_config('lock_timeout', greatest(least(ceil(patience), 2147483647), 1)::bigint || 'ms', true);
    named := mainspring.send_dedup(box, new_id, new_body, delay, new_rank, new_reply_to, new_headers, life, dedup, of_task,
        of_key, of_weight);
    PERFORM set_config('lock_timeout', theirs, true);
    RETURN named;
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION mainspring.check_store(store_id text) RETURNS void LANGUAGE plpgsql AS $$
-- Raise MS001 unless a sender's own connection leads to the store of the mailbox.
BEGIN
    IF NOT EXISTS (SELECT FROM mainspring.store s WHERE s.id = store_id) THEN
        RAISE EXCEPTION 'the connection is not to the database of the mailbox' USING ERRCODE = 'MS001';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.lock_capacity(box integer) RETURNS bigint LANGUAGE plpgsql AS $$
-- The number of messages that wait. Other senders that ask wait until this transaction ends.
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('mainspring'), box);
    PERFORM mainspring.sweep(box, NULL, 1000);
    RETURN (SELECT coalesce(sum(t.delayed + t.pending + t.in_flight), 0) FROM mainspring.tallies t WHERE t.mailbox = box);
END $$;

CREATE OR REPLACE FUNCTION mainspring.used_dedup_keys(box integer, keys text[]) RETURNS SETOF text LANGUAGE sql AS $$
    SELECT m.dedup_key FROM mainspring.messages m WHERE m.mailbox = box AND m.dedup_key = ANY (keys)
$$;
