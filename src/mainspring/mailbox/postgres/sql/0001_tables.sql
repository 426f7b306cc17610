-- The tables of the mailboxes, version 1.
--
-- A message is one row of `messages` from its send to its end; `state` says where it is. A claim rewrites the row, an
-- acknowledgement deletes it. Every statement finds its rows by an index that holds only the rows it is about.
-- Instants are the server's; numbers from `positions` say who comes first, and are never used twice.

CREATE SEQUENCE mainspring.positions;

CREATE TABLE mainspring.store (
    one boolean PRIMARY KEY CHECK (one),
    version integer NOT NULL,
    id text NOT NULL                        -- random: a connection to another store is told by it
);

CREATE TABLE mainspring.mailboxes (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    opened_at timestamptz NOT NULL,
    listened_until timestamptz NOT NULL DEFAULT '-infinity'     -- until then a receive may wait for a notification
) WITH (fillfactor = 50);

CREATE TABLE mainspring.ranks (             -- the priorities that a mailbox has ever had, negated
    mailbox integer NOT NULL,
    rank smallint NOT NULL,
    PRIMARY KEY (mailbox, rank)
);

CREATE TABLE mainspring.messages (
    pos bigint NOT NULL,                    -- its place among those of its rank
    enqueued_at timestamptz NOT NULL,
    due timestamptz,                        -- the end of its delay or of its lease
    first_received_at timestamptz,
    expires_at timestamptz,
    mailbox integer NOT NULL,
    lease integer NOT NULL DEFAULT 0,       -- the number of its last lease: with its id, the receipt handle
    deliveries integer NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,    -- those deliveries that were charged, but for the one under way
    rank smallint NOT NULL,                 -- the negative priority
    state smallint NOT NULL,                -- 0 pending, 1 delayed, 2 in flight
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    body bytea NOT NULL,
    reply_to text,
    headers text,
    dedup_key text COLLATE "C",
    history text,
    checkpoint bytea
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX messages_pending ON mainspring.messages (mailbox, rank, pos) WHERE state = 0;
CREATE INDEX messages_due ON mainspring.messages (mailbox, due) WHERE state <> 0;
CREATE INDEX messages_expiring ON mainspring.messages (mailbox, expires_at)
    WHERE expires_at IS NOT NULL AND state <> 2;
CREATE UNIQUE INDEX messages_by_key ON mainspring.messages (mailbox, dedup_key) WHERE dedup_key IS NOT NULL;

CREATE TABLE mainspring.dead (
    place bigint PRIMARY KEY,
    mailbox integer NOT NULL,
    dead_at timestamptz NOT NULL,
    enqueued_at timestamptz NOT NULL,
    first_received_at timestamptz,
    lease integer NOT NULL,
    deliveries integer NOT NULL,
    attempts integer NOT NULL,
    rank smallint NOT NULL,
    id text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    reply_to text,
    headers text,
    dedup_key text COLLATE "C",             -- has it again when it is replayed, unless another message has it by then
    history text,
    checkpoint bytea,
    error text NOT NULL,
    error_type text NOT NULL,
    traceback text NOT NULL
);
CREATE INDEX dead_by_mailbox ON mainspring.dead (mailbox, place);
CREATE INDEX dead_by_id ON mainspring.dead (mailbox, id);

CREATE TABLE mainspring.tallies (           -- changes of the counts; their sums are the counts, and folding keeps them few
    mailbox integer NOT NULL,
    delayed bigint NOT NULL DEFAULT 0,
    pending bigint NOT NULL DEFAULT 0,
    in_flight bigint NOT NULL DEFAULT 0,
    settled bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0.2, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX tallies_by_mailbox ON mainspring.tallies (mailbox);
