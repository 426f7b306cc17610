-- Tasks and their limits: which messages wait at which limiter, and when they become ready. The theory is that of
-- mainspring.mailbox.limiters.
--
-- A message that has a task has an entry in `more`: permits (1: of its key, 2: of its task, 3: both) " " rank " " place " " time of
-- sending " " weight " " task ["k" key]. In names a task or a key is written as its length ":" itself. A limiter is called by its
-- task and "t", or by its task, "k" and its key.
--
--   limiters   'l' limiter -> permits that are out " " those of them that are unclaimed " " until when the rate is spent;
--              's' rank " " task and key -> the last place of the key
--   waits      limiter, rank (5 digits), place, id
--
-- What the limits of a task are, the state says: paused (1) or not (0) " " the concurrency that is declared " " what holds instead,
-- and of the rate: interval " " burst; then of keys: concurrency " " interval " " burst; "-" is none; what blocks a key, and the
-- client's JSON.
--
-- Events only note which limiters they may have opened (`touched`). These let messages in before a claim, and at the end of the
-- call, at most AT_ONCE of them; the rest is due at once.

local OWN, OF_KEY = 2, 1
local NEVER = 1e300
local SCANNED = '\0>' -- the begin of what stands in `expiry` for limiters that are still to be looked at after a change
local TOO_MANY = 1000 -- fields of `limiters` above which each new one has some others looked at that may go

local function named(name)
  return string.len(name) .. ':' .. name
end

local function rank_code(rank)
  return string.format('%05d', tonumber(rank) + 32768)
end

-- The name that is written at the begin of a text, from its `from`th byte on, and where it ends.
local function read_name(from_text, from)
  local first, last = string.find(from_text, '^%d+:', from)
  local size = tonumber(string.sub(from_text, first, last - 1))
  return string.sub(from_text, last + 1, last + size), last + size
end

local function read_entry(id, about)
  local permits, rank, place, sent, tail = string.match(about, '^(%d) (%-?%d+) (%d+) (%d+) (.*)$')
  local _, at = string.find(tail, ' ', 1, true)
  local task, ends = read_name(tail, at + 1)
  local entry = {
    id = id, permits = tonumber(permits), rank = rank, place = place, sent = sent, weight = tonumber(string.sub(tail, 1, at - 1)),
    task = task, tail = tail,
  }
  if string.len(tail) > ends then
    entry.key = string.sub(tail, ends + 2)
  end
  entry.stored = entry.permits
  return entry
end

local function text_of(entry)
  return table.concat({ entry.permits, entry.rank, entry.place, entry.sent, entry.tail }, ' ')
end

local function store(box, entry)
  if entry.permits ~= entry.stored then
    redis.call('HSET', box.more, 't' .. entry.id, text_of(entry))
    entry.stored = entry.permits
  end
end

-- Where a message is listed.
local function listed_at(entry)
  local task, spot = named(entry.task), entry.place .. entry.id
  if entry.key then
    return 't' .. task .. spot, 'k' .. named(entry.key) .. task .. spot
  end
  return 't' .. task .. spot
end

-- The limits of a task, or false.
local function limits_of(box, task)
  local known = box.defined[task]
  if known == nil then
    local declared = redis.call('HGET', box.state, 'd' .. task)
    known = false
    if declared then
      local paused, most, instead, interval, burst, of_key, key_interval, key_burst, blocks = string.match(declared,
        '^(%d) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%l+) ')
      local function rate(every, at_once)
        return tonumber(every) and { interval = tonumber(every), burst = tonumber(at_once) }
      end
      known = {
        most = paused == '1' and 0 or tonumber(instead) or tonumber(most), paused = paused == '1', rate = rate(interval, burst),
        key_most = tonumber(of_key), key_rate = rate(key_interval, key_burst), blocks = blocks,
      }
      known.limits_keys = known.key_most ~= nil or known.key_rate ~= nil
    end
    box.defined[task] = known
  end
  return known
end

