"""The SQLite file: its tables, and the statements that work on them.

A message is one row of ``messages`` from its send to its end; the row is written again only when the message comes back.
Where it stands is said by a small row in one other table: ``ready`` (in order of delivery), ``waiting`` (at a limiter),
``delayed`` (in order of due time) or ``leases`` (one per delivery; its key is the receipt handle). So a claim moves small rows
and leaves bodies alone, and every statement finds its rows by a key: none depends on how many messages there are.

Numbers (``seq``, ``lease``, ``place`` of a dead letter) come from one counter, and are never used twice. It is the ``tick`` of
mailbox 0, which stands for the file itself: so the counter is mostly on the same page as the counts that change with it. A
place in the queue (``pos``) is such a number, too, but for a message with a key: that has one behind the last of its key, maybe
a fraction, and others may have the same.

Leases are in seconds since boot, and all of them belong to the boot named in ``store``. Dates, delays, expiries and what rates
have spent are POSIX seconds, because they outlast a restart of the machine.

Limits. ``limits`` has what was declared, by task, and ``limiters`` the permits that are out, by task and key. A message's own
permits (``permits``, bits) are in the small row that says where it stands, and in that of a dead letter. Mailbox 0 has a number
that changes with the limits, and none while there are none: so a file without limits reads no page of theirs. A message without
a task is in no index by task or key.

Records are beside the messages. Mailbox 0 says when the first of them ends, so a transaction need not look for ended records,
and a mailbox without records reads no page of theirs.
"""

# ruff: noqa: S608 - the statements are put together here, from constants; values are always bound
from __future__ import annotations

APPLICATION_ID = 0x4D53_5047  # "MSPG"
SCHEMA_VERSION = 7

READY = """
CREATE TABLE ready (
    mailbox INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    pos ANY NOT NULL,
    seq INTEGER NOT NULL,
    permits INTEGER,
    PRIMARY KEY (mailbox, rank, pos, seq)
) STRICT, WITHOUT ROWID;
"""
LEASES = """
CREATE TABLE leases (
    lease INTEGER NOT NULL,
    mailbox INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    pos ANY NOT NULL,               -- where a release puts it back
    until REAL NOT NULL,            -- seconds since boot
    claimed_at REAL NOT NULL,
    permits INTEGER,
    PRIMARY KEY (mailbox, lease)
) STRICT, WITHOUT ROWID;
CREATE INDEX leases_by_end ON leases (until);
"""
EXPIRING = """
CREATE TABLE expiring (             -- messages with an expiry that are not in flight
    expires_at REAL NOT NULL,
    seq INTEGER NOT NULL,
    pos ANY,                        -- its place in ready, or
    due REAL,                       -- its place in delayed
    PRIMARY KEY (expires_at, seq)
) STRICT, WITHOUT ROWID;
"""
OF_MAILBOXES = """
CREATE INDEX delayed_by_mailbox ON delayed (mailbox, seq);
CREATE INDEX dead_by_task ON dead (mailbox, task) WHERE task IS NOT NULL;
"""
LISTS = """
CREATE INDEX messages_by_task ON messages (mailbox, task) WHERE task IS NOT NULL;
CREATE INDEX messages_in_turn ON messages (mailbox, key, task, rank, place) WHERE key IS NOT NULL;
"""
LIMITS = """
CREATE TABLE limits (
    mailbox INTEGER NOT NULL,
    task TEXT NOT NULL,
    declared TEXT NOT NULL,
    paused INTEGER NOT NULL,
    concurrency INTEGER,            -- what holds instead of the declared one
    PRIMARY KEY (mailbox, task)
) STRICT, WITHOUT ROWID;
CREATE TABLE limiters (             -- those that have something to remember
    mailbox INTEGER NOT NULL,
    task TEXT NOT NULL,
    name TEXT NOT NULL,             -- empty: of the task itself; else = and the key
    used INTEGER NOT NULL,
    unclaimed INTEGER NOT NULL,     -- 0 in those of keys while their claims are not counted
    spent_until REAL,
    waiting INTEGER NOT NULL,
    opens_at REAL,                  -- where messages wait for this instant
    idle_at REAL,                   -- from when on it has nothing to remember
    PRIMARY KEY (mailbox, task, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX limiters_by_opening ON limiters (opens_at) WHERE opens_at IS NOT NULL;
CREATE INDEX limiters_by_end ON limiters (idle_at) WHERE idle_at IS NOT NULL;
CREATE TABLE waiting (
    mailbox INTEGER NOT NULL,
    task TEXT NOT NULL,
    name TEXT NOT NULL,             -- of the limiter
    rank INTEGER NOT NULL,
    pos ANY NOT NULL,
    seq INTEGER NOT NULL,
    permits INTEGER NOT NULL,
    PRIMARY KEY (mailbox, task, name, rank, pos, seq)
) STRICT, WITHOUT ROWID;
"""
RECORDS = """
CREATE TABLE records (
    mailbox INTEGER NOT NULL,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,
    expires_at REAL,
    value BLOB NOT NULL,
    PRIMARY KEY (mailbox, kind, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX records_by_end ON records (expires_at) WHERE expires_at IS NOT NULL;
"""

