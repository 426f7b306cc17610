-- Counts, dead letters, and maintenance.

CREATE OR REPLACE FUNCTION mainspring.counts(
    box integer, OUT delayed bigint, OUT pending bigint, OUT in_flight bigint, OUT settled bigint, OUT dead bigint
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM mainspring.check_mailbox(box);
    PERFORM mainspring.sweep_all(box);
    SELECT coalesce(sum(t.delayed), 0), coalesce(sum(t.pending), 0), coalesce(sum(t.in_flight), 0),
            coalesce(sum(t.settled), 0), coalesce(sum(t.dead), 0)
        INTO delayed, pending, in_flight, settled, dead FROM mainspring.tallies t WHERE t.mailbox = box;
END $$;

CREATE OR REPLACE FUNCTION mainspring.queue_age(box integer) RETURNS float8
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- Seconds since the send of the oldest of the first in line, one for each rank; 0: no message is pending.
BEGIN
    RETURN coalesce(greatest(0, extract(epoch FROM clock_timestamp() - min(f.enqueued_at))), 0)
        FROM mainspring.ranks r CROSS JOIN LATERAL (
            SELECT m.enqueued_at FROM mainspring.messages m
            WHERE m.mailbox = box AND m.state = 0 AND m.rank = r.rank ORDER BY m.pos LIMIT 1
        ) AS f WHERE r.mailbox = box;
END $$;

CREATE OR REPLACE FUNCTION mainspring.fold_tallies(box integer) RETURNS void LANGUAGE plpgsql AS $$
-- Fold a mailbox's tallies into one row, unless another process does so.
BEGIN
    IF pg_try_advisory_xact_lock(hashtext('mainspring tallies'), box) THEN
        WITH old AS (DELETE FROM mainspring.tallies t WHERE t.mailbox = box RETURNING t.*)
        INSERT INTO mainspring.tallies (mailbox, delayed, pending, in_flight, settled, dead)
            SELECT box, sum(o.delayed), sum(o.pending), sum(o.in_flight), sum(o.settled), sum(o.dead) FROM old o
            HAVING count(*) > 0;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.purge(box integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE late bigint; waiting bigint; held bigint;
BEGIN
    PERFORM mainspring.sweep_all(box);
    WITH gone AS (DELETE FROM mainspring.messages m WHERE m.mailbox = box RETURNING m.state)
    SELECT count(*) FILTER (WHERE g.state = 1), count(*) FILTER (WHERE g.state NOT IN (1, 2)), count(*) FILTER (WHERE g.state = 2)
        INTO late, waiting, held FROM gone g;
    INSERT INTO mainspring.tallies (mailbox, delayed, pending, in_flight, settled)
        VALUES (box, -late, -waiting, -held, late + waiting + held);
    RETURN late + waiting + held;
END $$;

CREATE OR REPLACE FUNCTION mainspring.dead_rows(box integer, named text[]) RETURNS tid[] STABLE
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- Where the dead letters with these ids (NULL: all) lie, for the statement that calls it. Only `dead_by_id` gives them in order
-- of their ids, so it is used: `id = ANY (named)` may filter all of the mailbox instead, in a plan made while there were none.
BEGIN
    IF named IS NULL THEN
        RETURN ARRAY(SELECT d.ctid FROM mainspring.dead d WHERE d.mailbox >= box AND d.mailbox <= box
            ORDER BY d.mailbox, d.place);
    END IF;
    RETURN ARRAY(SELECT f.ctid FROM unnest(named) AS n (id) CROSS JOIN LATERAL (
        SELECT d.ctid FROM mainspring.dead d WHERE d.mailbox = box AND d.id >= n.id AND d.id <= n.id ORDER BY d.id) AS f);
END $$;

CREATE OR REPLACE FUNCTION mainspring.dead_rows_behind(box integer, of_task text, most integer, behind text)
RETURNS tid[] STABLE LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_incremental_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Where the oldest ones (NULL: of any task) behind the one with that id lie, for the statement that calls it. In order of `place`
-- alone, a plan might read those of other mailboxes and tasks.
DECLARE since bigint := coalesce((
    SELECT d.place FROM mainspring.dead d WHERE d.mailbox = box AND d.id >= behind AND d.id <= behind ORDER BY d.id LIMIT 1), 0);
BEGIN
    IF of_task IS NULL THEN
        RETURN ARRAY(SELECT d.ctid FROM mainspring.dead d WHERE (d.mailbox, d.place) > (box, since) AND d.mailbox <= box
            ORDER BY d.mailbox, d.place LIMIT most);
    END IF;
    RETURN ARRAY(SELECT d.ctid FROM mainspring.dead d WHERE d.mailbox = box AND (d.task, d.place) > (of_task, since)
        AND d.task <= of_task ORDER BY d.task, d.place LIMIT most);
END $$;

CREATE OR REPLACE FUNCTION mainspring.dead_letters(box integer, most integer, behind text, named text[])
RETURNS TABLE (
    id text, body bytea, deliveries integer, attempts integer, enqueued_at float8, first_received_at float8,
    reply_to text, headers text, checkpoint bytea, history text, error text, error_type text, traceback text,
    dead_at float8
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The oldest ones behind the one with that id; or (`named`) those with these ids.
BEGIN
    PERFORM mainspring.sweep_all(box);
    RETURN QUERY
        WITH found AS MATERIALIZED (
            SELECT d.* FROM mainspring.dead d WHERE d.ctid = ANY (CASE WHEN named IS NULL
                THEN mainspring.dead_rows_behind(box, NULL, most, behind) ELSE mainspring.dead_rows(box, named) END)
        )
        SELECT d.id, d.body, d.deliveries, d.attempts, extract(epoch FROM d.enqueued_at)::float8,
            extract(epoch FROM d.first_received_at)::float8, d.reply_to, d.headers, d.checkpoint, d.history, d.error,
            d.error_type, d.traceback, extract(epoch FROM d.dead_at)::float8
        FROM found d ORDER BY d.place LIMIT most;
END $$;

CREATE OR REPLACE FUNCTION mainspring.dead_letters_of(box integer, of_task text, most integer, behind text)
RETURNS TABLE (
    id text, body bytea, deliveries integer, attempts integer, enqueued_at float8, first_received_at float8,
    reply_to text, headers text, checkpoint bytea, history text, error text, error_type text, traceback text,
    dead_at float8
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The oldest ones of a task behind the one with that id, which may be of another task.
BEGIN
    PERFORM mainspring.sweep_all(box);
    RETURN QUERY SELECT * FROM mainspring.dead_letters(box, most, NULL, ARRAY(
        SELECT d.id FROM mainspring.dead d WHERE d.ctid = ANY (mainspring.dead_rows_behind(box, of_task, most, behind))));
END $$;

CREATE OR REPLACE FUNCTION mainspring.replay(box integer, named text[], capacity bigint, OUT number bigint, OUT waiting bigint)
LANGUAGE plpgsql AS $$
-- Dead letters (NULL: all) to the tail of the queue, with fresh counts. `waiting` is set, and none is sent, where they would
-- be more than `capacity`.
DECLARE clashed text;
BEGIN
    PERFORM mainspring.sweep_all(box);  -- else one that has expired would keep the key of one that is replayed
    IF capacity IS NOT NULL THEN
        waiting := mainspring.lock_capacity(box);
        SELECT count(DISTINCT r) INTO number FROM unnest(mainspring.dead_rows(box, named)) AS r;
        IF number = 0 OR waiting + number <= capacity THEN
            waiting := NULL;
        ELSE
            RETURN;
        END IF;
    END IF;
    LOOP
        BEGIN
            number := mainspring.replay_dead(box, named);
            EXIT;
        EXCEPTION WHEN unique_violation THEN
            GET STACKED DIAGNOSTICS clashed = CONSTRAINT_NAME;
            IF clashed <> 'messages_by_key' THEN
                RAISE;
            END IF;  -- else one of the keys was sent meanwhile, which is seen now
        END;
    END LOOP;
    INSERT INTO mainspring.tallies (mailbox, pending, dead) VALUES (box, number, -number);
    PERFORM mainspring.notify_sent(box, number);
END $$;

CREATE OR REPLACE FUNCTION mainspring.replay_dead(box integer, named text[]) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The messages of a replay; how many. Fails where one has a key that another transaction sends just now.
DECLARE number bigint;
BEGIN
    WITH raised AS (
        DELETE FROM mainspring.dead d WHERE d.ctid = ANY (mainspring.dead_rows(box, named)) RETURNING d.*
    ), in_order AS (
        SELECT r.*, row_number() OVER (PARTITION BY r.dedup_key ORDER BY r.place) = 1 AND NOT EXISTS (
            SELECT FROM mainspring.messages m WHERE m.mailbox = box AND m.dedup_key = r.dedup_key
        ) AS has_key
        FROM raised r ORDER BY r.place
    ), sent AS (
        INSERT INTO mainspring.messages (id, mailbox, state, rank, pos, enqueued_at, lease, reply_to, headers, dedup_key,
            checkpoint, body, task, task_key, weight, permits)
        SELECT o.id, o.mailbox, 0, o.rank, CASE WHEN o.task_key IS NULL THEN nextval('mainspring.positions')
                ELSE mainspring.place_of(box, o.task, o.task_key, o.rank, o.weight) END, o.enqueued_at, o.lease, o.reply_to, o.headers,
            CASE WHEN o.has_key THEN o.dedup_key END, o.checkpoint, o.body, o.task, o.task_key, o.weight, o.permits
        FROM in_order o RETURNING 1
    )
    SELECT count(*) INTO number FROM sent;
    RETURN number;
END $$;

CREATE OR REPLACE FUNCTION mainspring.purge_dead(box integer, named text[]) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    number bigint;
    tasks text[];
    keys text[];
BEGIN
    PERFORM mainspring.sweep_all(box);
    WITH gone AS (
        DELETE FROM mainspring.dead d WHERE d.ctid = ANY (mainspring.dead_rows(box, named))
            RETURNING d.permits, d.task, d.task_key
    )
    SELECT count(*), array_agg(g.task) FILTER (WHERE g.permits > 0), array_agg(g.task_key) FILTER (WHERE g.permits > 0)
        INTO number, tasks, keys FROM gone g;
    INSERT INTO mainspring.tallies (mailbox, settled, dead) VALUES (box, number, -number);
    IF tasks IS NOT NULL THEN
        PERFORM mainspring.free_permits(box, tasks, keys);
    END IF;
    RETURN number;
END $$;

CREATE OR REPLACE FUNCTION mainspring.drop_mailbox(box integer) RETURNS void LANGUAGE sql AS $$
    DELETE FROM mainspring.mailboxes b WHERE b.id = box;
    DELETE FROM mainspring.messages m WHERE m.mailbox = box;
    DELETE FROM mainspring.dead d WHERE d.mailbox = box;
    DELETE FROM mainspring.tallies t WHERE t.mailbox = box;
    DELETE FROM mainspring.ranks r WHERE r.mailbox = box;
    DELETE FROM mainspring.records r WHERE r.mailbox = box;
    DELETE FROM mainspring.task_limits l WHERE l.mailbox = box;
    DELETE FROM mainspring.key_rates r WHERE r.mailbox = box;
    DELETE FROM mainspring.freed_permits f WHERE f.mailbox = box;
$$;

CREATE OR REPLACE FUNCTION mainspring.drop_stale(prefix text, life float8) RETURNS integer LANGUAGE plpgsql AS $$
-- Drop the transient mailboxes that were not opened or waited on for `life` seconds; their number. Also drop what came
-- into one from a transaction that was under way while it was dropped: a reply does not lock the mailbox it is for, as its
-- transaction may last, and the drop would have to wait. Whatever came is in the tallies.
DECLARE
    box integer;
    dropped integer := 0;
BEGIN
    FOR box IN
        SELECT b.id FROM mainspring.mailboxes b WHERE starts_with(b.name, prefix)
            AND greatest(b.opened_at, b.listened_until) < clock_timestamp() - life * interval '1 second'
        FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM mainspring.drop_mailbox(box);
        dropped := dropped + 1;
    END LOOP;
    FOR box IN
        SELECT DISTINCT t.mailbox FROM mainspring.tallies t
            WHERE NOT EXISTS (SELECT FROM mainspring.mailboxes b WHERE b.id = t.mailbox)
    LOOP
        PERFORM mainspring.drop_mailbox(box);
    END LOOP;
    RETURN dropped;
END $$;
