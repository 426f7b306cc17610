-- What ends a delivery, or lets it last. Each function does it for those of the given leases that are held, and says for
-- which (their places among those given, from 1). A lease is held while its number is the message's last one and its end is
-- in the future; the row's lock, which the change itself takes, keeps that true until the transaction ends.
--
-- `state + 0 = 2` keeps the planner from the index of what is due: it would read all that is in flight for each settlement.

CREATE OR REPLACE FUNCTION mainspring.acknowledge(box integer, ids text[], leases integer[]) RETURNS bigint[]
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Which were NOT held; NULL where all were.
DECLARE
    done bigint[];
    number integer;
    tasks text[];
    keys text[];
BEGIN
    WITH gone AS (
        DELETE FROM mainspring.messages m USING unnest(ids, leases) WITH ORDINALITY AS g (id, lease, n)
        WHERE m.id = g.id AND m.lease = g.lease AND m.mailbox = box AND m.state + 0 = 2 AND m.due > clock_timestamp()
        RETURNING g.n, m.permits, m.task, m.task_key
    )
    SELECT array_agg(o.n), array_agg(o.task) FILTER (WHERE o.permits > 0), array_agg(o.task_key) FILTER (WHERE o.permits > 0)
        INTO done, tasks, keys FROM gone o;
    number := coalesce(cardinality(done), 0);
    INSERT INTO mainspring.tallies (mailbox, in_flight, settled) VALUES (box, -number, number);
    IF tasks IS NOT NULL THEN
        PERFORM mainspring.free_permits(box, tasks, keys);
    END IF;
    IF number = cardinality(ids) THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY(SELECT n FROM generate_series(1, cardinality(ids)) AS n WHERE done IS NULL OR n <> ALL (done));
END $$;

CREATE OR REPLACE FUNCTION mainspring.settle(
    box integer, ids text[], leases integer[], errors text[], error_types text[], tracebacks text[], histories text[],
    targets integer[], reply_ids text[], reply_bodies bytea[], reply_headers text[]
) RETURNS SETOF bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Acknowledge, or dead-letter where there is an error; and put the replies into their mailboxes. Who was held. Nothing is done for
-- one whose reply goes to a mailbox that is not there (any more): its place, with a minus.
DECLARE
    at timestamptz := clock_timestamp();
    without bigint[] := ARRAY(
        SELECT r.n FROM unnest(targets) WITH ORDINALITY AS r (target, n)
        WHERE r.target IS NOT NULL AND NOT EXISTS (SELECT FROM mainspring.mailboxes b WHERE b.id = r.target)
    );
    done bigint[];
    died bigint;
    tasks text[];
    keys text[];
    reply record;
BEGIN
    RETURN QUERY SELECT -w FROM unnest(without) AS w;
    WITH gone AS (
        DELETE FROM mainspring.messages m
        USING unnest(ids, leases, errors, error_types, tracebacks, histories) WITH ORDINALITY
            AS g (id, lease, error, error_type, traceback, history, n)
        WHERE m.id = g.id AND m.lease = g.lease AND m.mailbox = box AND m.state + 0 = 2 AND m.due > clock_timestamp()
            AND g.n <> ALL (without)
        RETURNING m.*, g.n, g.error, g.error_type, g.traceback, coalesce(g.history, m.history) AS last_history
    ), dead_lettered AS (
        INSERT INTO mainspring.dead (place, mailbox, dead_at, enqueued_at, first_received_at, lease, deliveries,
            attempts, rank, id, body, reply_to, headers, dedup_key, history, checkpoint, task, task_key, weight, permits, error,
            error_type, traceback)
        SELECT nextval('mainspring.positions'), o.mailbox, at, o.enqueued_at, o.first_received_at, o.lease, o.deliveries,
            o.attempts + 1, o.rank, o.id, o.body, o.reply_to, o.headers, o.dedup_key, o.last_history, o.checkpoint,
            o.task, o.task_key, o.weight, CASE WHEN o.permits > 0
                THEN mainspring.kept_permit(o.task, o.permits, 0, (SELECT mainspring.blocking_tasks(box, 'dead'))) END,
            o.error, o.error_type, o.traceback
        FROM gone o WHERE o.error IS NOT NULL
    )
    SELECT array_agg(o.n), count(o.error), array_agg(o.task) FILTER (WHERE o.permits > 0),
            array_agg(o.task_key) FILTER (WHERE o.permits > 0)
        INTO done, died, tasks, keys FROM gone o;
    IF done IS NULL THEN
        RETURN;
    END IF;
    IF tasks IS NOT NULL THEN
        PERFORM mainspring.free_permits(box, tasks, keys);
    END IF;
    INSERT INTO mainspring.tallies (mailbox, in_flight, settled, dead)
        VALUES (box, -cardinality(done), cardinality(done) - died, died);
    FOR reply IN
        SELECT r.target, count(*) AS number, array_agg(r.id) AS ids, array_agg(r.body) AS bodies,
            array_agg(r.headers) AS headers
        FROM unnest(targets, reply_ids, reply_bodies, reply_headers) WITH ORDINALITY AS r (target, id, body, headers, n)
        WHERE r.n = ANY (done) AND r.target IS NOT NULL
        GROUP BY r.target
    LOOP
        INSERT INTO mainspring.messages (id, mailbox, state, rank, pos, enqueued_at, headers, body)
            SELECT g.id, reply.target, 0, 0, nextval('mainspring.positions'), at, g.headers, g.body
            FROM unnest(reply.ids, reply.bodies, reply.headers) AS g (id, body, headers);
        INSERT INTO mainspring.tallies (mailbox, pending) VALUES (reply.target, reply.number);
        PERFORM mainspring.notify(reply.target, reply.number);
    END LOOP;
    RETURN QUERY SELECT unnest(done);