SCHEMA = f"""
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    boot_id TEXT NOT NULL,
    file_id TEXT                    -- random: no other file has it, unless it is a copy
) STRICT;

CREATE TABLE mailboxes (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    delayed INTEGER NOT NULL DEFAULT 0,
    pending INTEGER NOT NULL DEFAULT 0,
    in_flight INTEGER NOT NULL DEFAULT 0,
    settled INTEGER NOT NULL DEFAULT 0,
    dead INTEGER NOT NULL DEFAULT 0,
    used_at REAL,                   -- of a transient one: when it was last opened or kept
    tick INTEGER,                   -- of mailbox 0: the last number that was used
    records_end REAL,               -- of mailbox 0: no record of the file ends before
    waiting INTEGER NOT NULL DEFAULT 0,  -- those of pending that wait at limiters
    most INTEGER,                   -- how many may be in flight by its limits; 0: it is paused
    limited INTEGER,                -- of mailbox 0: another number after each change of limits; NULL: the file has none
    opens_at REAL                   -- of mailbox 0: no limiter of the file opens before
) STRICT;
INSERT INTO mailboxes (id, name, tick) VALUES (0, '', 0);

CREATE TABLE messages (
    seq INTEGER PRIMARY KEY,
    mailbox INTEGER NOT NULL,
    rank INTEGER NOT NULL,          -- the negative priority
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    enqueued_at REAL NOT NULL,
    reply_to TEXT,
    headers TEXT,
    dedup_key TEXT,
    expires_at REAL,
    deliveries INTEGER NOT NULL DEFAULT 0,   -- those that ended in a return
    attempts INTEGER NOT NULL DEFAULT 0,     -- those of them that were charged
    first_received_at REAL,
    checkpoint BLOB,
    history TEXT,
    task TEXT,
    key TEXT,
    weight REAL,                    -- of the key; NULL is 1
    place ANY                       -- of a message with a task: its last pos; NULL: its seq, or none yet
) STRICT;
CREATE UNIQUE INDEX messages_by_key ON messages (mailbox, dedup_key) WHERE dedup_key IS NOT NULL;
CREATE INDEX messages_by_id ON messages (id);

{READY}
CREATE TABLE delayed (
    due REAL NOT NULL,
    seq INTEGER NOT NULL,
    mailbox INTEGER NOT NULL,
    permits INTEGER,
    PRIMARY KEY (due, seq)
) STRICT, WITHOUT ROWID;

{LEASES}
{EXPIRING}
CREATE TABLE dead (
    place INTEGER PRIMARY KEY,
    mailbox INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    enqueued_at REAL NOT NULL,
    reply_to TEXT,
    headers TEXT,
    deliveries INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    first_received_at REAL,
    checkpoint BLOB,
    error TEXT NOT NULL,
    error_type TEXT NOT NULL,
    traceback TEXT NOT NULL,
    dead_at REAL NOT NULL,
    dedup_key TEXT,                 -- has it again when it is replayed, unless another message has it by then
    history TEXT,
    task TEXT,
    key TEXT,
    weight REAL,
    permits INTEGER
) STRICT;
CREATE INDEX dead_by_mailbox ON dead (mailbox, place);
CREATE INDEX dead_by_id ON dead (mailbox, id);
{OF_MAILBOXES}
{LISTS}
{LIMITS}
{RECORDS}
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

MIGRATIONS = {
    1: """
ALTER TABLE messages ADD COLUMN history TEXT;
ALTER TABLE dead ADD COLUMN history TEXT;
ALTER TABLE mailboxes ADD COLUMN used_at REAL;
CREATE INDEX messages_by_id ON messages (id);
CREATE INDEX delayed_by_seq ON delayed (seq);
""",
    2: """
ALTER TABLE mailboxes ADD COLUMN tick INTEGER;
INSERT INTO mailboxes (id, name, tick) SELECT 0, '', tick FROM store;
ALTER TABLE store DROP COLUMN tick;
""",
    3: """
