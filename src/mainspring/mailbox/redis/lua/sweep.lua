-- What time brings: leases that end, delays that are over, messages that expire.

local function end_leases(box)
  local ended = redis.call('ZRANGE', box.leases, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  if #ended == 0 then
    return
  end
  for _, receipt in ipairs(ended) do
    local claimed, rank, _, id = of_receipt(receipt)
    if claimed then
      count_delivery(box, id, claimed, 1) -- the handler may have died of it
      enqueue(box, id, rank, nil, 0, 'retry')
    else
      box.dropped = box.dropped + 1
    end
    redis.call('ZREM', box.leases, receipt)
  end
end

local function end_delays(box)
  local over = redis.call('ZRANGE', box.delayed, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  if #over == 0 then
    return
  end
  for _, member in ipairs(over) do
    local rank, id = string.match(member, '^(%-?%d+)%.(.*)$')
    if id then
      enqueue(box, id, rank, nil, 0)
    else
      box.dropped = box.dropped + 1
    end
    redis.call('ZREM', box.delayed, member)
  end
end

-- Where a message waits, as key and member of the index; nil where it is in flight. Before that, its value.
local function find_waiting(box, id)
  local value = redis.call('HGET', box.messages, id)
  if not value then
    return nil
  end
  local place, rank = of_head(value)
  local moved, about = unpack(redis.call('HMGET', box.more, 'p' .. id, 't' .. id))
  local spot = (moved or place) .. id
  if redis.call('ZSCORE', box.ready, spot) then
    return value, box.ready, spot
  end
  local waits = about and limits.find(box, id, about, moved or place)
  if waits then
    return value, box.waits, waits
  end
  spot = rank .. '.' .. id
  if redis.call('ZSCORE', box.delayed, spot) then
    return value, box.delayed, spot
  end
  return value
end

local function expire_one(box, id, at)
  local value, key, spot = find_waiting(box, id)
  if spot then
    dead_letter(box, id, nil, nil, nil, tonumber(at), key ~= box.delayed)
    redis.call('ZREM', key, spot)
  elseif value then
    redis.call('HSET', box.more, 'l' .. id, at)
  end
  redis.call('ZREM', box.expiry, id)
end

local function expire(box)
  local over = redis.call('ZRANGE', box.expiry, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE, 'WITHSCORES')
  for i = 1, #over, 2 do
    if string.byte(over[i]) == 0 then
      limits.open(box, over[i])
    else
      expire_one(box, over[i], over[i + 1])
    end
  end
end

-- Do what is due, at most AT_ONCE of each kind; whether there is more. Expiries first: what expired is not to be claimed.
-- Only operations that would see the difference ask for it: a lease that has ended is refused by its time, swept or not.
local function sweep(box)
  if box.is_more_due == nil then
    local due = next_due(box)
    if due and due <= now then
      expire(box)
      end_leases(box)
      end_delays(box)
      due = next_due(box)
    end
    box.is_more_due = due ~= nil and due <= now
  end
  return box.is_more_due
end

-- The same; whether messages that have expired are left, which are not to be claimed.
local function sweep_expired(box)
  if not sweep(box) then
    return false
  end
  for _, id in ipairs(redis.call('ZRANGE', box.expiry, '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
    if string.byte(id) ~= 0 then
      return true
    end
  end
  return false
end