-- How many messages may be claimed by the limits of the whole mailbox. If that is too few, claims want to know when one ends.
function limits.room(box)
  local whole = limits_of(box, '')
  if not whole or not whole.most then
    return NEVER
  elseif whole.paused then
    return 0
  end
  redis.call('HSET', box.more, '!', '1')
  return math.max(whole.most - redis.call('ZCARD', box.leases), 0)
end

-- --------------------------------------------------------------------------------------------------------- limiters

local function name_of(entry, which)
  local name = named(entry.task)
  return which == OWN and name .. 't' or name .. 'k' .. named(entry.key)
end

-- The place of the first in line of a rank: of those that are ready, and of those that wait for a permit of the task.
local function first_place(box, rank, task)
  local key = rank .. ' ' .. task
  if not box.first[key] then
    local ready = redis.call('ZRANGE', box.ready, rank, rank, 'BYSCORE', 'LIMIT', 0, 1)[1]
    local line = named(task) .. 't' .. rank_code(rank)
    local waits = redis.call('ZRANGE', box.waits, '[' .. line, '(' .. line .. ':', 'BYLEX', 'LIMIT', 0, 1)[1]
    local at = string.len(line)
    local first = ready and tonumber(string.sub(ready, 1, 16))
    local waiting = waits and tonumber(string.sub(waits, at + 1, at + 16))
    box.first[key] = first and waiting and math.min(first, waiting) or first or waiting
  end
  return box.first[key]
end