ALTER TABLE store ADD COLUMN file_id TEXT;
UPDATE store SET file_id = lower(hex(randomblob(16)));
""",
    4: f"""
ALTER TABLE mailboxes ADD COLUMN records_end REAL;
{RECORDS}
""",
    5: f"""
ALTER TABLE mailboxes ADD COLUMN waiting INTEGER NOT NULL DEFAULT 0;
ALTER TABLE mailboxes ADD COLUMN most INTEGER;
ALTER TABLE mailboxes ADD COLUMN limited INTEGER;
ALTER TABLE mailboxes ADD COLUMN opens_at REAL;
ALTER TABLE messages ADD COLUMN task TEXT;
ALTER TABLE messages ADD COLUMN key TEXT;
ALTER TABLE messages ADD COLUMN weight REAL;
ALTER TABLE messages ADD COLUMN place ANY;
ALTER TABLE delayed ADD COLUMN permits INTEGER;
ALTER TABLE dead ADD COLUMN task TEXT;
ALTER TABLE dead ADD COLUMN key TEXT;
ALTER TABLE dead ADD COLUMN weight REAL;
ALTER TABLE dead ADD COLUMN permits INTEGER;
ALTER TABLE ready RENAME TO ready_before;
{READY}
INSERT INTO ready SELECT *, NULL FROM ready_before;
DROP TABLE ready_before;
DROP INDEX leases_by_end;
ALTER TABLE leases RENAME TO leases_before;
{LEASES}
INSERT INTO leases SELECT *, NULL FROM leases_before;
DROP TABLE leases_before;
ALTER TABLE expiring RENAME TO expiring_before;
{EXPIRING}
INSERT INTO expiring SELECT * FROM expiring_before;
DROP TABLE expiring_before;
{LISTS}
{LIMITS}
""",
    6: f"""