END $$;

CREATE OR REPLACE FUNCTION mainspring.nack(
    box integer, ids text[], leases integer[], delays float8[], charges integer[], fronts integer[], histories text[]
) RETURNS TABLE (n bigint, rank smallint, pos bigint, is_pending boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- To the queue again: after a delay, at the tail, or (`fronts`) where it was.
DECLARE
    at timestamptz := clock_timestamp();
    here record;
    back bigint := 0;
    late bigint := 0;
    tasks text[] := '{}';
    keys text[] := '{}';
BEGIN
    FOR here IN
        UPDATE mainspring.messages m SET
            state = CASE WHEN g.delay > 0 THEN 1 ELSE 0 END,
            due = CASE WHEN g.delay > 0 THEN at + g.delay * interval '1 second' END,
            pos = CASE WHEN g.front = 1 THEN m.pos WHEN m.task_key IS NULL OR g.delay > 0 THEN nextval('mainspring.positions')
                ELSE mainspring.place_of(box, m.task, m.task_key, m.rank, m.weight) END,
            attempts = m.attempts + g.charge,
            permits = CASE WHEN m.permits > 0
                THEN mainspring.kept_permit(m.task, m.permits, g.front, (SELECT mainspring.blocking_tasks(box, 'retry'))) END,
            history = coalesce(g.history, m.history)
        FROM unnest(ids, leases, delays, charges, fronts, histories) WITH ORDINALITY
            AS g (id, lease, delay, charge, front, history, n)
        WHERE m.id = g.id AND m.lease = g.lease AND m.mailbox = box AND m.state + 0 = 2 AND m.due > clock_timestamp()
        RETURNING g.n, m.rank, m.pos, m.state, m.permits, m.task, m.task_key
    LOOP
        n := here.n;
        rank := here.rank;
        pos := here.pos;
        is_pending := here.state = 0;
        back := back + 1;
        late := late + here.state;
        IF here.permits IS NOT NULL THEN
            tasks := tasks || here.task;
            keys := keys || here.task_key;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF cardinality(tasks) > 0 THEN
        PERFORM mainspring.free_permits(box, tasks, keys);
    END IF;
    IF back > 0 THEN
        INSERT INTO mainspring.tallies (mailbox, pending, delayed, in_flight) VALUES (box, back - late, late, -back);
        PERFORM mainspring.notify(box, back - late);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.extend(box integer, ids text[], leases integer[], timeouts float8[])
RETURNS SETOF bigint
LANGUAGE sql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
    UPDATE mainspring.messages m SET due = greatest(m.due, clock_timestamp() + g.timeout * interval '1 second')
    FROM unnest(ids, leases, timeouts) WITH ORDINALITY AS g (id, lease, timeout, n)
    WHERE m.id = g.id AND m.lease = g.lease AND m.mailbox = box AND m.state + 0 = 2 AND m.due > clock_timestamp()
    RETURNING g.n
$$;

CREATE OR REPLACE FUNCTION mainspring.save_checkpoint(box integer, ids text[], leases integer[], states bytea[])
RETURNS SETOF bigint
LANGUAGE sql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
    UPDATE mainspring.messages m SET checkpoint = g.state
    FROM unnest(ids, leases, states) WITH ORDINALITY AS g (id, lease, state, n)
    WHERE m.id = g.id AND m.lease = g.lease AND m.mailbox = box AND m.state + 0 = 2 AND m.due > clock_timestamp()
    RETURNING g.n
$$;

CREATE OR REPLACE FUNCTION mainspring.cancel(
    box integer, given text, OUT outcome text, OUT wants_reply text, OUT with_headers text
) LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
-- End a message by its id, wherever it is, and say so to the process that holds it.
DECLARE was record;
BEGIN
    PERFORM mainspring.sweep(box, NULL, 10000);
    DELETE FROM mainspring.messages m WHERE m.id = given AND m.mailbox = box
        RETURNING m.state, m.reply_to, m.headers, m.task, m.task_key, m.permits INTO was;
    IF NOT FOUND THEN
        outcome := 'unknown';
        RETURN;
    END IF;
    outcome := CASE WHEN was.state = 2 THEN 'cancelled' ELSE 'removed' END;
    wants_reply := was.reply_to;
    with_headers := was.headers;
    INSERT INTO mainspring.tallies (mailbox, delayed, pending, in_flight, settled) VALUES (box,
        CASE WHEN was.state = 1 THEN -1 ELSE 0 END, CASE WHEN was.state NOT IN (1, 2) THEN -1 ELSE 0 END,
        CASE WHEN was.state = 2 THEN -1 ELSE 0 END, 1);
    IF was.task IS NOT NULL OR was.permits > 0 THEN
        PERFORM mainspring.free_permits(box, ARRAY[was.task], ARRAY[was.task_key]);
    END IF;
    IF was.state = 2 THEN
        PERFORM pg_notify('mainspring', box || ' cancelled ' || given);
    END IF;
END $$;
