"""The SQLite file: its tables, and the statements that work on them.

A message is one row of ``messages`` from its send to its end; the row is written again only when the message comes back.
Where it stands is said by a small row in one other table: ``ready`` (in order of delivery), ``delayed`` (in order of due
time) or ``leases`` (one per delivery; its key is the receipt handle). So a claim moves small rows and leaves bodies alone,
and every statement finds its rows by a key: none depends on how many messages there are.

Numbers (``seq``, ``pos``, ``lease``, ``place``) come from one counter, and are never used twice. It is the ``tick`` of mailbox
0, which stands for the file itself: so the counter is mostly on the same page as the counts that change with it. Leases are
in seconds since boot, and all of them belong to the boot named in ``store``. Dates, delays and expiries are POSIX seconds,
because they outlast a restart of the machine.

Records are beside the messages. Mailbox 0 says when the first of them ends, so a transaction need not look for ended records,
and a mailbox without records reads no page of theirs.
"""

# ruff: noqa: S608 - the statements are put together here, from constants; values are always bound
from __future__ import annotations

APPLICATION_ID = 0x4D53_5047  # "MSPG"
SCHEMA_VERSION = 5

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
    records_end REAL                -- of mailbox 0: no record of the file ends before
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
    history TEXT
) STRICT;
CREATE UNIQUE INDEX messages_by_key ON messages (mailbox, dedup_key) WHERE dedup_key IS NOT NULL;
CREATE INDEX messages_by_id ON messages (id);

CREATE TABLE ready (
    mailbox INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    pos INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (mailbox, rank, pos)
) STRICT, WITHOUT ROWID;

CREATE TABLE delayed (
    due REAL NOT NULL,
    seq INTEGER NOT NULL,
    mailbox INTEGER NOT NULL,
    PRIMARY KEY (due, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX delayed_by_seq ON delayed (seq);

CREATE TABLE leases (
    lease INTEGER PRIMARY KEY,
    mailbox INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    pos INTEGER NOT NULL,           -- where a release puts it back
    until REAL NOT NULL,            -- seconds since boot
    claimed_at REAL NOT NULL
) STRICT;
CREATE INDEX leases_by_end ON leases (until);

CREATE TABLE expiring (             -- messages with an expiry that are not in flight
    expires_at REAL NOT NULL,
    seq INTEGER NOT NULL,
    pos INTEGER,                    -- its place in ready, or
    due REAL,                       -- its place in delayed
    PRIMARY KEY (expires_at, seq)
) STRICT, WITHOUT ROWID;

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
    history TEXT
) STRICT;
CREATE INDEX dead_by_mailbox ON dead (mailbox, place);
CREATE INDEX dead_by_id ON dead (mailbox, id);
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
    (SELECT min(expires_at) FROM expiring), records_end FROM mailboxes WHERE id = 0"""
TICK = "SELECT tick FROM mailboxes WHERE id = 0"
SET_TICK = "UPDATE mailboxes SET tick = ? WHERE id = 0"
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
        (SELECT r.seq FROM ready AS r WHERE r.mailbox = ? AND r.rank = ranks.rank ORDER BY r.pos LIMIT 1)"""
PENDING = "SELECT id, pending FROM mailboxes WHERE pending > 0"
DROPPED = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT id FROM mailboxes)"
ADD_COUNTS = """UPDATE mailboxes SET delayed = delayed + ?, pending = pending + ?, in_flight = in_flight + ?,
    settled = settled + ?, dead = dead + ? WHERE id = ?"""

# -------------------------------------------------------------------------------------------------------- what is due

ENDED_LEASES = """SELECT l.lease, l.mailbox, l.seq, l.claimed_at, m.rank, m.expires_at
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq WHERE l.until <= ? ORDER BY l.until, l.lease LIMIT ?"""
DUE = """SELECT d.due, d.seq, d.mailbox, m.rank, m.expires_at
    FROM delayed AS d CROSS JOIN messages AS m ON m.seq = d.seq WHERE d.due <= ? ORDER BY d.due, d.seq LIMIT ?"""