DROP INDEX delayed_by_seq;
DROP INDEX leases_by_end;
ALTER TABLE leases RENAME TO leases_before;
{LEASES}
INSERT INTO leases SELECT * FROM leases_before;
DROP TABLE leases_before;
UPDATE dead SET task = CAST(substr(body, 10, instr(body, CAST('","args":' AS BLOB)) - 10) AS TEXT)  -- as of a call
    WHERE task IS NULL AND substr(body, 1, 9) = CAST('{{"task":"' AS BLOB)
    AND instr(body, CAST('","args":' AS BLOB)) BETWEEN 11 AND 209
    AND CAST(substr(body, 10, instr(body, CAST('","args":' AS BLOB)) - 10) AS TEXT) NOT GLOB '*[^A-Za-z0-9_.:/-]*';
{OF_MAILBOXES}
""",
}
"""What makes a file of the version that is the key one of the next version."""
SET_VERSION = "PRAGMA user_version = {}"

WHOSE = """SAVEPOINT looking; PRAGMA user_version; PRAGMA application_id; SELECT count(*) FROM sqlite_schema;
    RELEASE looking"""
SETTINGS = """PRAGMA journal_mode = WAL; PRAGMA synchronous = {}; PRAGMA mmap_size = 0; PRAGMA cache_size = -16384"""
START = "INSERT INTO store VALUES (1, ?, ?)"
FILE_ID = "SELECT file_id FROM store WHERE one = 1"
BOOT = "SELECT boot_id FROM store"
NEW_BOOT = "UPDATE store SET boot_id = ?"
VOID_LEASES = "UPDATE leases SET until = -1"

# ------------------------------------------------------------------------------------------------- every transaction

HEAD = """SELECT tick, (SELECT min(until) FROM leases), (SELECT min(due) FROM delayed),
    (SELECT min(expires_at) FROM expiring), records_end, limited, opens_at FROM mailboxes WHERE id = 0"""
TICK = "SELECT tick FROM mailboxes WHERE id = 0"
SET_TICK = "UPDATE mailboxes SET tick = ? WHERE id = 0"
SET_LIMITED = "UPDATE mailboxes SET limited = ?, opens_at = ? WHERE id = 0"
SET_RECORDS_END = "UPDATE mailboxes SET records_end = ? WHERE id = 0"
ADD_MAILBOX = "INSERT INTO mailboxes (id, name) SELECT max(?, coalesce(max(id), 0)) + 1, ? FROM mailboxes"
LAST_MAILBOX = "SELECT max(id) FROM mailboxes"
MAILBOX = "SELECT id FROM mailboxes WHERE name = ?"
COUNTS = "SELECT delayed, pending, in_flight, settled, dead FROM mailboxes WHERE id = ?"
FIRST_SENT = """WITH RECURSIVE ranks (rank) AS (
        SELECT min(rank) FROM ready WHERE mailbox = ?
        UNION ALL SELECT (SELECT min(r.rank) FROM ready AS r WHERE r.mailbox = ? AND r.rank > ranks.rank)
        FROM ranks WHERE ranks.rank IS NOT NULL
    ) SELECT min(m.enqueued_at) FROM ranks CROSS JOIN messages AS m ON m.seq =
        (SELECT r.seq FROM ready AS r WHERE r.mailbox = ? AND r.rank = ranks.rank ORDER BY r.pos, r.seq LIMIT 1)"""
READY_IN = """SELECT id, min(pending - waiting, coalesce(most - in_flight, pending)) FROM mailboxes
    WHERE pending > waiting AND (most IS NULL OR most > in_flight)"""
DROPPED = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT id FROM mailboxes)"
ADD_COUNTS = """UPDATE mailboxes SET delayed = delayed + ?, pending = pending + ?, in_flight = in_flight + ?,
    settled = settled + ?, dead = dead + ?, waiting = waiting + ? WHERE id = ?"""

# -------------------------------------------------------------------------------------------------------- what is due

ENDED_LEASES = """SELECT l.lease, l.mailbox, l.seq, l.claimed_at, m.rank, m.expires_at, m.task, m.key, m.weight, l.permits
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq WHERE l.until <= ? ORDER BY l.until, l.lease LIMIT ?"""
DUE = """SELECT d.due, d.seq, d.mailbox, m.rank, m.expires_at, m.task, m.key, m.weight, d.permits
    FROM delayed AS d CROSS JOIN messages AS m ON m.seq = d.seq WHERE d.due <= ? ORDER BY d.due, d.seq LIMIT ?"""
EXPIRED = """SELECT e.expires_at, e.seq, e.pos, e.due, m.mailbox, m.rank, m.task, m.key,
    (SELECT d.permits FROM delayed AS d WHERE d.due = e.due AND d.seq = e.seq)
    FROM expiring AS e CROSS JOIN messages AS m ON m.seq = e.seq WHERE e.expires_at <= ? ORDER BY 1, 2 LIMIT ?"""

_NO_MESSAGE = "seq NOT IN (SELECT seq FROM messages)"
LEASES_OF_NONE = f"DELETE FROM leases WHERE until <= ? AND {_NO_MESSAGE}"
DELAYS_OF_NONE = f"DELETE FROM delayed WHERE due <= ? AND {_NO_MESSAGE}"
EXPIRIES_OF_NONE = f"DELETE FROM expiring WHERE expires_at <= ? AND {_NO_MESSAGE}"

# ------------------------------------------------------------------------------------------------------------ sending

MESSAGE_COLUMNS = "seq, mailbox, rank, id, body, enqueued_at, reply_to, headers, dedup_key, expires_at"
ADD_MESSAGE = f"INSERT INTO messages ({MESSAGE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
COLUMNS = 10
ADD_CALL = f"""INSERT INTO messages ({MESSAGE_COLUMNS}, task, key, weight, place)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
CALL_COLUMNS = 14
SAME_KEY = "SELECT id FROM messages WHERE mailbox = ? AND dedup_key = ?"
READY_RANGE = """INSERT INTO ready SELECT mailbox, rank, coalesce(place, seq), seq, NULL FROM messages
    WHERE seq BETWEEN ? AND ?"""
ADD_READY = "INSERT INTO ready VALUES (?, ?, ?, ?, ?)"
ADD_DELAYED = "INSERT INTO delayed VALUES (?, ?, ?, ?)"
ADD_EXPIRING = "INSERT INTO expiring VALUES (?, ?, ?, ?)"
FIRST_PLACE = "SELECT pos FROM ready WHERE mailbox = ? AND rank = ? ORDER BY pos LIMIT 1"
LAST_OF_KEY = "SELECT max(place) FROM messages WHERE mailbox = ? AND key = ? AND task = ? AND rank = ?"
LAST_OF_KEYS = """SELECT value, (SELECT max(place) FROM messages WHERE mailbox = ? AND key = value AND task = ? AND rank = ?)
    FROM json_each(?)"""
LAST_SENT_BEFORE = f"{LAST_OF_KEY} AND seq < ?"
SET_PLACE = "UPDATE messages SET place = ? WHERE seq = ?"

# ---------------------------------------------------------------------------------------------------------- receiving

