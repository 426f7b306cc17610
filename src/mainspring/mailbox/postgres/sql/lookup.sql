-- Unfinished messages that are found by their ids or listed, and messages that wait and are changed by their ids.

CREATE OR REPLACE FUNCTION mainspring.unfinished(box integer, named text[]) RETURNS TABLE (
    id text, body bytea, deliveries integer, attempts integer, enqueued_at float8, first_received_at float8, reply_to text,
    headers text, checkpoint bytea, history text, place text, due float8, rank smallint, key text
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- Those that are unfinished by now. It changes nothing: a lease or a delay that is over counts so, whether or not a sweep has
-- found it, and a message that has expired is finished.
DECLARE at timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
        SELECT m.id, m.body, m.deliveries, m.attempts + CASE WHEN m.state = 2 THEN 1 ELSE 0 END,
            extract(epoch FROM m.enqueued_at)::float8, extract(epoch FROM m.first_received_at)::float8, m.reply_to, m.headers,
            m.checkpoint, m.history,
            CASE WHEN m.state NOT IN (1, 2) OR m.due <= at THEN 'pending' WHEN m.state = 1 THEN 'delayed' ELSE 'in_flight' END,
            CASE WHEN m.state = 1 AND m.due > at THEN extract(epoch FROM m.due)::float8 END, m.rank, m.task_key
        FROM mainspring.messages m
        WHERE m.id = ANY (named) AND m.mailbox = box
            AND (coalesce(m.expires_at > at, true) OR (m.state = 2 AND m.due > at));
END $$;

CREATE OR REPLACE FUNCTION mainspring.tasks_of(box integer, limited boolean) RETURNS SETOF text
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The tasks that have unfinished messages, or (`limited`) limits.
DECLARE name text := '';
BEGIN
    IF limited THEN
        RETURN QUERY SELECT l.task FROM mainspring.task_limits l WHERE l.mailbox = box AND l.task <> '';
        RETURN;
    END IF;
    LOOP
        SELECT m.task INTO name FROM mainspring.messages m WHERE m.mailbox = box AND m.task > name ORDER BY m.task LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN NEXT name;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION mainspring.list_messages(
    box integer, states integer[], tasks text[], keyed integer[], of_key text, since float8, most integer, looks integer,
    behind text[]
) RETURNS TABLE (id text, part integer, got_to text[])
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
-- The ids of up to `most` messages that were sent `since`, of the parts one after another, the first one `behind` the place
-- where the last page ended. A part is the messages of a state, in their order; or those of a task with that state, which have
-- a key (that one, if it is given; `keyed` is 1) or none. It looks at `looks` messages. The last row has no id: where it ended, the number of
-- its part from 1 and its place there, or NULL if it came to the end.
DECLARE
    page refcursor;
    one record;
BEGIN
    FOR n IN 1 .. cardinality(states) LOOP
        IF tasks[n] IS NULL AND states[n] = 0 THEN
            OPEN page FOR SELECT m.id, m.state, m.enqueued_at, ARRAY[m.rank::text, m.pos::text, m.id] AS place
                FROM mainspring.messages m WHERE m.mailbox = box AND m.state = 0
                AND (m.rank, m.pos) >= (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0))
                AND (m.rank, m.pos, m.id) > (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0),
                    coalesce(behind[3], '')) ORDER BY m.rank, m.pos, m.id LIMIT looks;
        ELSIF tasks[n] IS NULL AND states[n] = 5 THEN
            OPEN page FOR SELECT m.id, m.state, m.enqueued_at, ARRAY[m.rank::text, m.pos::text, m.id] AS place
                FROM mainspring.messages m WHERE m.mailbox = box AND m.state = 5
                AND (m.rank, m.pos) >= (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0))
                AND (m.rank, m.pos, m.id) > (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0),
                    coalesce(behind[3], '')) ORDER BY m.rank, m.pos, m.id LIMIT looks;
        ELSIF tasks[n] IS NULL AND states[n] = 1 THEN
            OPEN page FOR SELECT m.id, m.state, m.enqueued_at, ARRAY[extract(epoch FROM m.due)::text, m.id] AS place
                FROM mainspring.messages m WHERE m.mailbox = box AND m.state = 1
                AND m.due >= coalesce(to_timestamp(behind[1]::float8), '-infinity'::timestamptz)
                AND (m.due, m.id) > (coalesce(to_timestamp(behind[1]::float8), '-infinity'::timestamptz), coalesce(behind[2], ''))
                ORDER BY m.due, m.id LIMIT looks;
        ELSIF tasks[n] IS NULL THEN
            OPEN page FOR SELECT m.id, m.state, m.enqueued_at, ARRAY[extract(epoch FROM m.due)::text, m.id] AS place
                FROM mainspring.messages m WHERE m.mailbox = box AND m.state <> 0
                AND m.due >= coalesce(to_timestamp(behind[1]::float8), '-infinity'::timestamptz)
                AND (m.due, m.id) > (coalesce(to_timestamp(behind[1]::float8), '-infinity'::timestamptz), coalesce(behind[2], ''))
                ORDER BY m.due, m.id LIMIT looks;
        ELSIF keyed[n] = 1 AND of_key IS NULL THEN
            OPEN page FOR SELECT m.id, m.state, m.enqueued_at, ARRAY[m.task_key, m.rank::text, m.pos::text, m.id] AS place
                FROM mainspring.messages m WHERE m.mailbox = box AND m.task = tasks[n] AND m.state = states[n]
                AND (m.task_key, m.rank, m.pos) >= (coalesce(behind[1], ''), coalesce(behind[2]::integer, -32768),
                    coalesce(behind[3]::bigint, 0))
                AND (m.task_key, m.rank, m.pos, m.id) > (coalesce(behind[1], ''), coalesce(behind[2]::integer, -32768),
                    coalesce(behind[3]::bigint, 0), coalesce(behind[4], ''))
                ORDER BY m.task_key, m.rank, m.pos, m.id LIMIT looks;
        ELSIF keyed[n] = 1 THEN
            OPEN page FOR SELECT m.id, m.state, m.enqueued_at, ARRAY[m.rank::text, m.pos::text, m.id] AS place
                FROM mainspring.messages m WHERE m.mailbox = box AND m.task = tasks[n] AND m.state = states[n] AND m.task_key = of_key
                AND (m.rank, m.pos) >= (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0))
                AND (m.rank, m.pos, m.id) > (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0),
                    coalesce(behind[3], '')) ORDER BY m.rank, m.pos, m.id LIMIT looks;
        ELSE
            OPEN page FOR SELECT m.id, m.state, m.enqueued_at, ARRAY[m.rank::text, m.pos::text, m.id] AS place
                FROM mainspring.messages m WHERE m.mailbox = box AND m.task = tasks[n] AND m.state = states[n] AND m.task_key IS NULL
                AND (m.rank, m.pos) >= (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0))
                AND (m.rank, m.pos, m.id) > (coalesce(behind[1]::integer, -32768), coalesce(behind[2]::bigint, 0),
                    coalesce(behind[3], '')) ORDER BY m.rank, m.pos, m.id LIMIT looks;
        END IF;
        LOOP
            FETCH page INTO one;
            EXIT WHEN NOT FOUND;
            part := n;
            got_to := one.place;
            looks := looks - 1;
            IF one.state = states[n] AND coalesce(one.enqueued_at >= to_timestamp(since), true) THEN
                id := one.id;
                most := most - 1;
                RETURN NEXT;
            END IF;
            EXIT WHEN most = 0 OR looks = 0;
        END LOOP;
        CLOSE page;
        behind := NULL;
        IF most = 0 OR looks = 0 THEN
            id := NULL;
            RETURN NEXT;
            RETURN;
        END IF;
    END LOOP;
    id := NULL;
    part := NULL;
    got_to := NULL;
    RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION mainspring.replace_body(box integer, given text, new_body bytea) RETURNS text
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- Let a message that waits have another body. What was done.
BEGIN
    PERFORM mainspring.sweep_all(box);
    UPDATE mainspring.messages m SET body = new_body WHERE m.id = given AND m.mailbox = box AND m.state + 0 <> 2;
    IF FOUND THEN
        RETURN 'rescheduled';
    END IF;
    RETURN CASE WHEN EXISTS (SELECT FROM mainspring.messages m WHERE m.id = given AND m.mailbox = box)
        THEN 'in_flight' ELSE 'unknown' END;
