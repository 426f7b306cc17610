-- Tasks and their limits: which messages wait at which limiter, and when they become ready. The theory is that of
-- mainspring.mailbox.limiters.
--
-- A message that has a task has an entry in `more`: permits (1: of its key, 2: of its task, 3: both) " " rank " " place " " time of
-- sending " " weight " " limiter. In names a task or a key is written as its length ":" itself. The limiter of a task is called by
-- that and "t", and that of a key by the task, "k" and the key. A message with a key has the name of the latter in its entry.
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

do -- the names of this file are its own: a chunk has at most 200

local OWN, OF_KEY = 2, 1
local NEVER = 1e300
local SCANNED = '\0>' -- the begin of what stands in `expiry` for limiters that are still to be looked at after a change
local TOO_MANY = 1000 -- fields of `limiters` above which each new one has some others looked at that may go
local MOST_NAMES = 4000 -- that are kept from call to call
local MOST_COUNTS = 1000 -- the same
local DIGITS = { [0] = '0', '1', '2', '3' }
local HOLDS = { [0] = { false, false }, { true, false }, { false, true }, { true, true } } -- by permits: of its key, and its own
local NO_LIMITS = { {}, {} } -- see limits_of

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

-- What the name of a limiter says: at 1 the limiter of the key, or false, and at 2 the limiter of the task; the task and the key;
-- the field of it in `limiters`; the begins of the entries in `listed`. It is kept, as calls come to the same limiters again and again.
local names, how_many_names = {}, 0

local function parts_of(name)
  local parts = names[name]
  if not parts then
    local task, ends = read_name(name, 1)
    local written = string.sub(name, 1, ends)
    local key = string.byte(name, ends + 1) == 107 and string.sub(name, ends + 2) -- "k"
    parts = {
      key and name, key and written .. 't' or name, task = task, key = key, field = 'l' .. name, by_task = 't' .. written,
      by_key = key and 'k' .. key .. written,
    }
    if how_many_names == MOST_NAMES then
      names, how_many_names = {}, 0
    end
    names[name], how_many_names = parts, how_many_names + 1
  end
  return parts
end

local function read_entry(id, about)
  local rank, place, at = string.match(about, '^%d (%-?%d+) (%d+) %d+ %S+ ()')
  local permits = string.byte(about) - 48
  return { -- and the fields that bind fills, as a table that grows is made anew
    false, false, declared = false, needs_key = false,
    id = id, about = about, permits = permits, stored = permits, rank = rank, place = place, of = parts_of(string.sub(about, at)),
  }
end

-- The task of a message as it is written at the begin of an index entry.
function limits.task_written(about)
  return named(read_entry('', about).of.task)
end

-- What an earlier version did not keep with a dead letter: the task of a call.
function limits.about_call(rank, place, sent, task)
  return table.concat({ 0, rank, place, sent, '1.0', named(task) .. 't' }, ' ')
end

-- The id that an entry in `dead_tasks` stands for.
function limits.dead_id(member)
  local _, ends = read_name(member, 1)
  return string.sub(member, ends + 17)
end

local function text_of(entry)
  return DIGITS[entry.permits] .. string.sub(entry.about, 2)
end