_FIRST_READY = """SELECT r.rank, r.pos, m.seq, m.id, m.body, m.enqueued_at, m.reply_to, m.headers, m.deliveries,
    m.attempts, m.first_received_at, m.checkpoint, m.history, {}m.expires_at
    FROM ready AS r CROSS JOIN messages AS m ON m.seq = r.seq WHERE r.mailbox = ? ORDER BY r.rank, r.pos, r.seq LIMIT ?"""
FIRST_READY = _FIRST_READY.format("")
FIRST_LIMITED = _FIRST_READY.format("m.task, m.key, r.permits, ")
LEASE_FIRST = """INSERT INTO leases SELECT ? + row_number() OVER (ORDER BY rank, pos, seq), mailbox, seq, pos, ?, ?, permits
    FROM (SELECT * FROM ready WHERE mailbox = ? ORDER BY rank, pos, seq LIMIT ?)"""
TAKE_UP_TO = "DELETE FROM ready WHERE mailbox = ? AND (rank, pos, seq) <= (?, ?, ?)"
DROP_LEASES_FROM = "DELETE FROM leases WHERE lease > ? AND mailbox = ?"
ADD_LEASE = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)"
NOT_EXPIRING = "DELETE FROM expiring WHERE expires_at = ? AND seq = ?"

# ----------------------------------------------------------------------------------------------------------- settling

_GIVEN = "IN (SELECT value FROM json_each(?))"
END_LEASES = f"DELETE FROM leases WHERE lease {_GIVEN} AND mailbox = ? AND until > ? RETURNING lease, seq, permits"
DROP_MESSAGES = f"DELETE FROM messages WHERE seq {_GIVEN}"
DROP_CALLS = f"{DROP_MESSAGES} RETURNING seq, task, key"
DROP_LEASES = f"DELETE FROM leases WHERE lease {_GIVEN} AND mailbox = ?"
HELD = """SELECT l.seq, l.pos, l.claimed_at, m.rank, m.expires_at, m.task, m.key, m.weight, l.permits
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq WHERE l.lease = ? AND l.mailbox = ? AND l.until > ?"""
PERMITS_HELD = f"""SELECT m.task, m.key, l.permits FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq
    WHERE l.lease {_GIVEN} AND l.mailbox = ? AND l.permits"""
SET_TASK = "UPDATE messages SET task = ? WHERE seq = ?"
RELEASE_AT = "UPDATE leases SET permits = NULL, pos = ? WHERE lease = ? AND mailbox = ?"
DROP_LEASE = "DELETE FROM leases WHERE lease = ? AND mailbox = ?"
DROP_MESSAGE = "DELETE FROM messages WHERE seq = ?"
CAME_BACK = """UPDATE messages SET deliveries = deliveries + 1, attempts = attempts + ?,
    first_received_at = coalesce(first_received_at, ?) WHERE seq = ?"""
KEEP_HISTORY = "UPDATE messages SET history = ? WHERE seq = ?"
EXTEND = "UPDATE leases SET until = max(until, ?) WHERE lease = ? AND mailbox = ? AND until > ?"
CHECKPOINT = """UPDATE messages SET checkpoint = ? WHERE seq =
    (SELECT seq FROM leases WHERE lease = ? AND mailbox = ? AND until > ?)"""
UNLEASE = f"""INSERT INTO ready SELECT l.mailbox, m.rank, l.pos, l.seq, l.permits
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq WHERE l.lease {_GIVEN} AND l.mailbox = ?"""
UNLEASE_EXPIRING = f"""INSERT INTO expiring SELECT m.expires_at, l.seq, l.pos, NULL
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq
    WHERE l.lease {_GIVEN} AND l.mailbox = ? AND m.expires_at IS NOT NULL"""
FORGET_READY = "DELETE FROM ready WHERE mailbox = ? AND rank = ? AND pos = ? AND seq = ?"
FORGET_DELAYED = "DELETE FROM delayed WHERE due = ? AND seq = ?"

# ------------------------------------------------------------------------------------------------------- dead letters

DEAD_LETTER = """INSERT INTO dead SELECT ?, mailbox, rank, id, body, enqueued_at, reply_to, headers, deliveries + ?,
    attempts + ?, coalesce(first_received_at, ?), checkpoint, ?, ?, ?, ?, dedup_key, coalesce(?, history),
    task, key, weight, ?
    FROM messages WHERE seq = ?"""
_DEAD = """SELECT id, body, deliveries, attempts, enqueued_at, first_received_at, reply_to, headers, checkpoint, history,
    error, error_type, traceback, dead_at FROM dead
    """
