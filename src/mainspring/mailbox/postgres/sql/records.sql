-- Records.
--
-- A record counts as gone from the instant of its end, whether or not `end_records` has deleted it.

CREATE OR REPLACE FUNCTION mainspring.write_record(
    box integer, of_kind text, of_key text, new_value bytea, life float8, if_version bigint
) RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
-- Write a record, or (without a value) delete it. Its version, 0 for a deletion; NULL, and nothing is done, where
-- `if_version` (0: there must be none) is given and is not the one that is there.
DECLARE
    at timestamptz := clock_timestamp();
    ends timestamptz := at + life * interval '1 second';
    written bigint;
BEGIN
    IF new_value IS NULL THEN
        IF if_version = 0 THEN
            RETURN CASE WHEN NOT EXISTS (SELECT FROM mainspring.find_records(box, of_kind, ARRAY[of_key])) THEN 0 END;
        END IF;
        DELETE FROM mainspring.records r WHERE r.mailbox = box AND r.kind = of_kind AND r.key = of_key
            AND (if_version IS NULL OR (r.version = if_version AND coalesce(r.expires_at > at, true)));
        RETURN CASE WHEN FOUND OR if_version IS NULL THEN 0 END;
    ELSIF if_version > 0 THEN
        UPDATE mainspring.records r SET version = nextval('mainspring.positions'), expires_at = ends, value = new_value
            WHERE r.mailbox = box AND r.kind = of_kind AND r.key = of_key AND r.version = if_version
                AND coalesce(r.expires_at > at, true)
            RETURNING r.version INTO written;
    ELSE
        INSERT INTO mainspring.records AS r (mailbox, kind, key, version, expires_at, value)
            VALUES (box, of_kind, of_key, nextval('mainspring.positions'), ends, new_value)
            ON CONFLICT (mailbox, kind, key) DO UPDATE
                SET version = excluded.version, expires_at = excluded.expires_at, value = excluded.value
                WHERE if_version IS NULL OR r.expires_at <= at
            RETURNING r.version INTO written;
    END IF;
    RETURN written;
END $$;

CREATE OR REPLACE FUNCTION mainspring.write_record_and_send(
    box integer, of_kind text, of_key text, new_value bytea, life float8, if_version bigint, capacity bigint, lock_wait float8,
    ids text[], bodies bytea[], delays float8[], ranks smallint[], reply_tos text[], all_headers text[], lives float8[],
    tasks text[], keys text[], weights float8[],
    dedup_ids text[], dedup_bodies bytea[], dedup_delays float8[], dedup_ranks smallint[], dedup_reply_tos text[],
    dedup_headers text[], dedup_lives float8[], dedup_tasks text[], dedup_keys text[], dedup_weights float8[], dedups text[],
    OUT written bigint, OUT waiting bigint, OUT more bigint, OUT sent text[]
) LANGUAGE plpgsql AS $$
-- Write a record and send messages, those with a dedup key apart: all of it or nothing. `written` is what `write_record` returns,
-- and `sent` has the ids of the messages with keys. `waiting` is set, and nothing is done, where there is no room for `more`
-- messages. It waits `lock_wait` seconds for another transaction that has sent a key; then it fails.
BEGIN
    BEGIN
        written := mainspring.write_record(box, of_kind, of_key, new_value, life, if_version);
        IF written IS NOT NULL AND capacity IS NOT NULL THEN
            waiting := mainspring.lock_capacity(box);
            more := cardinality(ids) + (SELECT count(DISTINCT d) FROM unnest(dedups) AS d)
                - (SELECT count(*) FROM mainspring.used_dedup_keys(box, dedups));
            IF more > 0 AND waiting + more > capacity THEN
                RAISE EXCEPTION 'no room' USING ERRCODE = 'MS003';
            END IF;
            waiting := NULL;
        END IF;
    EXCEPTION WHEN SQLSTATE 'MS003' THEN
        written := NULL;
    END;
    IF written IS NOT NULL AND cardinality(ids) > 0 THEN
        PERFORM mainspring.send_tasks(box, ids, bodies, delays, ranks, reply_tos, all_headers, lives, tasks, keys, weights);
    END IF;
    IF written IS NOT NULL AND cardinality(dedups) > 0 THEN
        sent := ARRAY(SELECT mainspring.send_many_dedup(box, dedup_ids, dedup_bodies, dedup_delays, dedup_ranks,
            dedup_reply_tos, dedup_headers, dedup_lives, dedups, dedup_tasks, dedup_keys, dedup_weights, lock_wait, false));
    END IF;
