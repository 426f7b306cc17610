-- Sending, claiming, settling.

-- Call `visit` with each lease. There are only as many as there are handlers.
local function each_lease(box, visit)
  local cursor = '0'
  repeat
    local scanned = redis.call('ZSCAN', box.leases, cursor, 'COUNT', 1000)
    cursor = scanned[1]
    for i = 1, #scanned[2], 2 do
      visit(scanned[2][i])
    end
  until cursor == '0'
end

-- End a message wherever it is. Return whether it waited (else it was in flight, and its receipt is void), and its value; nil:
-- there is none.
local function remove_message(box, id)
  local value, key, spot = find_waiting(box, id)
  if not value then
    return false, nil
  end
  verify(box)
  if spot then
    redis.call('ZREM', key, spot)
  else
    local held_by = {}
    each_lease(box, function(receipt)
      local _, _, _, holder = of_receipt(receipt)
      if holder == id then
        held_by[#held_by + 1] = receipt
      end
    end)
    bulk('ZREM', box.leases, held_by)
  end
  delete_messages(box, { id }, spot and key ~= box.delayed)
  box.settled = box.settled + 1
  return spot ~= nil, value
end

-- Let the message `id` have a dedup key: the id of the unfinished one that has it already, else nil. `own`: the ids of those
-- that are about to be stored with it.
--
-- One whose id another one has, alive or dead, ends that: both would be one in most keys, and the end of the one would take
-- the other along. An id comes twice only where the sender made it of something (a dead letter's id), or sends something
-- once more, and then there is a dedup key; all other ids are new.
local function claim_key(box, id, key, own)
  local holder = redis.call('HGET', box.dedup, key)
  local ends = holder and redis.call('ZSCORE', box.expiry, holder)
  if ends and tonumber(ends) <= now then -- and it was not swept yet, as many others were due
    expire_one(box, holder, ends)
    holder = redis.call('HGET', box.dedup, key)
  end
  if holder and not own[holder] and redis.call('HEXISTS', box.messages, holder) == 0 then -- it was deleted by hand
    holder = false
    box.dropped = box.dropped + 1
  end
  if holder or full then
    return holder
  end
  remove_message(box, id)
  if redis.call('HEXISTS', box.dead, id) == 1 then
    verify(box)
    limits.purged_dead(box, id)
    delete_dead(box, id)
    box.settled = box.settled + 1
  end
  redis.call('HSET', box.more, 'k' .. id, key)
  redis.call('HSET', box.dedup, key, id)
end

-- Let one new message be received: by a waiter that it is pushed to, or in its turn.
local function offer(box, spot, rank, value)
  if not push_new(box, spot, rank, value) then
    redis.call('ZADD', box.ready, rank, spot)
    box.added = box.added + 1
  end
end

-- Store a message that has nothing but its rank and its value, as most have.
local function send_one(box, id, rank, value)
  local place = new_place(box)
  value = place .. '|' .. text(now) .. '|' .. rank .. '|' .. value
  redis.call('HSET', box.messages, id, value)
  local done, failure = pcall(offer, box, place .. id, rank, value)
  if not done then
    redis.pcall('HDEL', box.messages, id)
    error(failure, 0)
  end
end

-- How many arguments a message has with these parts (see send).
local function size_of(parts)
  return 2 + parts % 2 + math.floor(parts / 2)
end

-- Let new messages, some of which have tasks, become ready or wait at limiters.
local function offer_all(box, entries, values, spots, rank)
  local put_here, ready = limits.put_new(box, entries), {}
  for i = 2, #spots, 2 do
    if not put_here[values[i - 1]] then
      ready[#ready + 1] = rank
      ready[#ready + 1] = spots[i]
    end
  end
  if #spots == 2 and #ready == 2 then
    offer(box, spots[2], rank, values[2])
  else
    bulk('ZADD', box.ready, ready)
    box.added = box.added + #ready / 2
  end
end

-- Store what new messages have that have tasks, and write their places into `values` and `spots`, where each entry has its number.
local function add_tasks(box, entries, values, spots, delay)
  if delay == 0 then
    limits.give_places(box, entries)
    for _, entry in ipairs(entries) do
      local at = entry.number + 2
      values[at] = entry.place .. string.sub(values[at], 17)
      spots[at] = entry.place .. entry.id
    end
    limits.get_permits(box, entries)
  end
  limits.add(box, entries)
end

local NO_BODY = {} -- the error of a send whose body is not there

-- See send. `values`, `spots` and `keys` become the arguments of the commands that store them, and their dedup keys.
local function send_all(box, values, spots, keys, from, count, rank, delay, expires, parts, large)
  local at, last, has_keys, has_tasks = from, 0, parts % 2 == 1, parts >= 2
  local before, ids, own, entries = next_seq(box, count) - count * STEP, {}, {}, {}
  local sent = '|' .. text(now) .. '|' .. rank .. '|'
  local score = delay > 0 and text(now + delay) or rank
  local behind = delay > 0 and rank .. '.'
  local is_large = {}
  for _, id in ipairs(large) do
    is_large[id] = true
  end
  for i = 1, count do
    local id, same = ARGV[at], nil
    if has_keys then
      local key = ARGV[at + 2]
      if key ~= '' then
        keys[#keys + 1] = key
        keys[#keys + 1] = id
        same = claim_key(box, id, key, own)
        if same then
          keys[#keys], keys[#keys - 1] = nil, nil
        end
      end
      ids[i] = same or id
      own[ids[i]] = true
    end
    if not same then
      if full then
        return nil
      end
      if is_large[id] and redis.call('HEXISTS', box.bodies, id) == 0 then
        error(NO_BODY, 0)
      end
      local place = place_of(before + i * STEP)
      local about = has_tasks and ARGV[at + size_of(parts) - 1] or ''
      if about ~= '' then
        entries[#entries + 1] = limits.new_entry(id, rank, place, about)
        entries[#entries].number = last
      end
      values[last + 1] = id
      values[last + 2] = place .. sent .. ARGV[at + 1]
      spots[last + 1] = score
      spots[last + 2] = (behind or place) .. id
      last = last + 2
    end
    at = at + size_of(parts)
  end
  if has_tasks then
    add_tasks(box, entries, values, spots, delay)
  end
  bulk('HSET', box.messages, values)
  if expires > 0 then
    local ends, instant = {}, text(now + expires)
    for i = 1, last, 2 do
      ends[i] = instant
      ends[i + 1] = values[i]
    end
    bulk('ZADD', box.expiry, ends)
    due_at(box, now + expires)
  end
  if delay > 0 then
    bulk('ZADD', box.delayed, spots)
    due_at(box, now + delay)
  elseif has_tasks then
    offer_all(box, entries, values, spots, rank)
  elseif last == 2 then
    offer(box, spots[2], rank, values[2])
  else
    bulk('ZADD', box.ready, spots)
    box.added = box.added + last / 2
  end
  return ids
end

-- Undo what was written of a send that failed, as far as that is possible.
local function undo_send(box, values, spots, keys)
  local ids, members = {}, {}
  for i = 2, #values, 2 do
    ids[i / 2], members[i / 2] = values[i - 1], spots[i]
  end
  pcall(limits.unsend, box, ids, members)
  pcall(bulk, 'ZREM', box.ready, members)
  pcall(bulk, 'ZREM', box.delayed, members)
  pcall(bulk, 'ZREM', box.expiry, ids)
  for i = 1, #keys, 2 do
    if redis.pcall('HGET', box.dedup, keys[i]) == keys[i + 1] then
      redis.pcall('HDEL', box.dedup, keys[i])
    end
    redis.pcall('HDEL', box.more, 'k' .. keys[i + 1])
  end
  pcall(bulk, 'HDEL', box.messages, ids)
end

-- Store `count` messages, from ARGV[from] on: id and body (with its flags), and `parts`: 1 the dedup key, 2 the task, 3 both. The
-- bodies of those with the ids `large` are stored already, else it is an error: NO_BODY. Their ids; nil where there is no memory
-- for them: then none is stored.
local function send(box, ...)
  local values, spots, keys = {}, {}, {}
  local done, result = pcall(send_all, box, values, spots, keys, ...)
  if not done then
    undo_send(box, values, spots, keys)
    error(result, 0)
  end
  return result
end

local function waiting(box)
  return redis.call('ZCARD', box.ready) + redis.call('ZCARD', box.delayed) + redis.call('ZCARD', box.leases)
    + redis.call('ZCARD', box.waits)
end

-- How many of those to be put are new: some have the key of an unfinished message, or of one before them, as `seen`.
local function how_many_new(box, from, count, parts, seen)
  if parts % 2 == 0 then
    return count
  end
  local new = 0
  for i = 1, count do
    local key = ARGV[from + (i - 1) * size_of(parts) + 2]
    if key == '' then
      new = new + 1
    elseif not seen[key] then
      seen[key] = true
      new = new + 1 - redis.call('HEXISTS', box.dedup, key)
    end
  end
  return new
end

-- Take the first `most` of those that are pending: their ids, values and receipts, and what the few have; how many index
-- entries were read. The leases stand before the index entries go.
local function claim_some(box, most, visible, claimant)
  local spots = redis.call('ZRANGE', box.ready, 0, most - 1, 'WITHSCORES')
  if #spots == 0 then
    return 0
  end
  local tick, read, ids = last_tick(box), #spots / 2, {}
  if box.is_limited then
    local room = limits.room(box)
    if room == 0 then
      return 0
    end
    spots = limits.admitted(box, spots, room)
    if #spots == 0 then
      return read, {}, {}, {}
    end
  end
  for i = 1, #spots, 2 do
    ids[(i + 1) / 2] = string.sub(spots[i], 17)
  end
  local found = redis.call('HMGET', box.messages, unpack(ids))
  local by, ends = '.' .. claimant .. '.', text(now + visible)
  local receipts, values, leases, held, last = {}, {}, {}, {}, 0
  for i, id in ipairs(ids) do
    if found[i] then -- else it was deleted by hand
      tick = math.max(tick + 1, now)
      last = last + 1
      local receipt = text(tick) .. '.' .. spots[2 * i] .. by .. spots[2 * i - 1]
      receipts[last], values[last], held[last] = receipt, found[i], id
      leases[2 * last - 1], leases[2 * last] = ends, receipt
    end
  end
  local known, more = {}, last > 0 and redis.call('HLEN', box.more) or 0
  if more > 0 and more ~= how_many_have_tasks(box) then
    for _, letter in ipairs({ 'b', 'c', 'h' }) do
      known[letter] = redis.call('HMGET', box.more, unpack(fields(letter, held)))
    end
  end
  if last > 0 then
    redis.call('ZADD', box.leases, unpack(leases))
  end
  local taken = redis.pcall('ZREMRANGEBYRANK', box.ready, 0, #ids - 1)
  if type(taken) == 'table' then
    if last > 0 then
      redis.call('ZREM', box.leases, unpack(receipts))
    end
    error(taken, 0)
  end
  box.tick = tick
  box.dropped = box.dropped + #ids - last
  return read, receipts, values, known
end

-- Lease up to `limit` messages, first come first served; their receipts and values, and what the few have: counts,
-- checkpoint and history. Whether it ended before its time, as much was to be dropped or had to wait at limiters.
local function lease(box, limit, visible, claimant)
  local receipts, values, extras, got, read = {}, {}, {}, 0, 0
  while got < limit and (got > 0 or read < 10 * AT_ONCE) and box.refused < AT_ONCE do
    local done, count, some, of_some, known = pcall(claim_some, box, math.min(limit - got, 1000), visible, claimant)
    if not done then
      if got > 0 then -- these are leased, and the next claim fails
        read = nil
        break
      end
      error(count, 0)
    end
    if count == 0 then
      read = nil
      break
    end
    for i = 1, #some do
      receipts[got + i], values[got + i] = some[i], of_some[i]
    end
    for letter, parts in pairs(known) do
      for i = 1, #some do
        if parts[i] then
          extras[#extras + 1] = got + i - 1
          extras[#extras + 1] = letter
          extras[#extras + 1] = parts[i]
        end
      end
    end
    got, read = got + #some, read + count
  end
  if got > 0 then
    due_at(box, now + visible)
  end
  return { receipts, values, extras }, got < limit and read ~= nil
end

-- Whether a lease is held.
local function held(box, receipt)
  local ends = tonumber(redis.call('ZSCORE', box.leases, receipt) or nil)
  return ends ~= nil and ends > now
end

-- A lease that is held: time of the claim, rank, place and id, or nil. It is ended last, once the message is elsewhere.
local function held_lease(box, receipt)
  if not held(box, receipt) then
    return nil
  end
  return of_receipt(receipt)
end

-- Acknowledge those of `receipts` that are held; the numbers (from 0) of the others.
local function acknowledge(box, receipts)
  local scores = look_up('ZMSCORE', box.leases, receipts)
  local good, ids, refused, seen, last = {}, {}, {}, {}, 0
  for i, receipt in ipairs(receipts) do
    local ends = tonumber(scores[i] or nil)
    if ends and ends > now and not seen[receipt] then
      seen[receipt] = true
      last = last + 1
      good[last], ids[last] = receipt, id_of_receipt(receipt)
    else
      refused[#refused + 1] = i - 1
    end
  end
  if last > 0 then
    delete_messages(box, ids)
    bulk('ZREM', box.leases, good)
    box.settled = box.settled + last
  end
  return refused
end

-- Undo claims as if they had not been made.
local function unclaim(box, receipts)
  for _, receipt in ipairs(receipts) do
    if redis.call('ZSCORE', box.leases, receipt) then
      local _, rank, place, id = of_receipt(receipt)
      enqueue(box, id, rank, place, 0, 'undone')
      redis.call('ZREM', box.leases, receipt)
    end
  end
end

-- Undo the claims of a claimant that were made after `known`: their answer never reached it.
local function undo_lost_claims(box, claimant, known)
  local lost = {}
  each_lease(box, function(receipt)
    local claimed, _, _, _, holder = of_receipt(receipt)
    if holder == claimant and tonumber(claimed) > known then
      lost[#lost + 1] = receipt
    end
  end)
  unclaim(box, lost)
end

-- `enqueue` (store.lua) writes the delay.
local function nack(box, receipt, delay, charged, front, history)
  local claimed, rank, place, id = held_lease(box, receipt)
  if not claimed then
    return 0
  end
  count_delivery(box, id, claimed, charged)
  if history ~= '' then
    redis.call('HSET', box.more, 'h' .. id, history)
  end
  enqueue(box, id, rank, front and place or nil, delay, front and 'front' or 'retry')
  redis.call('ZREM', box.leases, receipt)
  return 1
end

local function extend(box, receipt, timeout)
  if not held(box, receipt) then
    return 0
  end
  redis.call('ZADD', box.leases, 'XX', 'GT', now + timeout, receipt)
  return 1
end

local function save_checkpoint(box, receipt, state)
  if not held(box, receipt) then
    return 0
  end
  local _, _, _, id = of_receipt(receipt)
  redis.call('HSET', box.more, 'c' .. id, state)
  return 1
end

-- Tell of messages in flight when they were claimed (see find), unless too many are in flight.
local function tell_claims(box, found)
  local held = {}
  for i, row in ipairs(found) do
    if row[3] == 'in_flight' then
      held[row[1]] = i
    end
  end
  if next(held) and redis.call('ZCARD', box.leases) <= AT_ONCE then
    each_lease(box, function(receipt)
      local claimed, _, _, id = of_receipt(receipt)
      if held[id] then
        found[held[id]][5] = tonumber(claimed)
      end
    end)
  end
end

-- The unfinished ones of these messages: its id, its value, where it is, its rank, when it is due (if it is
-- delayed) or was claimed (if it is in flight; 0: not known), and its counts, checkpoint, history and task, if it has them.
local function find(box, ids)
  local found = {}
  for i, id in ipairs(ids) do
    local value, key, spot = find_waiting(box, id)
    if value then
      local place, when = 'pending', 0
      if key == box.delayed then
        place, when = 'delayed', tonumber(redis.call('ZSCORE', key, spot))
      elseif not spot then
        place = 'in_flight'
      end
      local known = redis.call('HMGET', box.more, 'b' .. id, 'c' .. id, 'h' .. id, 't' .. id)
      local _, rank = of_head(value)
      found[#found + 1] = { id, value, place, rank, when, unpack(known, 1, 4) }
    end
  end
  tell_claims(box, found)
  return found
end

-- Let a message that waits be pending in `delay` microseconds: 0 there is none such, 1 it is in flight, 2 it is done.
local function reschedule(box, id, delay)
  local value, key, spot = find_waiting(box, id)
  if not spot then
    return value and 1 or 0
  end
  if delay > 0 or key == box.delayed then
    verify(box)
    local _, rank = of_head(value)
    local is_retry = counts_of(box, id) > 0
    enqueue(box, id, rank, nil, delay, key ~= box.delayed and (is_retry and 'put off' or 'moved') or nil)
    if delay == 0 or key ~= box.delayed then -- else that entry is the new one
      redis.call('ZREM', key, spot)
    end
  end
  return 2
end

-- End a message by its id: 0 none such, 1 it waited, 2 it was in flight; and its value.
local function cancel(box, id)
  sweep(box)
  local waited, value = remove_message(box, id)
  if not value then
    return { 0, '' }
  end
  if not waited then -- in flight
    publish(box, 'all', 'x' .. id)
  end
  return { waited and 1 or 2, value }
end