DEAD_PAGE = f"""{_DEAD} WHERE mailbox = ? AND place > coalesce((SELECT place FROM dead WHERE mailbox = ? AND id = ?), 0)
    ORDER BY place LIMIT ?"""
DEAD_PAGE_OF = DEAD_PAGE.replace("WHERE mailbox = ? AND place", "WHERE mailbox = ? AND task = ? AND place", 1)
DEAD_BY_ID = f"{_DEAD} WHERE mailbox = ? AND id {_GIVEN}"
_ALL_DEAD = "FROM dead WHERE mailbox = ?"
_SOME_DEAD = f"FROM dead WHERE mailbox = ? AND id {_GIVEN}"
_REVIVE = """INSERT INTO messages (seq, mailbox, rank, id, body, enqueued_at, reply_to, headers, checkpoint, task, key,
    weight, dedup_key)
    SELECT ? + row_number() OVER (ORDER BY place), mailbox, rank, id, body, enqueued_at, reply_to, headers, checkpoint,
    task, key, weight, CASE WHEN row_number() OVER (PARTITION BY dedup_key ORDER BY place) = 1 AND NOT EXISTS (
        SELECT 1 FROM messages AS m WHERE m.mailbox = dead.mailbox AND m.dedup_key = dead.dedup_key
    ) THEN dedup_key END """
REVIVE_ALL = _REVIVE + _ALL_DEAD
REVIVE_SOME = _REVIVE + _SOME_DEAD
_CALLS = """SELECT * FROM (SELECT ? + row_number() OVER (ORDER BY place), rank, task, key, weight, permits {})
    WHERE task IS NOT NULL"""
ALL_DEAD_CALLS = _CALLS.format(_ALL_DEAD)
SOME_DEAD_CALLS = _CALLS.format(_SOME_DEAD)
PERMITS_OF_ALL_DEAD = f"SELECT task, key, permits {_ALL_DEAD} AND permits"
PERMITS_OF_SOME_DEAD = f"SELECT task, key, permits {_SOME_DEAD} AND permits"
REVIVED_OF_NO_TASK = f"{READY_RANGE} AND task IS NULL"
COUNT_ALL_DEAD = "SELECT count(*) " + _ALL_DEAD
COUNT_SOME_DEAD = "SELECT count(*) " + _SOME_DEAD
DROP_ALL_DEAD = "DELETE " + _ALL_DEAD
DROP_SOME_DEAD = "DELETE " + _SOME_DEAD

# -------------------------------------------------------------------------------------------------------------- by id

BY_ID = """SELECT expires_at, reply_to, headers, weight, seq, rank, place, task, key FROM messages
    WHERE id = ? AND mailbox = ?"""
_FOUND = """SELECT m.seq, m.rank, m.place, m.task, m.key, m.id, m.body, m.deliveries, m.attempts, m.enqueued_at,
    m.first_received_at, m.reply_to, m.headers, m.checkpoint, m.history FROM messages AS m"""
FIND = f"{_FOUND} WHERE m.id {_GIVEN} AND m.mailbox = ?"
FIND_BY_NUMBER = f"{_FOUND} WHERE m.seq {_GIVEN}"
_LISTED = "m.enqueued_at >= ? AND (? IS NULL OR m.task = ?) AND (? IS NULL OR m.key = ?)"
_WAITING = f"SELECT m.seq, NULL FROM messages AS m WHERE m.seq {_GIVEN} AND m.mailbox = ? AND {_LISTED}"
LISTED = {
    "ready": _WAITING,
    "waiting": _WAITING,
    "pending": f"""{_WAITING} AND (EXISTS (
            SELECT 1 FROM ready AS r
            WHERE r.mailbox = m.mailbox AND r.rank = m.rank AND r.pos = coalesce(m.place, m.seq) AND r.seq = m.seq
        ) OR EXISTS (
            SELECT 1 FROM waiting AS w
            WHERE w.mailbox = m.mailbox AND w.task = m.task AND w.name IN ('', '=' || m.key)
            AND w.rank = m.rank AND w.pos = coalesce(m.place, m.seq) AND w.seq = m.seq))""",
    "delayed": f"""SELECT m.seq, d.due FROM delayed AS d CROSS JOIN messages AS m ON m.seq = d.seq
        WHERE d.seq {_GIVEN} AND d.mailbox = ? AND {_LISTED}""",
    "leases": f"""SELECT m.seq, l.claimed_at FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq
        WHERE l.lease {_GIVEN} AND l.mailbox = ? AND {_LISTED}""",
}
"""Which entries of a walk are wanted, by its table; of one along the messages of a task or a key, by the place of the list."""
DUE_OF = "SELECT due, permits FROM delayed WHERE mailbox = ? AND seq = ?"
READY_AT = "SELECT permits FROM ready WHERE mailbox = ? AND rank = ? AND pos = ? AND seq = ?"
LEASE_OF = "SELECT lease, claimed_at, permits FROM leases WHERE mailbox = ? AND lease > ? AND seq = ?"
DELIVERIES = "SELECT deliveries FROM messages WHERE seq = ?"
REPLACE_BODY = "UPDATE messages SET body = ? WHERE seq = ?"
FORGET_READY_FROM = "DELETE FROM ready WHERE mailbox = ? AND rank = ? AND pos >= ? AND seq = ?"

