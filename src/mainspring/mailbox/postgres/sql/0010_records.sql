-- The records of mailboxes, and until when results are announced: what is new in version 10.

CREATE TABLE mainspring.records (
    mailbox integer NOT NULL,
    version bigint NOT NULL,                -- one of the `positions`
    expires_at timestamptz,
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (mailbox, kind, key)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX records_ending ON mainspring.records (expires_at) WHERE expires_at IS NOT NULL;

ALTER TABLE mainspring.mailboxes
    ADD COLUMN results_until timestamptz NOT NULL DEFAULT '-infinity';  -- until then a process may wait for a result