END $$;

CREATE OR REPLACE FUNCTION mainspring.find_records(box integer, of_kind text, keys text[])
RETURNS TABLE (kind text, key text, value bytea, version bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
BEGIN
    RETURN QUERY SELECT r.kind, r.key, r.value, r.version FROM mainspring.records r
        WHERE r.mailbox = box AND r.kind = of_kind AND r.key = ANY (keys)
            AND coalesce(r.expires_at > clock_timestamp(), true);
END $$;

CREATE OR REPLACE FUNCTION mainspring.list_records(box integer, of_kind text, most integer, behind text)
RETURNS TABLE (kind text, key text, value bytea, version bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
-- A page, in the order of the keys.
BEGIN
    RETURN QUERY SELECT r.kind, r.key, r.value, r.version FROM mainspring.records r
        WHERE r.mailbox = box AND r.kind = of_kind AND r.key >= coalesce(behind, '') AND r.key IS DISTINCT FROM behind
            AND coalesce(r.expires_at > clock_timestamp(), true)
        ORDER BY r.key LIMIT most;
END $$;

CREATE OR REPLACE FUNCTION mainspring.end_records(most integer) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- Delete records that have ended, the first ones first and at most `most`; how many. Those that another process deletes or
-- writes just now are left to it.
DECLARE ended bigint;
BEGIN
    DELETE FROM mainspring.records r USING (
        SELECT e.mailbox, e.kind, e.key FROM mainspring.records e
        WHERE e.expires_at <= clock_timestamp() AND e.expires_at IS NOT NULL
        ORDER BY e.expires_at LIMIT most FOR UPDATE SKIP LOCKED
    ) AS o WHERE r.mailbox = o.mailbox AND r.kind = o.kind AND r.key = o.key;
    GET DIAGNOSTICS ended = ROW_COUNT;
    RETURN ended;
END $$;

CREATE OR REPLACE FUNCTION mainspring.want_results(box integer) RETURNS void LANGUAGE sql AS $$
-- Note that a process waits for results, so that they are announced; others that note it are not waited for.
    UPDATE mainspring.mailboxes b SET results_until = clock_timestamp() + interval '60 seconds'
        WHERE b.id = (
            SELECT c.id FROM mainspring.mailboxes c
            WHERE c.id = box AND c.results_until < clock_timestamp() + interval '45 seconds' FOR UPDATE SKIP LOCKED
        )
$$;

CREATE OR REPLACE FUNCTION mainspring.settle_with_results(
    box integer, ids text[], leases integer[], errors text[], error_types text[], tracebacks text[], histories text[],
    targets integer[], reply_ids text[], reply_bodies bytea[], reply_headers text[], results bytea[], lives float8[]
) RETURNS SETOF bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
-- What `settle` does, and keep the results of those that were held for `lives` seconds. Announce them, when this transaction
-- commits, if a process waits for results: up to 100 ids in each notification, which has room for 8000 bytes.
DECLARE
    at timestamptz := clock_timestamp();
    done bigint[] := ARRAY(SELECT mainspring.settle(box, ids, leases, errors, error_types, tracebacks, histories, targets,
        reply_ids, reply_bodies, reply_headers));
    told text;
BEGIN
    INSERT INTO mainspring.records (mailbox, kind, key, version, expires_at, value)
        SELECT box, 'result', g.id, nextval('mainspring.positions'), at + g.life * interval '1 second', g.result
        FROM unnest(ids, results, lives) WITH ORDINALITY AS g (id, result, life, n) WHERE g.n = ANY (done)
        ON CONFLICT (mailbox, kind, key) DO UPDATE
            SET version = excluded.version, expires_at = excluded.expires_at, value = excluded.value;
    IF EXISTS (SELECT FROM mainspring.mailboxes b WHERE b.id = box AND b.results_until > at) THEN
        FOR told IN
            SELECT string_agg(ids[n], ' ') FROM unnest(done) WITH ORDINALITY AS d (n, place) WHERE n > 0 GROUP BY place / 100
        LOOP
            PERFORM pg_notify('mainspring', box || ' results ' || told) WHERE octet_length(told) < 7900;
        END LOOP;
    END IF;
    RETURN QUERY SELECT unnest(done);
END $$;