# ------------------------------------------------------------------------------------------------------------ records

_RECORD = "SELECT kind, key, value, version FROM records WHERE mailbox = ? AND kind = ?"
_NOT_ENDED = "coalesce(expires_at > ?, true)"
VERSION_OF = f"SELECT version FROM records WHERE mailbox = ? AND kind = ? AND key = ? AND {_NOT_ENDED}"
WRITE_RECORD = "REPLACE INTO records (mailbox, kind, key, version, expires_at, value) VALUES (?, ?, ?, ?, ?, ?)"
DELETE_RECORD = "DELETE FROM records WHERE mailbox = ? AND kind = ? AND key = ?"
FIND_RECORDS = f"{_RECORD} AND key {_GIVEN} AND {_NOT_ENDED}"
LIST_RECORDS = f"{_RECORD} AND key >= coalesce(?, '') AND key IS NOT ? AND {_NOT_ENDED} ORDER BY key LIMIT ?"
END_RECORDS = """DELETE FROM records WHERE (mailbox, kind, key) IN (
    SELECT mailbox, kind, key FROM records WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)"""
FIRST_END = "SELECT min(expires_at) FROM records WHERE expires_at IS NOT NULL"
DROP_RECORDS = "DELETE FROM records WHERE mailbox = ?"

# ------------------------------------------------------------------------------------------------------------- limits

ALL_LIMITS = "SELECT mailbox, task, declared, paused, concurrency FROM limits"
ANY_LIMITS = "SELECT EXISTS (SELECT 1 FROM limits)"
WRITE_LIMITS = "REPLACE INTO limits VALUES (?, ?, ?, ?, ?)"
DROP_LIMITS = "DELETE FROM limits WHERE mailbox = ? AND task = ?"
SET_MOST = "UPDATE mailboxes SET most = ? WHERE id = ?"
READY_WITHIN = "SELECT min(pending - waiting, coalesce(most - in_flight, pending)) FROM mailboxes WHERE id = ?"
HOW_MANY_WAIT = "SELECT waiting FROM mailboxes WHERE id = ?"
USED_BY_TASK = "SELECT task, sum(iif(name = '', used, 0)), sum(waiting) FROM limiters WHERE mailbox = ? GROUP BY task"

_LIMITER = "mailbox = ? AND task = ? AND name = ?"
LIMITER = f"SELECT used, unclaimed, spent_until, waiting, opens_at, idle_at FROM limiters WHERE {_LIMITER}"
LIMITERS = f"""SELECT name, used, unclaimed, spent_until, waiting, opens_at, idle_at FROM limiters
    WHERE mailbox = ? AND task = ? AND name {_GIVEN}"""
ANY_LIMITER = "SELECT 1 FROM limiters WHERE mailbox = ? AND task = ? LIMIT 1"
WRITE_LIMITER = "REPLACE INTO limiters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
ANY_ABOVE = "SELECT 1 FROM limiters WHERE mailbox = ? AND task = ? AND name > '' AND used > ? LIMIT 1"
_HAS_PERMIT = (
    "EXISTS (SELECT 1 FROM {} AND rank = m.rank AND pos = coalesce(m.place, m.seq) AND seq = m.seq AND permits & 1)"
)
COUNT_UNCLAIMED = f"""UPDATE limiters SET unclaimed = (
        SELECT count(*) FROM messages AS m
        WHERE m.mailbox = limiters.mailbox AND m.key = substr(limiters.name, 2) AND m.task = limiters.task AND (
            {_HAS_PERMIT.format("ready WHERE mailbox = m.mailbox")}
            OR {_HAS_PERMIT.format("waiting WHERE mailbox = m.mailbox AND task = m.task AND name = ''")}))
    WHERE mailbox = ? AND task = ? AND name > ''"""