EXPIRED = """SELECT e.expires_at, e.seq, e.pos, e.due, m.mailbox, m.rank
    FROM expiring AS e CROSS JOIN messages AS m ON m.seq = e.seq WHERE e.expires_at <= ? ORDER BY 1, 2 LIMIT ?"""

_NO_MESSAGE = "seq NOT IN (SELECT seq FROM messages)"
LEASES_OF_NONE = f"DELETE FROM leases WHERE until <= ? AND {_NO_MESSAGE}"
DELAYS_OF_NONE = f"DELETE FROM delayed WHERE due <= ? AND {_NO_MESSAGE}"
EXPIRIES_OF_NONE = f"DELETE FROM expiring WHERE expires_at <= ? AND {_NO_MESSAGE}"

# ------------------------------------------------------------------------------------------------------------ sending

MESSAGE_COLUMNS = "seq, mailbox, rank, id, body, enqueued_at, reply_to, headers, dedup_key, expires_at"
ADD_MESSAGE = f"INSERT INTO messages ({MESSAGE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
COLUMNS = 10
ROWS_AT_ONCE = 50
ADD_MESSAGES = ADD_MESSAGE + ", (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)" * (ROWS_AT_ONCE - 1)
SAME_KEY = "SELECT id FROM messages WHERE mailbox = ? AND dedup_key = ?"
READY_RANGE = "INSERT INTO ready SELECT mailbox, rank, seq, seq FROM messages WHERE seq BETWEEN ? AND ?"
ADD_READY = "INSERT INTO ready VALUES (?, ?, ?, ?)"
ADD_DELAYED = "INSERT INTO delayed VALUES (?, ?, ?)"
ADD_EXPIRING = "INSERT INTO expiring VALUES (?, ?, ?, ?)"

# ---------------------------------------------------------------------------------------------------------- receiving

FIRST_READY = """SELECT r.rank, r.pos, m.seq, m.id, m.body, m.enqueued_at, m.reply_to, m.headers, m.deliveries,
    m.attempts, m.first_received_at, m.checkpoint, m.history, m.expires_at
    FROM ready AS r CROSS JOIN messages AS m ON m.seq = r.seq WHERE r.mailbox = ? ORDER BY r.rank, r.pos LIMIT ?"""
LEASE_FIRST = """INSERT INTO leases SELECT ? + row_number() OVER (ORDER BY rank, pos), mailbox, seq, pos, ?, ?
    FROM (SELECT * FROM ready WHERE mailbox = ? ORDER BY rank, pos LIMIT ?)"""
TAKE_UP_TO = "DELETE FROM ready WHERE mailbox = ? AND (rank, pos) <= (?, ?)"
DROP_LEASES_FROM = "DELETE FROM leases WHERE lease > ?"
ADD_LEASE = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)"
NOT_EXPIRING = "DELETE FROM expiring WHERE expires_at = ? AND seq = ?"

# ----------------------------------------------------------------------------------------------------------- settling

_GIVEN = "IN (SELECT value FROM json_each(?))"
COUNT_HELD = f"SELECT count(*) FROM leases WHERE lease {_GIVEN} AND mailbox = ? AND until > ?"
WHICH_HELD = f"SELECT lease FROM leases WHERE lease {_GIVEN} AND mailbox = ? AND until > ?"
DROP_MESSAGES_LEASED = f"DELETE FROM messages WHERE seq IN (SELECT seq FROM leases WHERE lease {_GIVEN})"
DROP_LEASES = f"DELETE FROM leases WHERE lease {_GIVEN}"
HELD = """SELECT l.seq, l.pos, l.claimed_at, m.rank, m.expires_at
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq WHERE l.lease = ? AND l.mailbox = ? AND l.until > ?"""
DROP_LEASE = "DELETE FROM leases WHERE lease = ?"
DROP_MESSAGE = "DELETE FROM messages WHERE seq = ?"
CAME_BACK = """UPDATE messages SET deliveries = deliveries + 1, attempts = attempts + ?,
    first_received_at = coalesce(first_received_at, ?) WHERE seq = ?"""
