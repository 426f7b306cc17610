-- Dead letters by task, and delayed messages apart from those in flight: what is new in version 12.
--
-- To make an index, PostgreSQL reads its table once; sends and claims wait meanwhile.

CREATE INDEX messages_delayed ON mainspring.messages (mailbox, due) WHERE state = 1;

-- A dead letter of before version 11 has its task in its body alone, if it is a call.

UPDATE mainspring.dead d SET task = encode(c.name, 'escape') FROM (
    SELECT o.place, substring(o.body FROM 10 FOR position('","args":'::bytea IN o.body) - 10) AS name FROM mainspring.dead o
    WHERE o.task IS NULL AND substring(o.body FROM 1 FOR 9) = '{"task":"'::bytea
        AND position('","args":'::bytea IN o.body) BETWEEN 11 AND 209
) c WHERE c.place = d.place AND encode(c.name, 'escape') ~ '^[A-Za-z0-9_.:/-]+$';
CREATE INDEX dead_by_task ON mainspring.dead (mailbox, task, place) WHERE task IS NOT NULL;