DROP_LIMITER = f"DELETE FROM limiters WHERE {_LIMITER}"
DROP_IDLE = """DELETE FROM limiters WHERE (mailbox, task, name) IN (
    SELECT mailbox, task, name FROM limiters WHERE idle_at <= ? ORDER BY idle_at LIMIT ?)"""
OPENED = "SELECT mailbox, task, name FROM limiters WHERE opens_at <= ? ORDER BY opens_at LIMIT ?"
OPEN_ALL = "UPDATE limiters SET opens_at = ? WHERE mailbox = ? AND task = ? AND waiting > 0"
FIRST_OPENING = "SELECT min(opens_at) FROM limiters WHERE opens_at IS NOT NULL"

ADD_WAITING = "INSERT INTO waiting VALUES (?, ?, ?, ?, ?, ?, ?)"
TAKE_WAITING = f"""DELETE FROM waiting WHERE {_LIMITER} AND (rank, pos, seq) IN (
        SELECT rank, pos, seq FROM waiting WHERE {_LIMITER} ORDER BY rank, pos, seq LIMIT ?)
    RETURNING rank, pos, seq, permits"""
FIRST_WAITING_PLACE = """SELECT pos FROM waiting WHERE mailbox = ? AND task = ? AND name = '' AND rank = ?
    ORDER BY pos LIMIT 1"""
TAKE_WAITING_OF = """DELETE FROM waiting WHERE (mailbox, task, name, rank, pos, seq) IN (
        SELECT w.mailbox, w.task, w.name, w.rank, w.pos, w.seq FROM json_each(?) CROSS JOIN waiting AS w
        ON w.mailbox = ? AND w.task = ? AND w.name = json_each.value AND (w.rank, w.pos, w.seq) = (
            SELECT f.rank, f.pos, f.seq FROM waiting AS f
            WHERE f.mailbox = w.mailbox AND f.task = w.task AND f.name = json_each.value
            ORDER BY f.rank, f.pos, f.seq LIMIT 1))
    RETURNING name, rank, pos, seq, permits"""
KEY_OF = "SELECT key FROM messages WHERE seq = ?"
WAITS_AT = """SELECT name, permits FROM waiting
    WHERE mailbox = ? AND task = ? AND name IN ('', ?) AND rank = ? AND pos = ? AND seq = ?"""
FORGET_WAITING = f"DELETE FROM waiting WHERE {_LIMITER} AND rank = ? AND pos = ? AND seq = ?"
PURGE_LIMITERS = (
    "DELETE FROM waiting WHERE mailbox = ?",
    "DELETE FROM limiters WHERE mailbox = ? AND spent_until IS NULL",
    """UPDATE limiters SET used = 0, unclaimed = 0, waiting = 0, opens_at = NULL, idle_at = spent_until
        WHERE mailbox = ?""",
    """INSERT INTO limiters SELECT mailbox, task, '=' || key, count(*), 0, NULL, 0, NULL, NULL FROM dead
        WHERE mailbox = ? AND permits GROUP BY task, key
        ON CONFLICT DO UPDATE SET used = excluded.used, idle_at = NULL""",
)
DROP_ALL_LIMITS = tuple(f"DELETE FROM {table} WHERE mailbox = ?" for table in ("waiting", "limiters", "limits"))

# -------------------------------------------------------------------------------------------------- transient mailboxes

USED = "UPDATE mailboxes SET used_at = ? WHERE id = ?"
UNUSED = "SELECT id FROM mailboxes WHERE used_at < ?"
DROP_DEAD = "DELETE FROM dead WHERE mailbox = ?"
DROP_MAILBOX = "DELETE FROM mailboxes WHERE id = ?"

# -------------------------------------------------------------------------------------------------------------- purge

PURGE = (
    "DELETE FROM ready WHERE mailbox = ?",
    "DELETE FROM delayed WHERE mailbox = ?",
    "DELETE FROM leases WHERE mailbox = ?",
    "DELETE FROM expiring WHERE seq IN (SELECT seq FROM messages WHERE mailbox = ?)",
    "DELETE FROM messages WHERE mailbox = ?",
)

# -------------------------------------------------------------------------------------------------------- rows together

ROWS_AT_ONCE = 25
"""How many rows one statement inserts: a statement for each costs up to twice as much, and a turn of the GIL."""
TOGETHER = {
    one: one + f", ({', '.join('?' * one.count('?'))})" * (ROWS_AT_ONCE - 1)
    for one in (ADD_MESSAGE, ADD_CALL, ADD_READY, ADD_WAITING, WRITE_LIMITER)
}
"""Statements that insert a row, each with the statement that inserts :data:`ROWS_AT_ONCE` rows."""
