-- Tasks, keys and limits: what is new in version 11.
--
-- The new indexes hold only messages of tasks. To make them, PostgreSQL reads the table once for each; sends and claims
-- wait meanwhile.

ALTER SEQUENCE mainspring.positions INCREMENT BY 1000;  -- there are places between two, for keys of a higher weight

ALTER TABLE mainspring.messages
    ADD COLUMN task text COLLATE "C",
    ADD COLUMN task_key text COLLATE "C",
    ADD COLUMN weight real,
    ADD COLUMN permits smallint;            -- see limits.sql
CREATE INDEX messages_by_task ON mainspring.messages (mailbox, task, state, task_key, rank, pos) WHERE task IS NOT NULL;
CREATE INDEX messages_at_task ON mainspring.messages (mailbox, task, rank, pos) WHERE state = 4;
CREATE INDEX messages_let_in ON mainspring.messages (mailbox, rank, pos) WHERE state = 5;
CREATE INDEX messages_permits ON mainspring.messages (mailbox, task, task_key) WHERE permits > 0;

ALTER TABLE mainspring.dead
    ADD COLUMN task text COLLATE "C",
    ADD COLUMN task_key text COLLATE "C",
    ADD COLUMN weight real,
    ADD COLUMN permits smallint;
CREATE INDEX dead_permits ON mainspring.dead (mailbox, task, task_key) WHERE permits > 0;

CREATE TABLE mainspring.task_limits (       -- also of a task that has none any more, while its messages wait at a limiter
    mailbox integer NOT NULL,
    task text COLLATE "C" NOT NULL,         -- '' is the whole mailbox
    concurrency integer,
    rate_limit integer,
    rate_per float8,
    rate_burst integer,
    key_concurrency integer,
    key_rate_limit integer,
    key_rate_per float8,
    key_rate_burst integer,
    blocks text NOT NULL DEFAULT 'running',
    paused boolean NOT NULL DEFAULT false,
    changed_concurrency integer,            -- holds instead of `concurrency`
    spent_until float8 NOT NULL DEFAULT '-infinity',    -- the instant up to which its rate is spent
    opens_at float8,                        -- when its rate allows the next message that waits for it
    PRIMARY KEY (mailbox, task)
) WITH (fillfactor = 50);

CREATE TABLE mainspring.key_rates (         -- of keys whose rate is spent, or has messages waiting for it
    mailbox integer NOT NULL,
    task text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    spent_until float8 NOT NULL,
    waits boolean NOT NULL,
    due float8 NOT NULL,                    -- when it allows the next message that `waits`, or else has nothing to remember
    PRIMARY KEY (mailbox, task, key)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX key_rates_due ON mainspring.key_rates (mailbox, waits, due);

CREATE TABLE mainspring.freed_permits (     -- limiters that may let in a message that waits; claims take the rows out
    mailbox integer NOT NULL,
    task text COLLATE "C" NOT NULL,
    key text COLLATE "C"
) WITH (autovacuum_vacuum_scale_factor = 0.2, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX freed_permits_by_mailbox ON mainspring.freed_permits (mailbox);
