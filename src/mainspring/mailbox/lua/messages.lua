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

-- End a message wherever it is: whether it waited (else somebody held it, whose receipt is void), and its value; nil: there
-- is none.
local function end_message(box, id)
  local waited, value = take_waiting(box, id)
  if not value then
    return false, nil
  end
  if not waited then
    local held_by = {}
    each_lease(box, function(receipt)
      local _, _, _, holder = of_receipt(receipt)
      if holder == id then
        held_by[#held_by + 1] = receipt
      end
    end)
    bulk('ZREM', box.leases, held_by)
  end
  forget(box, { id })
  box.settled = box.settled + 1
  return waited, value
end

-- Store `count` messages, from ARGV[from] on: id and body (with its flags), and the dedup key where `keyed`. Their ids; and
-- what to tell the caller where there is no memory for them, in a second value: it is not for others of the batch to hear.
--
-- One whose id another one has, alive or dead, ends that: both would be one in most keys, and the end of the one would take
-- the other along. An id comes twice only where the sender made it of something (a dead letter's id), or sends something
-- once more, and then there is a dedup key; all other ids are new.
local function put(box, from, count, rank, delay, expires, keyed)
  if delay > 0 or expires > 0 then
    know_due(box)
  end
  local step = keyed and 3 or 2
  local seq = box.seq
  local ids, failure = {}, nil
  local values, spots = {}, {}
  local sent = '|' .. text(now) .. '|' .. rank .. '|'
  for i = 1, count do
    local at = from + (i - 1) * step
    local id = ARGV[at]
    local key = keyed and ARGV[at + 2] or ''
    local same
    if key ~= '' then
      local new = redis.pcall('HSETNX', box.keyed, key, id)
      if new == 1 then
        end_message(box, id)
        if redis.call('HEXISTS', box.dead, id) == 1 then
          drop_dead(box, id)
          box.settled = box.settled + 1
        end
        redis.call('HSET', box.more, 'k' .. id, key)
      else
        same = redis.call('HGET', box.keyed, key)
        if not same then
          failure = new
          break
        end
      end
    end
    if same then
      ids[i] = same
    else
      local place = new_place(box)
      values[#values + 1] = id
      values[#values + 1] = place .. sent .. ARGV[at + 1]
      spots[#spots + 1] = place
      ids[i] = id
    end
  end
  if not failure then
    if #values == 0 then
      return ids
    end
    local stored = redis.pcall('HSET', box.messages, unpack(values, 1, math.min(2000, #values)))
    failure = type(stored) == 'table' and stored
  end
  if failure then -- of the first write: nothing has happened
    if string.sub(failure.err, 1, 3) ~= 'OOM' then
      error(failure)
    end
    box.seq = seq
    return {}, { 'oom', failure.err }
  end
  bulk('HSET', box.messages, values, 2001)
  local waiting = {}
  for i = 1, #spots do
    local id = values[2 * i - 1]
    waiting[2 * i - 1] = delay > 0 and now + delay or rank
    waiting[2 * i] = delay > 0 and rank .. '.' .. id or spots[i] .. id
  end
  if delay > 0 then
    bulk('ZADD', box.delayed, waiting)
    due_at(box, now + delay)
  else
    bulk('ZADD', box.ready, waiting)
    box.gained = box.gained + #spots
  end
  if expires > 0 then
    local ends = {}
    for i = 1, #spots do
      ends[2 * i - 1] = now + expires
      ends[2 * i] = values[2 * i - 1]
    end
    bulk('ZADD', box.expiry, ends)
    due_at(box, now + expires)
  end
  return ids
end

local function waiting(box)
  return redis.call('ZCARD', box.ready) + redis.call('ZCARD', box.delayed) + redis.call('ZCARD', box.leases)
end

-- How many of those to be put are new: some have the key of an unfinished message, or of one before them.
local function how_many_new(box, from, count, keyed)
  if not keyed then
    return count
  end
  local new, seen = 0, {}
  for i = 1, count do
    local key = ARGV[from + (i - 1) * 3 + 2]
    if key == '' then
      new = new + 1
    elseif not seen[key] then
      seen[key] = true
      new = new + 1 - redis.call('HEXISTS', box.keyed, key)
    end
  end
  return new
end

-- Lease up to `limit` messages, first come first served; their receipts and values, and what the few have: counts,
-- checkpoint and history.
local function claim(box, limit, visible, claimant)
  sweep(box)
  local receipts, values, extras = {}, {}, {}
  while #receipts < limit do
    local popped = redis.call('ZPOPMIN', box.ready, math.min(limit - #receipts, 1000))
    if #popped == 0 then
      break
    end
    local ids = {}
    for i = 1, #popped, 2 do
      ids[#ids + 1] = string.sub(popped[i], 17)
    end
    local found = redis.call('HMGET', box.messages, unpack(ids))
    local ends, held = {}, {}
    local until_ = now + visible
    for i, id in ipairs(ids) do
      if found[i] then -- else somebody has deleted it by hand
        box.tick = math.max(box.tick + 1, now)
        local receipt = text(box.tick) .. '.' .. popped[2 * i] .. '.' .. claimant .. '.' .. popped[2 * i - 1]
        receipts[#receipts + 1] = receipt
        values[#values + 1] = found[i]
        held[#held + 1] = id
        ends[#ends + 1] = until_
        ends[#ends + 1] = receipt
      end
    end
    if #ends > 0 then
      redis.call('ZADD', box.leases, unpack(ends))
      due_at(box, until_)
      if has_more(box) then
        local base = #receipts - #held
        for _, letter in ipairs({ 'b', 'c', 'h' }) do
          local known = redis.call('HMGET', box.more, unpack(fields(letter, held)))
          for i = 1, #held do
            if known[i] then
              extras[#extras + 1] = base + i - 1
              extras[#extras + 1] = letter
              extras[#extras + 1] = known[i]
            end
          end
        end
      end
    end
  end
  return { receipts, values, extras }
end

-- Whether a lease is held.
local function held(box, receipt)
  local ends = tonumber(redis.call('ZSCORE', box.leases, receipt) or nil)
  return ends ~= nil and ends > now
end

-- End a lease that is held; time of the claim, rank, place and id, or nil.
local function take(box, receipt)
  if not held(box, receipt) then
    return nil
  end
  redis.call('ZREM', box.leases, receipt)
  return of_receipt(receipt)
end

-- Acknowledge those of `receipts` that are held; the numbers (from 0) of the others.
local function acknowledge(box, receipts)
  local scores = look_up('ZMSCORE', box.leases, receipts)
  local good, ids, refused, seen = {}, {}, {}, {}
  for i, receipt in ipairs(receipts) do
    local ends = tonumber(scores[i] or nil)
    if ends and ends > now and not seen[receipt] then
      seen[receipt] = true
      good[#good + 1] = receipt
      ids[#ids + 1] = string.sub(string.match(receipt, '^%d+%.%-?%d+%.%w*%.(.*)$'), 17)
    else
      refused[#refused + 1] = i - 1
    end
  end
  if #good > 0 then
    bulk('ZREM', box.leases, good)
    forget(box, ids)
    box.settled = box.settled + #good
  end
  return refused
end

-- Take claims back as if they had not been made.
local function unclaim(box, receipts)
  for _, receipt in ipairs(receipts) do
    if redis.call('ZREM', box.leases, receipt) == 1 then
      local _, rank, place, id = of_receipt(receipt)
      enqueue(box, id, rank, place, 0)
    end
  end
end

-- Take back the claims of a claimant that were made after `known`: their answer never reached it.
local function unclaim_unheard(box, claimant, known)
  local unheard = {}
  each_lease(box, function(receipt)
    local claimed, _, _, _, holder = of_receipt(receipt)
    if holder == claimant and tonumber(claimed) > known then
      unheard[#unheard + 1] = receipt
    end
  end)
  unclaim(box, unheard)
  return #unheard
end

local function give_back(box, receipt, delay, charged, front, history)
  local claimed, rank, place, id = take(box, receipt)
  if not claimed then
    return 0
  end
  if delay > 0 then
    know_due(box)
  end
  came_back(box, id, claimed, charged)
  if history ~= '' then
    redis.call('HSET', box.more, 'h' .. id, history)
  end
  enqueue(box, id, rank, front and place or nil, delay)
  return 1
end

local function extend(box, receipt, timeout)
  if not held(box, receipt) then
    return 0
  end
  go_on_when_full(box)
  redis.call('ZADD', box.leases, 'XX', 'GT', now + timeout, receipt)
  return 1
end

local function save_checkpoint(box, receipt, state)
  if not held(box, receipt) then
    return 0
  end
  local _, _, _, id = of_receipt(receipt)
  go_on_when_full(box)
  redis.call('HSET', box.more, 'c' .. id, state)
  return 1
end

-- End a message by its id: 0 none such, 1 it waited, 2 it was in flight; and its value.
local function cancel(box, id)
  sweep(box)
  local waited, value = end_message(box, id)
  if not value then
    return { 0, '' }
  end
  if not waited then -- in flight
    redis.call('SPUBLISH', box.base .. 'all', 'x' .. id)
  end
  return { waited and 1 or 2, value }
end