-- Look at some fields of `limiters` that may have nothing to say any more.
local function tidy(box)
  if redis.call('HLEN', box.limiters) < TOO_MANY then
    return
  end
  local cursor = redis.call('HGET', box.state, 'tidied') or '0'
  local scanned = redis.call('HSCAN', box.limiters, cursor, 'COUNT', 10)
  local gone = {}
  for i = 1, #scanned[2], 2 do
    local field, value = scanned[2][i], scanned[2][i + 1]
    local rank, share = string.match(field, '^s(%-?%d+) (.*)$')
    if rank then
      local first = first_place(box, rank, read_name(share, 1)) or tonumber(redis.call('HGET', box.state, 'seq') or nil) or 0
      if tonumber(value) <= first then
        gone[#gone + 1] = field
      end
    else
      local used, _, spent = string.match(value, '^(%d+) (%d+) (%d+)$')
      if used == '0' and tonumber(spent) <= now and not box.known[string.sub(field, 2)] then
        gone[#gone + 1] = field
      end
    end
  end
  bulk('HDEL', box.limiters, gone)
  redis.call('HSET', box.state, 'tidied', scanned[1])
end

local function limiter(box, name)
  local one = box.known[name]
  if not one then
    local stored = redis.call('HGET', box.limiters, 'l' .. name)
    local used, unclaimed, spent = string.match(stored or '', '^(%d+) (%d+) (%d+)$')
    one = { used = tonumber(used) or 0, unclaimed = tonumber(unclaimed) or 0, spent = tonumber(spent) or 0, stored = stored }
    box.known[name] = one
  end
  return one
end

-- The limiter of a permit, how many it may have out, and its rate.
local function bounds(box, entry, which, name)
  local declared = limits_of(box, entry.task) or {}
  local one = limiter(box, name or name_of(entry, which))
  if which == OWN then
    return one, declared.most, declared.rate
  end
  return one, declared.key_most, declared.key_rate
end

local function each_held(entry, visit)
  if entry.permits % 2 == 1 then
    visit(OF_KEY)
  end
  if entry.permits >= OWN then
    visit(OWN)
  end
end

-- When a limiter gives its next permit: NEVER, if not until one ends or is claimed.
local function opens_at(one, most, rate)
  if most and one.used >= most then
    return NEVER
  elseif not rate then
    return now
  elseif one.unclaimed >= rate.burst then
    return NEVER
  end
  return math.max(one.spent, now) + (one.unclaimed - rate.burst + 1) * rate.interval
end

local function open_at(box, name, when)
  when = math.ceil(when)
  if box.known[name].opens ~= when then
    box.known[name].opens = when
    redis.call('ZADD', box.expiry, text(when), '\0' .. name)
    due_at(box, when)
  end
end

local function count_claim(box, entry)
  each_held(entry, function(which)
    local name = name_of(entry, which)
    local one, _, rate = bounds(box, entry, which, name)
    one.unclaimed, one.changed = math.max(one.unclaimed - 1, 0), true
    if rate then
      one.spent = math.max(one.spent, now) + rate.interval
      box.touched[name] = true
    end
  end)
end

-- End the permits of a message, but for those of `kept`.
local function take_back(box, entry, kept, was_claimed)
  each_held(entry, function(which)
    if which ~= kept then
      local name = name_of(entry, which)
      local one = limiter(box, name)
      one.used, one.changed = math.max(one.used - 1, 0), true
      if not was_claimed then
        one.unclaimed = math.max(one.unclaimed - 1, 0)
      end
      box.touched[name] = true
    end
  end)
  entry.permits = kept == OF_KEY and entry.permits % 2 or 0
end

-- The permit that a message keeps which is tried again ('retry') or dead ('dead').
local function kept_by(box, entry, event)
  local declared = limits_of(box, entry.task)
  return declared and (declared.blocks == 'dead' or declared.blocks == event) and OF_KEY or 0
end

local function behind_name(entry, place)
  return rank_code(entry.rank) .. place .. entry.id
end

local function first_waiting(box, name, most)
  return redis.call('ZRANGE', box.waits, '[' .. name, '(' .. name .. ':', 'BYLEX', 'LIMIT', 0, most)
end

local function lacks_key(entry, declared)
  return entry.key and declared.limits_keys and entry.permits % 2 == 0
end

-- Let a message get its permits, which it lacks, as far as no other waits for them. Return whether it has all of them; else it waits.
local function get_permits(box, entry, declared, place)
  while true do
    local which = lacks_key(entry, declared) and OF_KEY or entry.permits < OWN and OWN
    if not which then
      store(box, entry)
      return true
    end
    local name = name_of(entry, which)
    local one, most, rate = bounds(box, entry, which, name)
    local opens = opens_at(one, most, rate)
    if opens <= now and one.waits == nil then
      one.waits = first_waiting(box, name, 1)[1] ~= nil
    end
    if opens > now or one.waits then
      store(box, entry)
      redis.call('ZADD', box.waits, 0, name .. behind_name(entry, place))
      if opens <= now then
        box.touched[name] = true
      elseif opens ~= NEVER then
        open_at(box, name, opens)
      end
      return false
    end
    one.used, one.unclaimed, one.changed = one.used + 1, one.unclaimed + 1, true
    entry.permits = entry.permits + which
  end
end

local function make_ready(box, entry, place)
  redis.call('ZADD', box.ready, entry.rank, place .. entry.id)
  box.added = box.added + 1
end

-- Let in the messages of `found`, which wait at a limiter first of all.
local function let_these_in(box, found, name, which, declared)
  local ids, one = {}, limiter(box, name)
  for i, member in ipairs(found) do
    ids[i] = string.sub(member, string.len(name) + 22)
  end
  local about = redis.call('HMGET', box.more, unpack(fields('t', ids)))
  for i, id in ipairs(ids) do
    local entry = about[i] and read_entry(id, about[i])
    local place = string.sub(found[i], string.len(name) + 6, string.len(name) + 21)
    if not entry then -- the message was deleted by hand
      box.dropped = box.dropped + 1
    elseif not declared then
      make_ready(box, entry, place)
    else
      if which == OF_KEY or not lacks_key(entry, declared) then
        one.used, one.unclaimed, one.changed = one.used + 1, one.unclaimed + 1, true
        entry.permits = entry.permits + which
      end
      if get_permits(box, entry, declared, place) then
        make_ready(box, entry, place)
      end
    end
  end
  bulk('ZREM', box.waits, found)
  box.budget = box.budget - #found
end

-- Let in those that wait at a limiter while it is open.
local function let_in(box, name)
  local task, ends = read_name(name, 1)
  local declared = limits_of(box, task)
  local which = string.sub(name, ends + 1, ends + 1) == 't' and OWN or OF_KEY
  local one, most, rate = bounds(box, { task = task }, which, name)
  while true do
    local opens = opens_at(one, most, rate)
    if opens == NEVER then
      return
    elseif box.budget <= 0 then
      open_at(box, name, now)
      return
    end
    local wanted = math.min(100, box.budget, most and most - one.used or NEVER)
    if rate then
      wanted = math.min(wanted, math.floor(rate.burst - one.unclaimed - (math.max(one.spent, now) - now) / rate.interval))
    end
    local found = first_waiting(box, name, math.max(wanted, 1))
    one.waits = found[1] ~= nil
    if not found[1] then
      return
    elseif opens > now then
      open_at(box, name, opens)
      return
    end
    let_these_in(box, found, name, which, declared)
  end
end

-- The limiter of an entry in `waits`.
local function name_at(member)
  local _, ends = read_name(member, 1)
  if string.sub(member, ends + 1, ends + 1) == 'k' then
    _, ends = read_name(member, ends + 2)
  else
    ends = ends + 1
  end
  return string.sub(member, 1, ends)
end

-- Let in what the events of this call allow.
function limits.let_in(box)
  while next(box.touched) do
    local touched = box.touched
    box.touched = {}
    for name in pairs(touched) do
      let_in(box, name)
    end
  end
end

-- Look at the limiters of a task at which messages wait, from a name on.
local function look_at_all(box, from)
  local task = read_name(from, 1)
  while true do
    if box.budget <= 0 then
      redis.call('ZADD', box.expiry, text(now), SCANNED .. from)
      due_at(box, now)
      return
    end
    local member = redis.call('ZRANGE', box.waits, '(' .. from, '(' .. named(task) .. 'u', 'BYLEX', 'LIMIT', 0, 1)[1]
    if not member then
      return
    end
    local name = name_at(member)
    box.budget = box.budget - 1
    let_in(box, name)
    from = name .. ':'
  end
end

-- What is due of limiters, by the entry in `expiry`.
function limits.open(box, due)
  redis.call('ZREM', box.expiry, due)
  if string.sub(due, 1, 2) == SCANNED then
    look_at_all(box, string.sub(due, 3))
  else
    limiter(box, string.sub(due, 2)).opens = nil
    let_in(box, string.sub(due, 2))
  end
end

-- Store what has changed of the limiters.
function limits.save(box)
  local stored, gone, new = {}, {}, 0
  for name, one in pairs(box.known) do
    if one.changed then
      if one.used == 0 and one.spent <= now then
        gone[#gone + 1] = one.stored and 'l' .. name or nil
      else
        stored[#stored + 1] = 'l' .. name
        stored[#stored + 1] = table.concat({ one.used, math.min(one.unclaimed, one.used), text(one.spent) }, ' ')
        new = new + (one.stored and 0 or 1)
      end
    end
  end
  bulk('HSET', box.limiters, stored)
  bulk('HDEL', box.limiters, gone)
  for _ = 1, math.min(new, 100) do
    tidy(box)
  end
end

-- ---------------------------------------------------------------------------------------------------------- messages

-- The place of a message with a key: one step behind the last one of its key, but not before the first in line. Nil: it has no
-- key. `spare`: the place if it is the first.
function limits.place_of(box, entry, spare)
  if not entry.key then
    return nil
  end
  local first = first_place(box, entry.rank, entry.task)
  if not first then
    first = tonumber(spare or new_place(box))
    box.first[entry.rank .. ' ' .. entry.task] = first
  end
  local share = 's' .. entry.rank .. ' ' .. named(entry.task) .. entry.key
  local last = tonumber(redis.call('HGET', box.limiters, share) or nil)
  local place = last and math.max(first, last + math.floor(STEP / entry.weight + 0.5)) or first
  redis.call('HSET', box.limiters, share, text(place))
  if not last then
    tidy(box)
  end
  return place_of(place)
end

-- A new message that has a task: its entry, before it is stored.
function limits.new_entry(id, rank, place, tail)
  local entry = read_entry(id, table.concat({ 0, rank, place, text(now), tail }, ' '))
  entry.stored = nil
  return entry
end

-- Store the entries of new messages, and list them.
function limits.add(box, entries)
  local about, members = {}, {}
  for _, entry in ipairs(entries) do
    about[#about + 1] = 't' .. entry.id
    about[#about + 1] = text_of(entry)
    entry.stored = entry.permits
    for _, member in ipairs({ listed_at(entry) }) do
      members[#members + 1] = 0
      members[#members + 1] = member
    end
  end
  bulk('HSET', box.more, about)
  bulk('ZADD', box.listed, members)
end

-- Undo what was written for messages whose send failed. `spots`: place and id of each.
function limits.unsend(box, ids, spots)
  local found = look_up('HMGET', box.more, fields('t', ids))
  for i, about in ipairs(found) do
    local waits = about and limits.find(box, ids[i], about, string.sub(spots[i], 1, 16))
    if waits then
      redis.call('ZREM', box.waits, waits)
    end
  end
  limits.forget(box, ids, true)
  bulk('HDEL', box.more, fields('t', ids))
end

function limits.is_limited(box, entry)
  return limits_of(box, entry.task) ~= false
end

-- Let a message that is due become ready, or wait at a limiter, if its task has limits; else return false.
function limits.enter(box, entry, place)
  local declared = limits_of(box, entry.task)
  if not declared then
    store(box, entry)
    return false
  end
  if get_permits(box, entry, declared, place) then
    make_ready(box, entry, place)
  end
  return true
end

-- A message has come back, or is moved. `ended` says from what: 'retry' an attempt, 'front' a delivery that was released, 'undone'
-- a claim that counts for nothing, 'moved' from where it was pending; nil: a delay. Its entry, with the permits that it keeps.
function limits.returned(box, id, about, ended)
  local entry = read_entry(id, about)
  if ended == 'retry' then
    take_back(box, entry, kept_by(box, entry, 'retry'), true)
  elseif ended == 'front' then
    take_back(box, entry, OF_KEY, true)
  elseif ended == 'moved' then
    take_back(box, entry, 0, false)
  end
  store(box, entry)
  return entry
end

-- It is to be claimed again: see limits.enter.
function limits.come_again(box, entry, place, ended)
  each_held(entry, function(which)
    local one, _, rate = bounds(box, entry, which)
    one.unclaimed, one.changed = one.unclaimed + 1, true
    if ended == 'undone' and rate then
      one.spent = one.spent - rate.interval
    end
  end)
  return limits.enter(box, entry, place)
end

-- A message dies. What is kept with it, as it keeps the permit of its key, or not.
function limits.died(box, id, about, was_claimed)
  local entry = read_entry(id, about)
  take_back(box, entry, kept_by(box, entry, 'dead'), was_claimed)
  local kept = text_of(entry)
  entry.permits = 0
  store(box, entry) -- the message has none any more
  return kept
end

-- The entry of a dead letter that is replayed, with another head.
function limits.revived(box, id, about, place)
  local entry = read_entry(id, about)
  entry.place = limits.place_of(box, entry, place) or place
  return entry
end

-- A dead letter is gone for good.
function limits.buried(box, id)
  local about = redis.call('HGET', box.dead_details, 't' .. id)
  if about then
    take_back(box, read_entry(id, about), 0, true)
  end
end

-- Where a message waits at a limiter, if it does.
function limits.find(box, id, about, place)
  local entry = read_entry(id, about)
  for which = entry.key and OF_KEY or OWN, OWN do
    local member = name_of(entry, which) .. behind_name(entry, place)
    if redis.call('ZSCORE', box.waits, member) then
      return member
    end
  end
end

-- Messages have ended: end their permits, and take them off the lists. See delete_messages.
function limits.forget(box, ids, unclaimed)
  local wanted, members = fields('t', ids), {}
  wanted[#wanted + 1] = '!'
  local found = look_up('HMGET', box.more, wanted)
  for i, id in ipairs(ids) do
    if found[i] then
      local entry = read_entry(id, found[i])
      take_back(box, entry, 0, not unclaimed)
      for _, member in ipairs({ listed_at(entry) }) do
        members[#members + 1] = member
      end
    end
  end
  bulk('ZREM', box.listed, members)
  if found[#wanted] and not unclaimed then
    box.added = box.added + #ids
  end
end

-- ------------------------------------------------------------------------------------------------------------ claims

local function is_open(box, entry, which)
  local one, most = bounds(box, entry, which)
  return not most or one.used - one.unclaimed < most
end

-- Whether a message that is ready is claimed. Else it waits at its limiter, and its place among those that are ready goes behind this.
local function admit(box, entry, place)
  local declared = limits_of(box, entry.task)
  for _ = 1, 2 do
    local has_key = entry.permits % 2 == 1
    if not declared then
      count_claim(box, entry)
      return true
    elseif lacks_key(entry, declared) or has_key and not is_open(box, entry, OF_KEY) then
      take_back(box, entry, 0, false)
    elseif entry.permits < OWN or not is_open(box, entry, OWN) then
      take_back(box, entry, OF_KEY, false)
    else
      count_claim(box, entry)
      return true
    end
    if not get_permits(box, entry, declared, place) then
      return false
    end
  end
  return false
end

-- Leave out of `spots` (place and id, rank, and so on) those beyond the first `most`, and those that may not be claimed, which wait
-- at limiters from now on.
function limits.admitted(box, spots, most)
  local ids, let, refused = {}, {}, {}
  for i = 1, math.min(#spots, 2 * most), 2 do
    ids[#ids + 1] = string.sub(spots[i], 17)
  end
  local about = redis.call('HMGET', box.more, unpack(fields('t', ids)))
  for i, id in ipairs(ids) do
    local spot, entry = spots[2 * i - 1], about[i] and read_entry(id, about[i])
    if not entry or admit(box, entry, string.sub(spot, 1, 16)) then
      let[#let + 1] = spot
      let[#let + 1] = spots[2 * i]
    else
      refused[#refused + 1] = spot
    end
  end
  bulk('ZREM', box.ready, refused)
  box.refused = box.refused + #refused
  return let
end

-- ----------------------------------------------------------------------------------------------------------- changes

-- Change the limits of a task: what is declared (nil: as it is), whether it is paused ('': as it is), and what holds instead of its
-- concurrency ('': as it is).
function limits.change(box, task, declared, paused, instead)
  local known = redis.call('HGET', box.state, 'd' .. task)
  local old = { string.match(known or '0 - - - - - - - running ', '^(%d) (%S+) (%S+) (.*)$') }
  if declared then
    old[2], old[4] = string.match(declared, '^(%S+) (.*)$')
  end
  if paused ~= '' then
    old[1] = paused
  end
  if instead ~= '' then
    old[3] = instead == '0' and '-' or instead
  end
  local new = table.concat(old, ' ')
  local is_set = string.match(new, '^0 %- %- %- %- %- %- %- running ') == nil
  if new == known or not (known or is_set) then
    return
  end
  if is_set then
    redis.call('HSET', box.state, 'limits', 1, 'd' .. task, new)
  else
    redis.call('HDEL', box.state, 'd' .. task)
  end
  last_tick(box)
  box.defined[task], box.is_limited = nil, is_set or limits.all(box)[1] ~= nil
  if not box.is_limited then
    redis.call('HDEL', box.state, 'limits')
  end
  if task == '' then
    redis.call('HDEL', box.more, '!')
    box.added = math.max(box.added, redis.call('ZCARD', box.ready))
  else
    look_at_all(box, named(task))
  end
end

-- The tasks that have limits: task, what holds, permits that are out, messages that wait.
function limits.all(box)
  local state, found = redis.call('HGETALL', box.state), {}
  for i = 1, #state, 2 do
    if string.sub(state[i], 1, 1) == 'd' then
      local task = string.sub(state[i], 2)
      local name = named(task)
      local running = task == '' and redis.call('ZCARD', box.leases) or limiter(box, name .. 't').used
      local waiting = redis.call('ZLEXCOUNT', box.waits, '[' .. name .. 'k', '(' .. name .. 'u')
      found[#found + 1] = { task, state[i + 1], running, waiting }
    end
  end
  return found
end

-- All messages are deleted, but for dead letters, which may have permits.
function limits.clear(box)
  box.known, box.touched = {}, {}
  last_tick(box)
  if not box.is_limited then
    return
  end
  local cursor = '0'
  repeat
    local scanned = redis.call('HSCAN', box.dead_details, cursor, 'MATCH', 't*', 'COUNT', 1000)
    for i = 1, #scanned[2], 2 do
      local entry = read_entry(string.sub(scanned[2][i], 2), scanned[2][i + 1])
      each_held(entry, function(which)
        local one = limiter(box, name_of(entry, which))
        one.used, one.changed = one.used + 1, true
      end)
    end
    cursor = scanned[1]
  until cursor == '0'
end

-- ---------------------------------------------------------------------------------------------------------- recovery

-- Limiters cannot have more permits out than there are messages of theirs that do not wait there: some were deleted by hand.
function limits.mend(box, found)
  for i = 1, #found, 2 do
    local name = string.match(found[i], '^l(.*)$')
    if name then
      local task, ends = read_name(name, 1)
      local is_own = string.sub(name, ends + 1, ends + 1) == 't'
      local declared = limits_of(box, task)
      local list = is_own and 't' .. named(task) or 'k' .. string.sub(name, ends + 2) .. named(task)
      local there = redis.call('ZLEXCOUNT', box.listed, '[' .. list, '(' .. list .. ':')
        - redis.call('ZLEXCOUNT', box.waits, '[' .. name, '(' .. name .. ':')
      local one = limiter(box, name)
      if one.used > there and (is_own or not declared or declared.blocks ~= 'dead') then
        one.used, one.unclaimed, one.changed = there, math.min(one.unclaimed, there), true
        box.touched[name] = true
      end
    end
  end
  return 0
end

-- Of the fields of `more` and their values: those that are notes of messages. The permits of messages that are gone end.
function limits.lose(box, found)
  local notes = {}
  for i = 1, #found, 2 do
    local field = found[i]
    if field ~= '!' then
      notes[#notes + 1] = field
      notes[#notes + 1] = found[i + 1]
    end
    if string.sub(field, 1, 1) == 't' and redis.call('HEXISTS', box.messages, string.sub(field, 2)) == 0 then
      take_back(box, read_entry(string.sub(field, 2), found[i + 1]), 0, false)
    end
  end
  return notes
end

-- The message that waits, by its entry in `waits`; nil: no mailbox wrote it.
function limits.waiting_id(member)
  local read, name = pcall(name_at, member)
  return read and string.sub(member, string.len(name) + 22) or nil
end

-- The field of `more` that an entry in `listed` stands for; nil: no mailbox wrote it.
function limits.listed_field(member)
  local read, ends = pcall(function()
    local _, at = read_name(member, 2)
    if string.sub(member, 1, 1) == 'k' then
      _, at = read_name(member, at + 1)
    end
    return at
  end)
  return read and 't' .. string.sub(member, ends + 17) or nil
end

-- List messages again that the index has lost.
function limits.list_again(box, ids)
  local about, members = redis.call('HMGET', box.more, unpack(fields('t', ids))), {}
  for i, id in ipairs(ids) do
    if about[i] then
      for _, member in ipairs({ listed_at(read_entry(id, about[i])) }) do
        members[#members + 1] = 0
        members[#members + 1] = member
      end
    end
  end
  bulk('ZADD', box.listed, members)
  return about
end