-- Store the permits of messages, as far as they have changed.
local function store(box, entries)
  local changed = {}
  for _, entry in ipairs(entries) do
    if entry.permits ~= entry.stored then
      changed[#changed + 1] = 't' .. entry.id
      changed[#changed + 1] = text_of(entry)
      entry.stored = entry.permits
    end
  end
  bulk('HSET', box.more, changed)
end

-- Where a message is listed.
local function listed_at(entry)
  local spot, of = entry.place .. entry.id, entry.of
  if of.key then
    return of.by_task .. spot, of.by_key .. spot
  end
  return of.by_task .. spot
end

-- What a call finds out of limits. Most calls have to do with no task, and do without.
local function begin(box)
  if not box.known then
    box.defined, box.known, box.touched, box.first, box.shares, box.budget = {}, {}, {}, {}, {}, AT_ONCE
  end
end

-- The limits of a task, at 1 of each key and at 2 of the task, or false.
local function limits_of(box, task)
  begin(box)
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
        { most = tonumber(of_key), rate = rate(key_interval, key_burst) },
        { most = paused == '1' and 0 or tonumber(instead) or tonumber(most), rate = rate(interval, burst) },
        paused = paused == '1', blocks = blocks,
      }
      known.limits_keys = known[OF_KEY].most ~= nil or known[OF_KEY].rate or false
    end
    box.defined[task] = known
  end
  return known
end

-- How many messages may be claimed by the limits of the whole mailbox. If that is too few, claims want to know when one ends.
function limits.room(box)
  local whole = limits_of(box, '')
  if not whole or not whole[OWN].most then
    return NEVER
  elseif whole.paused then
    return 0
  end
  redis.call('HSET', box.more, '!', '1')
  return math.max(whole[OWN].most - redis.call('ZCARD', box.leases), 0)
end

-- --------------------------------------------------------------------------------------------------------- limiters

-- What holds for a limiter.
local function limit_of(box, name)
  local of = parts_of(name)
  local declared = limits_of(box, of.task)
  return (declared or NO_LIMITS)[of.key and OF_KEY or OWN]
end

-- A limiter by its name, and what holds for it. If it was not known yet, it is to be read: its name is put into `unread`.
local function known_limiter(box, name, limit, unread)
  local one = box.known[name]
  if not one then
    one = { used = 0, unclaimed = 0, spent = 0, is_stored = false, changed = false, limit = limit, waits = nil, opens = nil }
    box.known[name] = one
    unread[#unread + 1] = name
  end
  return one
end

-- What is stored of a limiter whose rate is not spent, by its permits that are out and unclaimed, and these by that. It is kept, as
-- most limiters have few permits.
local count_texts, counts_read, how_many_counts = {}, {}, 0

local function write_limiter(used, unclaimed, spent)
  local known = spent == 0 and count_texts[used]
  local written = known and known[unclaimed]
  if not written then
    written = string.format('%d %d %d', used, unclaimed, spent)
    if spent == 0 then
      if how_many_counts == MOST_COUNTS then
        count_texts, counts_read, how_many_counts = {}, {}, 0
      end
      count_texts[used] = count_texts[used] or {}
      count_texts[used][unclaimed], counts_read[written] = written, { used, unclaimed, 0 }
      how_many_counts = how_many_counts + 1
    end
  end
  return written
end

local function read_limiter(stored)
  local known = counts_read[stored]
  if known then
    return known[1], known[2], known[3]
  end
  local used, unclaimed, spent = string.match(stored, '^(%d+) (%d+) (%d+)$')
  return tonumber(used or nil), tonumber(unclaimed or nil), tonumber(spent or nil)
end

local function read_limiters(box, names_of_them)
  local wanted = {}
  for i, name in ipairs(names_of_them) do
    wanted[i] = parts_of(name).field
  end
  for i, stored in ipairs(wanted[1] and look_up('HMGET', box.limiters, wanted) or {}) do
    local used, unclaimed, spent = read_limiter(stored or '')
    if used then
      local one = box.known[names_of_them[i]]
      one.used, one.unclaimed, one.spent, one.is_stored = used, unclaimed, spent, true
    end
  end
end

local function limiter(box, name)
  local unread = {}
  local one = known_limiter(box, name, limit_of(box, name), unread)
  read_limiters(box, unread)
  return one
end

-- Let messages have the limits of their tasks, and the limiters that they have permits of, or may get permits of.
local function bind(box, entries)
  local unread, task, declared = {}, nil, nil
  for _, entry in ipairs(entries) do
    local of, holds = entry.of, HOLDS[entry.permits]
    if of.task ~= task then
      task, declared = of.task, limits_of(box, of.task)
    end
    local limit = declared or NO_LIMITS
    entry.declared, entry.needs_key = declared, limit.limits_keys and of.key
    if entry.needs_key or holds[OF_KEY] then
      entry[OF_KEY] = known_limiter(box, of[OF_KEY], limit[OF_KEY], unread)
    end
    if declared or holds[OWN] then
      entry[OWN] = known_limiter(box, of[OWN], limit[OWN], unread)
    end
  end
  read_limiters(box, unread)
end

-- The same of one, from what is stored.
local function bound_entry(box, id, about)
  local entry = read_entry(id, about)
  bind(box, { entry })
  return entry
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

-- Look at some fields of `limiters` that may have nothing to say any more, one for each new one.
local function tidy(box, new)
  if new == 0 or redis.call('HLEN', box.limiters) < TOO_MANY then
    return
  end
  local cursor = redis.call('HGET', box.state, 'tidied') or '0'
  local scanned = redis.call('HSCAN', box.limiters, cursor, 'COUNT', new)
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
      if used == '0' and tonumber(spent) <= now then
        gone[#gone + 1] = field
      end
    end
  end
  bulk('HDEL', box.limiters, gone)
  redis.call('HSET', box.state, 'tidied', scanned[1])
end

-- When a limiter gives its next permit: NEVER, if not until one ends or is claimed.
local function opens_at(one)
  local most, rate = one.limit.most, one.limit.rate
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
  local holds = HOLDS[entry.permits]
  for which = OF_KEY, OWN do
    if holds[which] then
      local one = entry[which]
      one.unclaimed, one.changed = math.max(one.unclaimed - 1, 0), true
      if one.limit.rate then
        one.spent = math.max(one.spent, now) + one.limit.rate.interval
        box.touched[entry.of[which]] = true
      end
    end
  end
end

-- End the permits of a message, but for that of `kept`.
local function take_back(box, entry, kept, was_claimed)
  local holds = HOLDS[entry.permits]
  for which = OF_KEY, OWN do
    if which ~= kept and holds[which] then
      local one = entry[which]
      one.used, one.changed = math.max(one.used - 1, 0), true
      if not was_claimed then
        one.unclaimed = math.max(one.unclaimed - 1, 0)
      end
      box.touched[entry.of[which]] = true
    end
  end
  entry.permits = kept == OF_KEY and entry.permits % 2 or 0
end

-- The permit that a message keeps which is tried again ('retry') or dead ('dead').
local function kept_by(entry, event)
  local declared = entry.declared
  return declared and (declared.blocks == 'dead' or declared.blocks == event) and OF_KEY or 0
end

local function first_waiting(box, name, most)
  if box.none_wait == nil then
    box.none_wait = redis.call('ZCARD', box.waits) == 0
  end
  if box.none_wait then
    return {}
  end
  local of = parts_of(name)
  if not of.from then
    of.from, of.to = '[' .. name, '(' .. name .. ':'
  end
  return redis.call('ZRANGE', box.waits, of.from, of.to, 'BYLEX', 'LIMIT', '0', most == 1 and '1' or most)
end

local function lacks_key(entry)
  return entry.needs_key and not HOLDS[entry.permits][OF_KEY]
end

-- Let a message get the permits that it lacks, as far as no other waits for them. Return nil if it has all of them, else its
-- entry in `waits`, which the caller writes. `spot`: its place and its id.
local function get_permits(box, entry, spot)
  while true do
    local which = lacks_key(entry) and OF_KEY or not HOLDS[entry.permits][OWN] and OWN
    if not which then
      return nil
    end
    local name, one = entry.of[which], entry[which]
    local opens = opens_at(one)
    if opens <= now and one.waits == nil then
      one.waits = first_waiting(box, name, 1)[1] ~= nil
    end
    if opens > now or one.waits then
      one.waits, box.none_wait = true, false
      if opens <= now then
        box.touched[name] = true
      elseif opens ~= NEVER then
        open_at(box, name, opens)
      end
      return name .. rank_code(entry.rank) .. spot
    end
    one.used, one.unclaimed, one.changed = one.used + 1, one.unclaimed + 1, true
    entry.permits = entry.permits + which
  end
end

local function add_ready(ready, entry, spot)
  ready[#ready + 1] = entry.rank
  ready[#ready + 1] = spot
end

local function add_waiting(waits, member)
  waits[#waits + 1] = 0
  waits[#waits + 1] = member
end

-- Write where messages are from now on, whose permits are stored.
local function put(box, ready, waits)
  bulk('ZADD', box.ready, ready)
  bulk('ZADD', box.waits, waits)
  box.added = box.added + #ready / 2
end

-- Let in messages that wait at a limiter first of all: their entries in `waits`, and the name of each one's limiter.
local function let_these_in(box, members, names_of_them)
  local ids, gone, ready, waits, entries = {}, {}, {}, {}, {}
  for i, member in ipairs(members) do
    ids[i] = string.sub(member, string.len(names_of_them[i]) + 22)
  end
  local about = look_up('HMGET', box.more, fields('t', ids))
  for i, id in ipairs(ids) do
    entries[#entries + 1] = about[i] and read_entry(id, about[i]) or nil
  end
  bind(box, entries)
  local at = 0
  for i, was in ipairs(members) do
    local name, member = names_of_them[i], nil
    if not about[i] then -- the message was deleted by hand
      box.dropped = box.dropped + 1
    else
      at = at + 1
      local entry, spot = entries[at], string.sub(was, string.len(name) + 6)
      local which = name == entry.of[OWN] and OWN or OF_KEY
      if entry.declared and (which == OF_KEY or not lacks_key(entry)) then
        local from = box.known[name]
        from.used, from.unclaimed, from.changed = from.used + 1, from.unclaimed + 1, true
        entry.permits = entry.permits + which
      end
      member = entry.declared and get_permits(box, entry, spot)
      if member then
        add_waiting(waits, member)
      else
        add_ready(ready, entry, spot)
      end
    end
    if member ~= was then -- else it got the permit of its key, and waits where it did
      gone[#gone + 1] = was
    end
  end
  store(box, entries)
  put(box, ready, waits)
  bulk('ZREM', box.waits, gone)
end

-- Find those that wait at a limiter and may be let in now: their entries in `waits`.
local function look_at(box, name)
  local one = box.known[name]
  local most, rate, opens = one.limit.most, one.limit.rate, opens_at(one)
  if opens == NEVER then
    return {}
  elseif box.budget <= 0 then
    open_at(box, name, now)
    return {}
  end
  local wanted = math.min(100, box.budget, most and most - one.used or NEVER)
  if rate then
    wanted = math.min(wanted, math.floor(rate.burst - one.unclaimed - (math.max(one.spent, now) - now) / rate.interval))
  end
  wanted = math.max(wanted, 1)
  local members = first_waiting(box, name, wanted)
  one.waits = members[1] ~= nil
  if one.waits and opens > now then
    open_at(box, name, opens)
    return {}
  end
  box.budget = box.budget - #members
  if #members < wanted then
    one.waits = nil
  elseif not parts_of(name).key or not most or one.used + #members < most then
    box.touched[name] = true -- there may be more
  end
  return members
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
  while box.touched and next(box.touched) do
    local touched, unread, members, names_of_them = box.touched, {}, {}, {}
    box.touched = {}
    for name in pairs(touched) do
      if not box.known[name] then
        known_limiter(box, name, limit_of(box, name), unread)
      end
    end
    read_limiters(box, unread)
    for name in pairs(touched) do
      for _, member in ipairs(look_at(box, name)) do
        members[#members + 1], names_of_them[#members + 1] = member, name
      end
    end
    if members[1] then
      let_these_in(box, members, names_of_them)
    end
  end
end

-- Look at the limiters of a task at which messages wait, from a name on.
local function look_at_all(box, from)
  local task = read_name(from, 1)
  begin(box)
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
    box.touched[name] = true
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
    box.touched[string.sub(due, 2)] = true
  end
end

-- Store what has changed of the limiters, and the places of keys.
function limits.save(box)
  if not box.known then
    return
  end
  local stored, gone, new = {}, {}, 0
  for name, one in pairs(box.known) do
    if one.changed then
      if one.used == 0 and one.spent <= now then
        gone[#gone + 1] = one.is_stored and parts_of(name).field or nil
      else
        stored[#stored + 1] = parts_of(name).field
        local spent = one.spent > now and one.spent or 0
        stored[#stored + 1] = write_limiter(one.used, math.min(one.unclaimed, one.used), spent)
        new = new + (one.is_stored and 0 or 1)
      end
    end
  end
  for share, last in pairs(box.shares) do
    stored[#stored + 1] = share
    stored[#stored + 1] = text(last.place)
    new = new + (last.is_stored and 0 or 1)
  end
  bulk('HSET', box.limiters, stored)
  bulk('HDEL', box.limiters, gone)
  tidy(box, new)
end

-- ---------------------------------------------------------------------------------------------------------- messages

-- Read the last places of the keys of messages.
local function fetch_shares(box, entries)
  begin(box)
  local list, seen = {}, {}
  for _, entry in ipairs(entries) do
    if entry.of.key and not entry.share then
      entry.share = 's' .. entry.rank .. ' ' .. entry.of[OF_KEY]
      if not (box.shares[entry.share] or seen[entry.share]) then
        list[#list + 1] = entry.share
        seen[entry.share] = true
      end
    end
  end
  for i, last in ipairs(list[1] and look_up('HMGET', box.limiters, list) or {}) do
    box.shares[list[i]] = { place = tonumber(last or nil), is_stored = last }
  end
end

-- The place of a message with a key: one step behind the last one of its key, but not before the first in line. Nil: it has no
-- key. `spare`: the place if it is the first.
function limits.place_of(box, entry, spare)
  if not entry.of.key then
    return nil
  end
  if not entry.share then
    fetch_shares(box, { entry })
  end
  local task, weight = entry.of.task, string.match(entry.about, '^%d %-?%d+ %d+ %d+ (%S+)')
  local first, last = first_place(box, entry.rank, task), box.shares[entry.share]
  if not first then
    first = tonumber(spare or new_place(box))
    box.first[entry.rank .. ' ' .. task] = first
  end
  last.place = last.place and math.max(first, last.place + math.floor(STEP / tonumber(weight) + 0.5)) or first
  return place_of(last.place)
end

-- Let a message have another place (nil: its own) from the begin on.
local function move(entry, place)
  if place and place ~= entry.place then
    local permits, rank, rest = string.match(entry.about, '^(%d) (%-?%d+) %d+ (.*)$')
    entry.about, entry.place = table.concat({ permits, rank, place, rest }, ' '), place
  end
end

-- A new message that has a task: its entry, before it is stored.
function limits.new_entry(id, rank, place, tail)
  return read_entry(id, table.concat({ 0, rank, place, text(now), tail }, ' '))
end

-- Let new messages have their places, as those of keys are not in the order of the sends.
function limits.give_places(box, entries)
  fetch_shares(box, entries)
  for _, entry in ipairs(entries) do
    move(entry, limits.place_of(box, entry, entry.place))
  end
end

-- Let new messages that are due get permits, as far as their tasks have limits. What is returned is written by limits.add.
function limits.get_permits(box, entries)
  bind(box, entries)
  for _, entry in ipairs(entries) do
    entry.waits = entry.declared and get_permits(box, entry, entry.place .. entry.id)
  end
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

-- Put new messages that have limits where they belong. Return the others by their ids.
function limits.put_new(box, entries)
  local ready, waits, put_here = {}, {}, {}
  for _, entry in ipairs(entries) do
    if entry.waits then
      add_waiting(waits, entry.waits)
    elseif entry.declared then
      add_ready(ready, entry, entry.place .. entry.id)
    end
    put_here[entry.id] = entry.declared
  end
  put(box, ready, waits)
  return put_here
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

-- Let a message that is due become ready, or wait at a limiter, if its task has limits; else return false.
function limits.enter(box, entry, place)
  local ready, waits, spot = {}, {}, place .. entry.id
  local member = entry.declared and get_permits(box, entry, spot)
  if member then
    add_waiting(waits, member)
  elseif entry.declared then
    add_ready(ready, entry, spot)
  end
  store(box, { entry })
  put(box, ready, waits)
  return entry.declared ~= false
end

-- A pending message waits no more: its permits end, but for that of `kept`, which counts as claimed from now on.
local function withdraw(box, entry, kept)
  take_back(box, entry, kept, false)
  if HOLDS[entry.permits][OF_KEY] then
    local one = entry[OF_KEY]
    one.unclaimed, one.changed = math.max(one.unclaimed - 1, 0), true
  end
end

-- A message has come back, or is moved. `ended` says from what: 'retry' an attempt, 'front' a delivery that was released, 'undone'
-- a claim that counts for nothing, 'moved' from where it was pending, 'put off' as well, where it is to be tried again; nil: a
-- delay. Its entry, with the permits that it keeps.
function limits.returned(box, id, about, ended)
  local entry = bound_entry(box, id, about)
  if ended == 'retry' then
    take_back(box, entry, kept_by(entry, 'retry'), true)
  elseif ended == 'front' then
    take_back(box, entry, OF_KEY, true)
  elseif ended == 'moved' then
    take_back(box, entry, 0, false)
  elseif ended == 'put off' then
    withdraw(box, entry, kept_by(entry, 'retry'))
  end
  store(box, { entry })
  return entry
end

-- It is to be claimed again: see limits.enter.
function limits.due_again(box, entry, place, ended)
  local holds = HOLDS[entry.permits]
  for which = OF_KEY, OWN do
    if holds[which] then
      local one = entry[which]
      local rate = one.limit.rate
      one.unclaimed, one.changed = one.unclaimed + 1, true
      if ended == 'undone' and rate then
        one.spent = one.spent - rate.interval
      end
    end
  end
  return limits.enter(box, entry, place)
end

-- Let a message in flight belong to another task, if that has limits. Whether it did so: then it has no permits any more, and the
-- caller releases it.
function limits.set_task(box, id, task)
  local about = redis.call('HGET', box.more, 't' .. id)
  local entry = about and bound_entry(box, id, about)
  if not entry or entry.of.task == task or not limits_of(box, task) then
    return false
  end
  take_back(box, entry, 0, true)
  redis.call('ZREM', box.listed, listed_at(entry))
  local key = entry.of.key and 'k' .. entry.of.key or 't'
  local head = string.sub(about, 2, -1 - string.len(named(entry.of.task) .. key))
  local other = read_entry(id, '0' .. head .. named(task) .. key)
  if other.of.key then -- later messages of its key come behind it
    fetch_shares(box, { other })
    local last = box.shares[other.share]
    last.place = math.max(last.place or 0, tonumber(other.place))
  end
  limits.add(box, { other })
  return true
end

-- A message is dead-lettered. Return the entry that the dead letter has: with the permit of its key, if it was ever delivered and
-- dead letters of its task keep it.
function limits.dead_lettered(box, id, about, was_claimed, was_delivered)
  local entry = bound_entry(box, id, about)
  local kept = was_delivered and kept_by(entry, 'dead') or 0
  if was_claimed then
    take_back(box, entry, kept, true)
  else
    withdraw(box, entry, kept)
  end
  local about_dead = text_of(entry)
  entry.permits = 0
  store(box, { entry }) -- the message has none any more
  return about_dead
end

-- The entry of a dead letter that is replayed, with another head.
function limits.replayed(box, id, about, place)
  local entry = bound_entry(box, id, about)
  move(entry, limits.place_of(box, entry, place) or place)
  return entry
end

-- A dead letter is purged.
function limits.purged_dead(box, id)
  local about = redis.call('HGET', box.dead_details, 't' .. id)
  if about then
    take_back(box, bound_entry(box, id, about), 0, true)
  end
end

-- Where a message waits at a limiter, if it does.
function limits.find(box, id, about, place)
  local entry = read_entry(id, about)
  for which = entry.of.key and OF_KEY or OWN, OWN do
    local member = entry.of[which] .. rank_code(entry.rank) .. place .. id
    if redis.call('ZSCORE', box.waits, member) then
      return member
    end
  end
end

-- Messages have ended: end their permits, and take them off the lists. Return how many had tasks. See delete_messages.
function limits.forget(box, ids, unclaimed)
  local wanted, members = fields('t', ids), {}
  wanted[#wanted + 1] = '!'
  local found, entries = look_up('HMGET', box.more, wanted), {}
  for i, id in ipairs(ids) do
    entries[#entries + 1] = found[i] and read_entry(id, found[i]) or nil
  end
  bind(box, entries)
  for _, entry in ipairs(entries) do
    take_back(box, entry, 0, not unclaimed)
    members[#members + 1], members[#members + 2] = listed_at(entry)
  end
  bulk('ZREM', box.listed, members)
  if found[#wanted] and not unclaimed then
    box.added = box.added + #ids
  end
  return #entries
end

-- ------------------------------------------------------------------------------------------------------------ claims

local function is_open(one)
  return not one.limit.most or one.used - one.unclaimed < one.limit.most
end

-- Whether a message that is ready is claimed: nil. Else its entry in `waits`.
local function refused(box, entry, spot)
  for _ = 1, entry.declared and 2 or 0 do
    local holds, member = HOLDS[entry.permits], nil
    if lacks_key(entry) or holds[OF_KEY] and not is_open(entry[OF_KEY]) then
      take_back(box, entry, 0, false)
    elseif not (holds[OWN] and is_open(entry[OWN])) then
      take_back(box, entry, OF_KEY, false)
    else
      break
    end
    member = get_permits(box, entry, spot)
    if member then
      return member
    end
  end
  count_claim(box, entry)
end

-- Leave out of `spots` (place and id, rank, and so on) those beyond the first `most`, and those that may not be claimed, which wait
-- at limiters from now on.
function limits.admitted(box, spots, most)
  local ids, let, gone, waits, entries, of_spot = {}, {}, {}, {}, {}, {}
  for i = 1, math.min(#spots, 2 * most), 2 do
    ids[#ids + 1] = string.sub(spots[i], 17)
  end
  local about = redis.call('HMGET', box.more, unpack(fields('t', ids)))
  for i, id in ipairs(ids) do
    if about[i] then
      of_spot[i] = read_entry(id, about[i])
      entries[#entries + 1] = of_spot[i]
    end
  end
  bind(box, entries)
  for i = 1, #ids do
    local spot = spots[2 * i - 1]
    local member = of_spot[i] and refused(box, of_spot[i], spot)
    if member then
      gone[#gone + 1] = spot
      add_waiting(waits, member)
    else
      let[#let + 1] = spot
      let[#let + 1] = spots[2 * i]
    end
  end
  store(box, entries)
  put(box, {}, waits)
  bulk('ZREM', box.ready, gone)
  box.refused = box.refused + #gone
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
  begin(box)
  box.defined[task], box.is_limited = nil, is_set or limits.all(box)[1] ~= nil
  for name, one in pairs(box.known) do
    one.limit = limit_of(box, name)
  end
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
  box.known = nil
  begin(box)
  last_tick(box)
  if not box.is_limited then
    redis.call('UNLINK', box.limiters)
    return
  end
  local rates, cursor = {}, '0'
  repeat -- what is spent of a rate stays spent
    local scanned = redis.call('HSCAN', box.limiters, cursor, 'MATCH', 'l*', 'COUNT', 1000)
    for i = 1, #scanned[2], 2 do
      local spent = tonumber(string.match(scanned[2][i + 1], '%d+$') or nil) or 0
      if spent > now then
        rates[string.sub(scanned[2][i], 2)] = spent
      end
    end
    cursor = scanned[1]
  until cursor == '0'
  redis.call('UNLINK', box.limiters)
  for name, spent in pairs(rates) do
    local one = limiter(box, name)
    one.spent, one.changed = spent, true
  end
  repeat
    local scanned = redis.call('HSCAN', box.dead_details, cursor, 'MATCH', 't*', 'COUNT', 1000)
    for i = 1, #scanned[2], 2 do
      local entry = read_entry(string.sub(scanned[2][i], 2), scanned[2][i + 1])
      if HOLDS[entry.permits][OF_KEY] then
        local one = limiter(box, entry.of[OF_KEY])
        one.used, one.changed = one.used + 1, true
      end
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
      take_back(box, bound_entry(box, string.sub(field, 2), found[i + 1]), 0, false)
    end
  end
  return notes
end

-- The message that waits, by its entry in `waits`; nil: no mailbox wrote it.
function limits.waiting_id(member)
  local read, name = pcall(name_at, member)
  return read and string.sub(member, string.len(name) + 22) or nil
end

-- Whether the entries of a message in `listed` begin so.
function limits.is_of(list, id, about)
  for _, member in ipairs({ listed_at(read_entry(id, about)) }) do
    if string.sub(member, 1, string.len(list)) == list then
      return true
    end
  end
  return false
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

end