KEEP_HISTORY = "UPDATE messages SET history = ? WHERE seq = ?"
EXTEND = "UPDATE leases SET until = max(until, ?) WHERE lease = ? AND mailbox = ? AND until > ?"
CHECKPOINT = """UPDATE messages SET checkpoint = ? WHERE seq =
    (SELECT seq FROM leases WHERE lease = ? AND mailbox = ? AND until > ?)"""
UNLEASE = f"""INSERT INTO ready SELECT l.mailbox, m.rank, l.pos, l.seq
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq WHERE l.lease {_GIVEN} AND l.mailbox = ?"""
UNLEASE_EXPIRING = f"""INSERT INTO expiring SELECT m.expires_at, l.seq, l.pos, NULL
    FROM leases AS l CROSS JOIN messages AS m ON m.seq = l.seq
    WHERE l.lease {_GIVEN} AND m.expires_at IS NOT NULL"""
FORGET_READY = "DELETE FROM ready WHERE mailbox = ? AND rank = ? AND pos = ?"
FORGET_DELAYED = "DELETE FROM delayed WHERE due = ? AND seq = ?"

# ------------------------------------------------------------------------------------------------------- dead letters

DEAD_LETTER = """INSERT INTO dead SELECT ?, mailbox, rank, id, body, enqueued_at, reply_to, headers, deliveries + ?,
    attempts + ?, coalesce(first_received_at, ?), checkpoint, ?, ?, ?, ?, dedup_key, coalesce(?, history)
    FROM messages WHERE seq = ?"""
_DEAD = """SELECT id, body, deliveries, attempts, enqueued_at, first_received_at, reply_to, headers, checkpoint, history,
    error, error_type, traceback, dead_at FROM dead
    """
DEAD_PAGE = f"""{_DEAD} WHERE mailbox = ? AND place > coalesce((SELECT place FROM dead WHERE mailbox = ? AND id = ?), 0)
    ORDER BY place LIMIT ?"""
DEAD_BY_ID = f"{_DEAD} WHERE mailbox = ? AND id {_GIVEN}"
_ALL_DEAD = "FROM dead WHERE mailbox = ?"
_SOME_DEAD = f"FROM dead WHERE mailbox = ? AND id {_GIVEN}"
_REVIVE = """INSERT INTO messages (seq, mailbox, rank, id, body, enqueued_at, reply_to, headers, checkpoint, dedup_key)
    SELECT ? + row_number() OVER (ORDER BY place), mailbox, rank, id, body, enqueued_at, reply_to, headers, checkpoint,
    CASE WHEN row_number() OVER (PARTITION BY dedup_key ORDER BY place) = 1 AND NOT EXISTS (
        SELECT 1 FROM messages AS m WHERE m.mailbox = dead.mailbox AND m.dedup_key = dead.dedup_key
    ) THEN dedup_key END """
REVIVE_ALL = _REVIVE + _ALL_DEAD
REVIVE_SOME = _REVIVE + _SOME_DEAD
COUNT_ALL_DEAD = "SELECT count(*) " + _ALL_DEAD
COUNT_SOME_DEAD = "SELECT count(*) " + _SOME_DEAD
DROP_ALL_DEAD = "DELETE " + _ALL_DEAD
DROP_SOME_DEAD = "DELETE " + _SOME_DEAD

# -------------------------------------------------------------------------------------------------------------- by id

BY_ID = """SELECT seq, rank, reply_to, headers, expires_at FROM messages WHERE id = ? AND mailbox = ?"""
FIND = f"""SELECT m.seq, m.rank, m.id, m.body, m.deliveries, m.attempts, m.enqueued_at, m.first_received_at, m.reply_to,
    m.headers, m.checkpoint, m.history FROM messages AS m WHERE m.id {_GIVEN} AND m.mailbox = ?"""
DUE_OF = "SELECT due FROM delayed WHERE seq = ?"
AT_OWN_PLACE = "SELECT 1 FROM ready WHERE mailbox = ? AND rank = ? AND pos = ? AND seq = ?"
LEASE_OF = "SELECT lease, claimed_at FROM leases WHERE lease > ? AND seq = ?"
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