END $$;

CREATE OR REPLACE FUNCTION mainspring.reschedule(box integer, given text, delay float8) RETURNS text
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- Let a message that waits become pending in `delay` seconds. With 0, one that is pending stays where it is. What was done.
DECLARE
    at timestamptz := clock_timestamp();
    late integer := CASE WHEN delay > 0 THEN 1 ELSE 0 END;
    was record;
    was_late integer;
BEGIN
    PERFORM mainspring.sweep_all(box);
    SELECT m.state, m.task, m.task_key, m.permits INTO was FROM mainspring.messages m
        WHERE m.id = given AND m.mailbox = box AND m.state + 0 <> 2 FOR UPDATE;
    IF NOT FOUND THEN
        RETURN CASE WHEN EXISTS (SELECT FROM mainspring.messages m WHERE m.id = given AND m.mailbox = box)
            THEN 'in_flight' ELSE 'unknown' END;
    END IF;
    was_late := CASE WHEN was.state = 1 THEN 1 ELSE 0 END;
    IF was_late = 1 OR late = 1 THEN
        UPDATE mainspring.messages m SET state = late,
            pos = CASE WHEN late = 1 THEN nextval('mainspring.positions')
                ELSE mainspring.place_of(box, m.task, m.task_key, m.rank, m.weight) END,
            due = CASE WHEN late = 1 THEN at + delay * interval '1 second' END,
            permits = CASE WHEN m.permits IN (0, 5) THEN NULL ELSE m.permits END
            WHERE m.id = given;
        INSERT INTO mainspring.tallies (mailbox, delayed, pending) VALUES (box, late - was_late, was_late - late);
        IF was.task IS NOT NULL THEN
            PERFORM mainspring.free_permits(box, ARRAY[was.task], ARRAY[was.task_key]);
        END IF;
        PERFORM mainspring.notify(box, 1 - late);
    END IF;
    RETURN 'rescheduled';
END $$;
