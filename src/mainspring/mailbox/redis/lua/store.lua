-- The keys of a mailbox, and what every operation stands on. The files of this directory are joined into one library of
-- functions, in the order store, permissions, limits, sweep, listeners, messages, records, dead, recovery, listing, run; a call
-- performs a whole batch
-- of operations on one mailbox. All instants are the server's, in microseconds.
--
-- Redis does not undo what a function wrote before it raised an error. An operation therefore reads first, and writes in an
-- order of which each part is safe: a record is stored before an index entry points at it, the new index entry is written
-- before the old one goes, and the record goes last. A send that fails is undone (see undo_send). An operation that is rare, or
-- that moves a message between its record and its dead letter, first looks whether all its commands can succeed (see verify).
-- An error ends only its own operation. What is left in spite of all that (a key that was deleted), recovery.lua mends.
--
-- A string that a function holds is copied several times, so large bodies do not pass through: the sender stores them with a
-- command of its own just before the call, and the receiver reads them behind the claim. A body is there before its record, and
-- goes behind it. If it is not there when the call comes (it was refused, or a purge or a recovery came between), the sender
-- makes another call, with the body in it. A send that is refused deletes its bodies; recovery.lua those whose call was lost. A
-- dead letter has its body in its record.
--
--   messages  hash   id -> head and body. The head: place (16 digits) "|" time of sending "|" rank "|". "@" behind it: the body is
--                    in `bodies`
--   bodies    hash   id -> body
--   ready     zset   place .. id -> rank (the negative priority): in the order of delivery
--   delayed   zset   rank "." id -> when it is due
--   leases    zset   receipt -> when it ends. A receipt: time of the claim "." rank "." claimant "." place id
--   state     hash   seq: the last place given; tick: the time of the last claim or of the last write of a record, no two are
--                    equal; settled: how many are; g and the name of a channel: the tick of the last message that was claimed
--                    for its listener and sent there; recovery and recovered: see recovery.lua; by_task: up to which
--                    number `dead_tasks` is complete, or "all"; limits: there are some; d and a task: what they are (see limits.lua)
--   more      hash   what only some messages have, by a letter and the id: b: deliveries, attempts and first claim of one that
--                    came back; c: checkpoint; h: history; k: dedup key; l: its expiry, which came while it was in flight;
--                    p: its place, where it is another than the one in its head; t: its task (see limits.lua). And `!`: claims
--                    want to know when a message in flight has ended
--   dedup     hash   dedup key -> id
--   expiry    zset   id -> when it expires; a byte of 0 and a limiter -> when that opens
--   dead      hash   id -> head and body
--   dead_order  zset  id -> its number, in the order in which messages died
--   dead_tasks  zset  task, number and id -> 0: the dead letters that have a task
--   dead_details  hash  m: deliveries, attempts, first claim and death, by id; w: why (the client's JSON; none: it expired);
--                    c, h, k, t as in more
--   records   hash   kind, a byte of 0, and key, its name -> version "|" when it ends (none: never) "|" value
--   record_names  zset  name -> 0: in the order of their bytes
--   record_ends  zset  name -> when it ends
--   limiters  hash   see limits.lua
--   waits     zset   limiter, rank, place, id -> 0: the messages that wait at limiters, in the order of the bytes
--   listed    zset   't' task, or 'k' key and task; place and id -> 0: the messages that have a task
--   waiters   zset   a process that waits for messages -> since when. Its name: that of its channel "." how long the leases are that it wants
--
-- Unlike the hash of the messages, `more` is empty in most mailboxes, so that one look at it saves all others.

-- The server looks up each global of a library in several steps. So the first call puts them into locals: most of them are not there
-- while the library is loaded.
local function globals()
  return redis, math, string, table, ipairs, next, pairs, pcall, setmetatable, tonumber, type, unpack
end

local redis = redis
local math, string, table, ipairs, next, pairs, pcall, setmetatable, tonumber, type, unpack

local AT_ONCE = 1000 -- of each kind that is due: the callers of this batch should not wait for thousands
local KEYS_OF_ONE = 17
local KEYS_OF_TRANSIENT = 13 -- none of its messages has a task
local STEP = 1000 -- from one place to the next: those of keys are between
local MOST_SHARED = 1000 -- mailboxes of which something is kept from call to call
local DAY = 86400000
local LONGEST_LEASE = 43200000000 -- that a receive can ask for, in microseconds
local MOST_PUSHED = 65536 -- bytes that a message sent to who waits may have: a server hangs up on listeners that it owes too much

local limits = {} -- what limits.lua has for the others

-- Of the call that is being served.
local KEYS, ARGV, now
local full -- whether the server has no memory for what is new

local function text(number)
  return string.format('%d', number)
end

-- A command with a list of arguments, in portions: a call takes a few thousand at most.
local function bulk(command, key, list)
  for from = 1, #list, 2000 do
    redis.call(command, key, unpack(list, from, math.min(from + 1999, #list)))
  end
end

local function look_up(command, key, list)
  if #list <= 2000 then
    return redis.call(command, key, unpack(list))
  end
  local all = {}
  for from = 1, #list, 2000 do
    local some = redis.call(command, key, unpack(list, from, math.min(from + 1999, #list)))
    for i = 1, #some do
      all[from + i - 1] = some[i]
    end
  end
  return all
end

-- What all calls for a mailbox have in common, by the first of its keys. It is kept, as most calls are for the same few mailboxes.
local shared, how_many_shared = {}, 0

local function share(behind)
  local state = KEYS[behind + 5]
  local one = { __index = {
    messages = KEYS[behind + 1], ready = KEYS[behind + 2], delayed = KEYS[behind + 3], leases = KEYS[behind + 4],
    state = state, more = KEYS[behind + 6], dedup = KEYS[behind + 7], expiry = KEYS[behind + 8],
    dead = KEYS[behind + 9], dead_order = KEYS[behind + 10], dead_details = KEYS[behind + 11], waiters = KEYS[behind + 12],
    bodies = KEYS[behind + 13], limiters = KEYS[behind + 14], waits = KEYS[behind + 15], listed = KEYS[behind + 16],
    dead_tasks = KEYS[behind + 17],
    channels = string.sub(state, 1, -6), -- up to the ":"
    is_transient = string.sub(state, 1, 5) == '{ms:~', -- all of it lives for a day after its last use
  } }
  if how_many_shared == MOST_SHARED then
    shared, how_many_shared = {}, 0
  end
  shared[KEYS[behind + 1]], how_many_shared = one, how_many_shared + 1
  return one
end

-- The mailbox whose keys begin behind KEYS[behind]. Operations read of its state what they need.
local function box_of(behind)
  return setmetatable(
    { added = 0, settled = 0, dropped = 0, refused = 0, no_waiters = false },
    shared[KEYS[behind + 1]] or share(behind)
  )
end

-- Let a mailbox have its records, whose keys begin behind KEYS[behind]. Only calls that need them bring these keys.
local function with_records(box, behind)
  box.verified = box.verified and box.records ~= nil
  box.records, box.record_names, box.record_ends = KEYS[behind + 1], KEYS[behind + 2], KEYS[behind + 3]
  return box
end

-- From now on a transient mailbox exists, and what is sent to it is kept. Only those who receive from it make it so.
local function make_known(box)
  redis.call('HSETNX', box.state, 'settled', 0)
  box.used = true
end

-- The last of `count` new numbers, of messages or of dead letters.
local function next_seq(box, count)
  local seq = redis.call('HINCRBY', box.state, 'seq', count * STEP)
  if seq == count * STEP and redis.call('HLEN', box.messages) > 0 then -- the key was deleted: they come behind what is there
    seq = redis.call('HINCRBY', box.state, 'seq', text(now))
  end
  return seq
end

local function place_of(seq)
  return string.format('%016d', seq)
end

local function new_place(box)
  return place_of(next_seq(box, 1))
end

-- When the last claim was made. With it comes whether there are limits.
local function last_tick(box)
  if not box.tick then
    local known = redis.call('HMGET', box.state, 'tick', 'limits')
    box.tick, box.is_limited = tonumber(known[1] or nil) or 0, known[2]
  end
  return box.tick
end

local function has_more(box)
  return redis.call('HLEN', box.more) > 0
end

-- How many messages have a task. If that is as many as there are fields in `more`, no message has anything else there.
local function how_many_have_tasks(box)
  return redis.call('ZLEXCOUNT', box.listed, '[t', '(u')
end

local function fields(letter, ids)
  local list = {}
  for i = 1, #ids do
    list[i] = letter .. ids[i]
  end
  return list
end

-- Something is due at `when`, new with this batch.
local function due_at(box, when)
  if not box.first_due or when < box.first_due then
    box.first_due = when
  end
end

local function earliest(key)
  return tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end

-- When the next thing is due in a mailbox, or nil.
local function next_due(box)
  local first
  for _, key in ipairs({ box.leases, box.delayed, box.expiry }) do
    local due = earliest(key)
    if due and (not first or due < first) then
      first = due
    end
  end
  return first
end

local function of_head(value)
  local place, rank = string.match(value, '^(%d+)|%d+|(%-?%d+)|')
  return place or '', rank or '0'
end

local function of_receipt(receipt)
  local claimed, rank, claimant, spot = string.match(receipt, '^(%d+)%.(%-?%d+)%.(%w*)%.(.*)$')
  if not claimed then -- no mailbox wrote it
    return nil
  end
  return claimed, rank, string.sub(spot, 1, 16), string.sub(spot, 17), claimant
end

-- The id alone, which acknowledgements need by the hundred: no pattern is as quick as to look for the dots.
local function id_of_receipt(receipt)
  local behind_rank = string.find(receipt, '.', string.find(receipt, '.', 1, true) + 1, true)
  return string.sub(receipt, string.find(receipt, '.', behind_rank + 1, true) + 17)
end

-- Forget messages that have ended and have no place any more. `unclaimed`: they were not in flight.
local function delete_messages(box, ids, unclaimed)
  local expire, large = redis.call('ZCARD', box.expiry) > 0, redis.call('HLEN', box.bodies) > 0
  local more = redis.call('HLEN', box.more)
  local had_tasks = more > 0 and limits.forget(box, ids, unclaimed) or 0
  if had_tasks > 0 and more == how_many_have_tasks(box) + had_tasks then
    bulk('HDEL', box.more, fields('t', ids))
  elseif more > 0 then
    local keys = look_up('HMGET', box.more, fields('k', ids))
    local given = {}
    for i = 1, #ids do
      if keys[i] then
        given[#given + 1] = keys[i]
      end
    end
    if #given > 0 then
      bulk('HDEL', box.dedup, given)
    end
    for letter in string.gmatch(had_tasks > 0 and 'bchklpt' or 'bchklp', '.') do
      bulk('HDEL', box.more, fields(letter, ids))
    end
  end
  if expire then
    bulk('ZREM', box.expiry, ids)
  end
  bulk('HDEL', box.messages, ids)
  if large then
    bulk('HDEL', box.bodies, ids)
  end
end

local function delete_dead(box, id)
  local about = redis.call('HGET', box.dead_details, 't' .. id)
  local number = about and redis.call('ZSCORE', box.dead_order, id)
  if number then
    redis.call('ZREM', box.dead_tasks, limits.task_written(about) .. place_of(number) .. id)
  end
  redis.call('HDEL', box.dead, id)
  redis.call('ZREM', box.dead_order, id)
  redis.call('HDEL', box.dead_details, 'm' .. id, 'w' .. id, 'c' .. id, 'h' .. id, 'k' .. id, 't' .. id)
end

-- A record with its body, wherever that is; nil: the body was deleted by hand.
local function with_body(box, id, value)
  local head, rest = string.match(value, '^(%d+|%d+|%-?%d+|)@(.*)$')
  if not head then
    return value
  end
  local body = redis.call('HGET', box.bodies, id)
  return body and head .. rest .. body
end

-- Deliveries, attempts and time of the first claim of a message that was returned before.
local function counts_of(box, id)
  local back = redis.call('HGET', box.more, 'b' .. id)
  if not back then
    return 0, 0, nil
  end
  local deliveries, attempts, first = string.match(back, '^(%d+) (%d+) (%d+)$')
  return tonumber(deliveries) or 0, tonumber(attempts) or 0, first
end

-- Move a message that has no place any more to the dead letters. `why` nil: it expired. `unclaimed`: it was not in flight.
local function dead_letter(box, id, why, claimed, history, at, unclaimed)
  local value = redis.call('HGET', box.messages, id)
  if not value then
    return
  end
  value = with_body(box, id, value)
  if not value then
    box.dropped = box.dropped + 1
    delete_messages(box, { id }, unclaimed)
    return
  end
  local deliveries, attempts, first = counts_of(box, id)
  if claimed then
    deliveries, attempts, first = deliveries + 1, attempts + 1, first or claimed
  end
  local kept = redis.call('HMGET', box.more, 'c' .. id, 'h' .. id, 'k' .. id, 't' .. id)
  local record = { 'm' .. id, table.concat({ deliveries, attempts, first or '0', text(at or now) }, ' ') }
  for i, letter in ipairs({ 'c', 'h', 'k' }) do
    local known = kept[i]
    if letter == 'h' and history and history ~= '' then
      known = history
    end
    if known then
      record[#record + 1] = letter .. id
      record[#record + 1] = known
    end
  end
  if kept[4] then
    record[#record + 1] = 't' .. id
    record[#record + 1] = limits.dead_lettered(box, id, kept[4], not unclaimed, deliveries > 0)
  end
  if why then
    record[#record + 1] = 'w' .. id
    record[#record + 1] = why
  end
  redis.call('HSET', box.dead, id, value)
  redis.call('HSET', box.dead_details, unpack(record))
  local number = next_seq(box, 1)
  redis.call('ZADD', box.dead_order, number, id)
  if redis.call('ZCARD', box.dead_order) == 1 then
    redis.call('HSET', box.state, 'by_task', 'all')
  end
  if kept[4] then
    redis.call('ZADD', box.dead_tasks, 0, limits.task_written(kept[4]) .. place_of(number) .. id)
  end
  delete_messages(box, { id }, unclaimed)
end

-- Let a message without a holder wait: at its old place, at the tail (place nil), or first for `delay` microseconds. Its old
-- index entry goes behind this. `ended`: how its delivery ended (see limits.returned); nil: its delay is over.
local function enqueue(box, id, rank, place, delay, ended)
  if redis.call('HEXISTS', box.messages, id) == 0 then -- it was deleted by hand
    box.dropped = box.dropped + 1
    bulk('HDEL', box.more, { 'b' .. id, 'c' .. id, 'h' .. id, 'k' .. id, 'l' .. id, 'p' .. id })
    return
  end
  local late, about, is_watched = unpack(redis.call('HMGET', box.more, 'l' .. id, 't' .. id, '!'))
  local entry = about and limits.returned(box, id, about, ended)
  if late then
    dead_letter(box, id, nil, nil, nil, tonumber(late) or now)
    return
  end
  if delay > 0 then
    redis.call('ZADD', box.delayed, now + delay, rank .. '.' .. id)
    due_at(box, now + delay)
    box.added = box.added + (is_watched and 1 or 0)
    return
  end
  if not place then
    place = entry and limits.place_of(box, entry) or new_place(box)
    redis.call('HSET', box.more, 'p' .. id, place)
  end
  if entry and limits.due_again(box, entry, place, ended) then
    return
  end
  redis.call('ZADD', box.ready, rank, place .. id)
  box.added = box.added + 1
end

-- A delivery has ended without an end of the message.
local function count_delivery(box, id, claimed, charged)
  local deliveries, attempts, first = counts_of(box, id)
  redis.call('HSET', box.more, 'b' .. id,
    table.concat({ deliveries + 1, attempts + charged, first or claimed }, ' '))
end
