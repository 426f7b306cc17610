-- What comes due, and claims.

CREATE OR REPLACE FUNCTION mainspring.sweep_from(
    box integer, since timestamptz, most integer, OUT moved integer, OUT through timestamptz
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Leases that ended and delays that are over make pending, the earliest first and each at the tail; an ended lease is a
-- charged attempt. Messages that expired go to the dead letters. At most `most` of each. How many messages it moved,
-- and through which instant it got: that of the call, or where it moved as many as it may, that of the last one's due time.
-- `since`: what was due earlier was swept before. One that another transaction works on is left to it.
DECLARE
    at timestamptz := clock_timestamp();
    gained bigint := 0;
    ended bigint;
    from_delayed bigint;
    from_pending bigint;
    tasks text[];
    keys text[];
BEGIN
    through := at;
    IF EXISTS (
        SELECT FROM mainspring.messages m WHERE m.mailbox = box AND m.state <> 0 AND m.due <= at
            AND m.due >= coalesce(since, '-infinity'::timestamptz)
    ) THEN
        WITH ended_ones AS MATERIALIZED (
            SELECT m.id, m.state, m.due, m.task_key FROM mainspring.messages m
            WHERE m.mailbox = box AND m.state <> 0 AND m.due <= at AND m.due >= coalesce(since, '-infinity'::timestamptz)
            ORDER BY m.due LIMIT most FOR UPDATE SKIP LOCKED
        ), placed AS MATERIALIZED (
            SELECT o.id, o.state, o.due, CASE WHEN o.task_key IS NULL THEN nextval('mainspring.positions') END AS pos
            FROM ended_ones o
        ), back AS (
            UPDATE mainspring.messages m SET state = 0, due = NULL,
                pos = coalesce(p.pos, mainspring.place_of(box, m.task, m.task_key, m.rank, m.weight)),
                attempts = m.attempts + CASE WHEN p.state = 2 THEN 1 ELSE 0 END,
                permits = CASE WHEN p.state = 2 AND m.permits > 0
                    THEN mainspring.kept_permit(m.task, m.permits, 0, (SELECT mainspring.blocking_tasks(box, 'retry')))
                    ELSE m.permits END
            FROM placed p WHERE m.id = p.id RETURNING p.state, p.due, m.task, m.task_key, m.permits
        )
        SELECT count(*), count(*) FILTER (WHERE b.state = 2), CASE WHEN count(*) >= most THEN max(b.due) ELSE at END,
                array_agg(b.task) FILTER (WHERE b.state = 2 AND b.permits IS NOT NULL),
                array_agg(b.task_key) FILTER (WHERE b.state = 2 AND b.permits IS NOT NULL)
            INTO gained, ended, through, tasks, keys FROM back b;
        INSERT INTO mainspring.tallies (mailbox, delayed, pending, in_flight)
            VALUES (box, ended - gained, gained, -ended);
        IF tasks IS NOT NULL THEN
            PERFORM mainspring.free_permits(box, tasks, keys);
        END IF;
    END IF;
    IF EXISTS (
        SELECT FROM mainspring.messages m
        WHERE m.mailbox = box AND m.expires_at <= at AND m.expires_at IS NOT NULL AND m.state <> 2
    ) THEN
        WITH late AS MATERIALIZED (
            SELECT m.id FROM mainspring.messages m
            WHERE m.mailbox = box AND m.expires_at <= at AND m.expires_at IS NOT NULL AND m.state <> 2
            ORDER BY m.expires_at LIMIT most FOR UPDATE SKIP LOCKED
        ), gone AS (
            DELETE FROM mainspring.messages m USING late l WHERE m.id = l.id RETURNING m.*
        ), dead_lettered AS (
            INSERT INTO mainspring.dead (place, mailbox, dead_at, enqueued_at, first_received_at, lease, deliveries,
                attempts, rank, id, body, reply_to, headers, dedup_key, history, checkpoint, task, task_key, weight, permits, error,
                error_type, traceback)
            SELECT nextval('mainspring.positions'), g.mailbox, g.expires_at, g.enqueued_at, g.first_received_at, g.lease, g.deliveries,
                g.attempts, g.rank, g.id, g.body, g.reply_to, g.headers, g.dedup_key, g.history, g.checkpoint, g.task, g.task_key,
                g.weight, CASE WHEN g.permits > 0 AND g.deliveries > 0
                    THEN mainspring.kept_permit(g.task, g.permits, 0, (SELECT mainspring.blocking_tasks(box, 'dead'))) END,
                'it was not done before its time (expires_in) ran out', 'MessageExpiredError', ''
            FROM gone g
        )
        SELECT count(*) FILTER (WHERE g.state = 1), count(*) FILTER (WHERE g.state <> 1),
                array_agg(g.task) FILTER (WHERE g.task IS NOT NULL), array_agg(g.task_key) FILTER (WHERE g.task IS NOT NULL)
            INTO from_delayed, from_pending, tasks, keys FROM gone g;
        INSERT INTO mainspring.tallies (mailbox, delayed, pending, dead)
            VALUES (box, -from_delayed, -from_pending, from_delayed + from_pending);
        IF tasks IS NOT NULL THEN
            PERFORM mainspring.free_permits(box, tasks, keys);
        END IF;
    END IF;
    moved := gained + coalesce(from_delayed + from_pending, 0);
END $$;

CREATE OR REPLACE FUNCTION mainspring.sweep(box integer, since timestamptz, most integer) RETURNS integer LANGUAGE sql AS $$
-- The same, for callers that need only the number.
    SELECT s.moved FROM mainspring.sweep_from(box, since, most) AS s
$$;

CREATE OR REPLACE FUNCTION mainspring.sweep_all(box integer) RETURNS void LANGUAGE plpgsql AS $$
-- Sweep all that is due by now, so that the counts are exact.
BEGIN
    WHILE mainspring.sweep(box, NULL, 10000) > 0 LOOP
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION mainspring.next_due(box integer) RETURNS float8
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- Seconds until something is due that is not by now; NULL where nothing will be.
DECLARE at timestamptz := clock_timestamp();
BEGIN
    RETURN extract(epoch FROM (
        SELECT m.due FROM mainspring.messages m WHERE m.mailbox = box AND m.state <> 0 AND m.due > at
        ORDER BY m.due LIMIT 1
    ) - clock_timestamp());
END $$;

CREATE OR REPLACE FUNCTION mainspring.check_mailbox(box integer) RETURNS void LANGUAGE plpgsql AS $$
-- Raise MS002 if the mailbox was dropped; called by a claim that found nothing.
BEGIN
    IF NOT EXISTS (SELECT FROM mainspring.mailboxes b WHERE b.id = box) THEN
        RAISE EXCEPTION 'the mailbox was dropped' USING ERRCODE = 'MS002';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.listen(box integer) RETURNS boolean LANGUAGE plpgsql AS $$
-- Note that a receive waits, so that senders must notify; true if none had waited lately.
DECLARE at timestamptz := clock_timestamp();
        before timestamptz;
BEGIN
    SELECT b.listened_until INTO before FROM mainspring.mailboxes b WHERE b.id = box;
    IF NOT FOUND THEN
        PERFORM mainspring.check_mailbox(box);
    END IF;
    IF before < at + interval '30 seconds' THEN
        UPDATE mainspring.mailboxes b SET listened_until = at + interval '60 seconds'
            WHERE b.id = (SELECT c.id FROM mainspring.mailboxes c WHERE c.id = box FOR UPDATE SKIP LOCKED);
    END IF;
    RETURN before < at;
END $$;

CREATE OR REPLACE FUNCTION mainspring.poll(
    box integer, since float8, OUT moved integer, OUT pending integer, OUT due_in float8, OUT newly_listening boolean,
    OUT polled_at float8
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- For waiting receives: sweep, count what is pending (up to 100), and say when more will be due. `polled_at`: what was due by
-- then is done.
DECLARE
    through timestamptz;
    opens_in float8;
BEGIN
    SELECT s.moved, s.through INTO moved, through FROM mainspring.sweep_from(box, to_timestamp(since), 1000) AS s;
    polled_at := extract(epoch FROM through);
    IF EXISTS (SELECT FROM mainspring.task_limits l WHERE l.mailbox = box) THEN
        SELECT p.pending, p.due_in INTO pending, opens_in FROM mainspring.poll_limits(box) AS p;
    ELSE
        SELECT count(*) INTO pending
            FROM (SELECT FROM mainspring.messages m WHERE m.mailbox = box AND m.state = 0 LIMIT 100) AS found;
    END IF;
    due_in := CASE WHEN moved < 1000 THEN least(mainspring.next_due(box), opens_in) ELSE 0 END;
    newly_listening := mainspring.listen(box);
END $$;

CREATE OR REPLACE FUNCTION mainspring.poll_all(boxes integer[], sinces float8[]) RETURNS TABLE (
    box integer, pending integer, due_in float8, newly_listening boolean, moved integer, polled_at float8
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- The same for the waiting receives of many mailboxes. Rows come of those only in which there is something, or will be.
-- `pending` is NULL of one that was dropped, or whose own poll fails: its receives find out by calls of their own. The row
-- with the number 0 says by when all that was due is done in the others.
DECLARE
    at timestamptz := clock_timestamp();
    one record;
BEGIN
    FOR one IN
        SELECT g.box, g.since, b.id IS NOT NULL AS is_there
        FROM unnest(boxes, sinces) AS g (box, since)
            LEFT JOIN LATERAL (
                SELECT c.id, c.listened_until FROM mainspring.mailboxes c WHERE c.id = g.box
            ) AS b ON true
            LEFT JOIN LATERAL (
                SELECT 1 AS one FROM mainspring.messages m WHERE m.mailbox = g.box AND m.state = 0 LIMIT 1
            ) AS waiting ON true
            LEFT JOIN LATERAL (
                SELECT 1 AS one FROM mainspring.messages m WHERE m.mailbox = g.box AND m.state <> 0
                    AND m.due >= coalesce(to_timestamp(g.since), '-infinity'::timestamptz) LIMIT 1
            ) AS later ON true
            LEFT JOIN LATERAL (
                SELECT 1 AS one FROM mainspring.messages m WHERE m.mailbox = g.box AND m.expires_at <= at
                    AND m.expires_at IS NOT NULL AND m.state <> 2 LIMIT 1
            ) AS over ON true
            LEFT JOIN LATERAL (
                SELECT 1 AS one FROM mainspring.task_limits l WHERE l.mailbox = g.box LIMIT 1
            ) AS limited ON true
        WHERE coalesce(b.listened_until, '-infinity'::timestamptz) < at + interval '30 seconds'
            OR coalesce(waiting.one, later.one, over.one, limited.one) IS NOT NULL
    LOOP
        box := one.box;
        pending := NULL;
        due_in := NULL;
        newly_listening := false;
        IF one.is_there THEN
            BEGIN
                SELECT p.pending, p.due_in, p.newly_listening, p.moved, p.polled_at
                    INTO pending, due_in, newly_listening, moved, polled_at FROM mainspring.poll(one.box, one.since) AS p;
            EXCEPTION
                WHEN transaction_rollback OR lock_not_available THEN
                    RAISE;  -- no fault of this mailbox's
                WHEN OTHERS THEN
                    NULL;
            END;
        END IF;
        RETURN NEXT;
    END LOOP;
    box := 0;
    moved := 0;
    polled_at := extract(epoch FROM at);
    RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION mainspring.claim(
    box integer, want integer, visibility float8, known smallint[], floors bigint[], since float8, waits boolean
) RETURNS TABLE (
    id text, body bytea, lease integer, deliveries integer, attempts integer, enqueued_at float8, first_received_at float8,
    reply_to text, headers text, checkpoint bytea, history text, rank smallint, pos bigint
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Lease what comes first. The first row that comes out is no message (its id is NULL): `lease` says how many messages time
-- has moved, `enqueued_at` by when all that was due is done, and, where the claim `waits` and found nothing, `first_received_at`
-- in how many seconds something will be due, and `deliveries` whether senders notify only from now on (1).
--
-- `known` and `floors` say for ranks that the caller has seen everything before that place. What has come there since (from a
-- long transaction, or released by another process) is found by a claim that finds too little, and by claims that pass no
-- floors. So a claim does not read again what was settled since the last VACUUM.
DECLARE
    at timestamptz := clock_timestamp();
    until timestamptz := at + visibility * interval '1 second';
    missing integer := want;
    taken integer;
    level record;
    lowest boolean := cardinality(floors) = 0;
    moved integer;
    through timestamptz;
BEGIN
    IF EXISTS (SELECT FROM mainspring.task_limits l WHERE l.mailbox = box) THEN
        RETURN QUERY SELECT c.* FROM mainspring.claim_within_limits(box, want, visibility, known, floors, since, waits) AS c;
        RETURN;
    END IF;
    SELECT s.moved, s.through INTO moved, through FROM mainspring.sweep_from(box, to_timestamp(since), 1000) AS s;
    LOOP
        FOR level IN
            SELECT r.rank, CASE WHEN lowest THEN 0 ELSE coalesce(floors[array_position(known, r.rank)], 0) END AS floor
            FROM mainspring.ranks r WHERE r.mailbox = box ORDER BY r.rank
        LOOP
            RETURN QUERY
                WITH first AS MATERIALIZED (
                    SELECT m.ctid AS place FROM mainspring.messages m
                    WHERE m.mailbox = box AND m.state = 0 AND m.rank = level.rank AND m.pos >= level.floor
                        AND (m.expires_at IS NULL OR m.expires_at > at)
                    ORDER BY m.pos LIMIT missing FOR UPDATE SKIP LOCKED
                )
                UPDATE mainspring.messages m SET state = 2, due = until, lease = m.lease + 1,
                    deliveries = m.deliveries + 1, first_received_at = coalesce(m.first_received_at, at)
                WHERE m.ctid = ANY (ARRAY(SELECT f.place FROM first f))
                RETURNING m.id, m.body, m.lease, m.deliveries, m.attempts,
                    date_part('epoch', m.enqueued_at), date_part('epoch', m.first_received_at),
                    m.reply_to, m.headers, m.checkpoint, m.history, m.rank, m.pos;
            GET DIAGNOSTICS taken = ROW_COUNT;
            missing := missing - taken;
            EXIT WHEN missing = 0;
        END LOOP;
        EXIT WHEN missing = 0 OR lowest;
        lowest := true;
    END LOOP;
    IF missing < want THEN
        INSERT INTO mainspring.tallies (mailbox, pending, in_flight) VALUES (box, missing - want, want - missing);
    ELSIF waits THEN
        first_received_at := CASE WHEN moved < 1000 THEN mainspring.next_due(box) ELSE 0 END;
        deliveries := CASE WHEN mainspring.listen(box) THEN 1 ELSE 0 END;
    ELSE
        PERFORM mainspring.check_mailbox(box);
    END IF;
    lease := moved;
    enqueued_at := extract(epoch FROM through);
    id := NULL;
    RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION mainspring.unclaim(box integer, ids text[], leases integer[])
RETURNS TABLE (rank smallint, pos bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Undo claims, as if they had not been made.
DECLARE
    back integer;
    tasks text[];
    keys text[];
BEGIN
    SELECT array_agg(m.task), array_agg(m.task_key) INTO tasks, keys FROM unnest(ids, leases) AS g (id, lease), mainspring.messages m
        WHERE m.id = g.id AND m.lease = g.lease AND m.mailbox = box AND m.state + 0 = 2 AND m.permits + 0 > 0;
    RETURN QUERY
        UPDATE mainspring.messages m SET state = 0, due = NULL, deliveries = m.deliveries - 1,
            first_received_at = CASE WHEN m.deliveries > 1 THEN m.first_received_at END,
            permits = CASE WHEN m.permits > 0 THEN mainspring.kept_permit(m.task, m.permits, 1, '{}') END
        FROM unnest(ids, leases) AS g (id, lease)
        WHERE m.id = g.id AND m.lease = g.lease AND m.mailbox = box AND m.state + 0 = 2 RETURNING m.rank, m.pos;
    GET DIAGNOSTICS back = ROW_COUNT;
    IF tasks IS NOT NULL THEN
        PERFORM mainspring.free_permits(box, tasks, keys);
    END IF;
    INSERT INTO mainspring.tallies (mailbox, pending, in_flight) VALUES (box, back, -back);
    PERFORM mainspring.notify(box, back);
END $$;
