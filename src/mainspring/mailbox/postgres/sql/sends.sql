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
            attempts, rank, id, body, reply_to, headers, dedup_key, history, checkpoint, error, error_type, traceback)
        VALUES (nextval('mainspring.positions'), box, was.expires_at, was.enqueued_at, was.first_received_at, was.lease,
            was.deliveries, was.attempts + CASE WHEN was.state = 2 THEN 1 ELSE 0 END, was.rank, was.id, was.body,
            was.reply_to, was.headers, was.dedup_key, was.history, was.checkpoint,
            'it was not done before its time (expires_in) ran out', 'MessageExpiredError', '');
    INSERT INTO mainspring.tallies (mailbox, delayed, pending, in_flight, dead) VALUES (box,
        CASE WHEN was.state = 1 THEN -1 ELSE 0 END, CASE WHEN was.state = 0 THEN -1 ELSE 0 END,
        CASE WHEN was.state = 2 THEN -1 ELSE 0 END, 1);
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_dedup(
    box integer, new_id text, new_body bytea, delay float8, new_rank smallint, new_reply_to text, new_headers text,
    life float8, key text
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
            INTO found_id, is_over FROM mainspring.messages m WHERE m.mailbox = box AND m.dedup_key = key;
        IF is_over THEN
            PERFORM mainspring.dead_letter_expired(box, key);
            CONTINUE;
        ELSIF found_id IS NOT NULL THEN
            RETURN found_id;
        END IF;
        INSERT INTO mainspring.messages
                (id, mailbox, state, rank, pos, enqueued_at, due, expires_at, reply_to, headers, body, dedup_key)
            VALUES (new_id, box, CASE WHEN late THEN 1 ELSE 0 END, new_rank, nextval('mainspring.positions'), at,
                CASE WHEN late THEN at + delay * interval '1 second' END, at + life * interval '1 second',
                new_reply_to, new_headers, new_body, key)
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
    life float8, key text
) RETURNS text LANGUAGE plpgsql AS $$
-- The same; NULL where another transaction, which has sent the key, has not ended by the lock_timeout.
BEGIN
    RETURN mainspring.send_dedup(box, new_id, new_body, delay, new_rank, new_reply_to, new_headers, life, key);
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_many_dedup(
    box integer, ids text[], bodies bytea[], delays float8[], ranks smallint[], reply_tos text[], all_headers text[],
    lives float8[], keys text[], lock_wait float8, apart boolean
) RETURNS SETOF text LANGUAGE plpgsql AS $$
-- The same for many, in a transaction of the mailbox's own. It waits `lock_wait` seconds for another one that has sent a key; then
-- it fails, or (`apart`) does so without that message, whose id is NULL. The COMMIT has no such end: it waits for others that
-- commit notifications just now, who are no reason to give up.
DECLARE one record;
BEGIN
    PERFORM set_config('lock_timeout', lock_wait * 1000 || 'ms', true);
    FOR one IN SELECT * FROM unnest(ids, bodies, delays, ranks, reply_tos, all_headers, lives, keys)
        AS g (id, body, delay, rank, reply_to, headers, life, key)
    LOOP
        IF apart THEN
            RETURN NEXT mainspring.try_send_dedup(
                box, one.id, one.body, one.delay, one.rank, one.reply_to, one.headers, one.life, one.key);
        ELSE
            RETURN NEXT mainspring.send_dedup(
                box, one.id, one.body, one.delay, one.rank, one.reply_to, one.headers, one.life, one.key);
        END IF;
    END LOOP;
    PERFORM set_config('lock_timeout', '0', true);
END $$;

CREATE OR REPLACE FUNCTION mainspring.send_dedup_within(
    box integer, new_id text, new_body bytea, delay float8, new_rank smallint, new_reply_to text, new_headers text,
    life float8, key text, patience float8
) RETURNS text LANGUAGE plpgsql AS $$
-- The same, in a sender's own transaction; NULL where the other has not ended after `patience` seconds, or by the lock_timeout
-- of this transaction, which goes on as if nothing had been tried.
DECLARE
    theirs text := current_setting('lock_timeout');
    named text;
BEGIN
    patience := least(patience, nullif(extract(epoch FROM theirs::interval), 0)) * 1000;
    PERFORM set_config('lock_timeout', greatest(least(ceil(patience), 2147483647), 1)::bigint || 'ms', true);
    named := mainspring.send_dedup(box, new_id, new_body, delay, new_rank, new_reply_to, new_headers, life, key);
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
