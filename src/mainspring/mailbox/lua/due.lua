-- What time brings: leases that end, delays that are over, messages that expire.

local function end_leases(box)
  local ended = redis.call('ZRANGE', box.leases, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  if #ended == 0 then
    return
  end
  redis.call('ZREM', box.leases, unpack(ended))
  for _, receipt in ipairs(ended) do
    local claimed, rank, _, id = of_receipt(receipt)
    came_back(box, id, claimed, 1) -- whoever held it may have died of it
    enqueue(box, id, rank, nil, 0)
  end
end

local function end_delays(box)
  local over = redis.call('ZRANGE', box.delayed, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  if #over == 0 then
    return
  end
  redis.call('ZREM', box.delayed, unpack(over))
  for _, member in ipairs(over) do
    local rank, id = string.match(member, '^(%-?%d+)%.(.*)$')
    enqueue(box, id, rank, nil, 0)
  end
end

-- Take a message from where it waits; false where somebody holds it. Also its value.
local function take_waiting(box, id)
  local value = redis.call('HGET', box.messages, id)
  if not value then
    return false, nil
  end
  local place, rank = of_head(value)
  place = redis.call('HGET', box.more, 'p' .. id) or place
  local taken = redis.call('ZREM', box.ready, place .. id) == 1
    or redis.call('ZREM', box.delayed, rank .. '.' .. id) == 1
  return taken, value
end

local function expire_one(box, id, at)
  redis.call('ZREM', box.expiry, id)
  local waited, value = take_waiting(box, id)
  if waited then
    bury(box, id, nil, nil, nil, tonumber(at))
  elseif value then
    redis.call('HSET', box.more, 'l' .. id, at)
  end
end

local function expire(box)
  local over = redis.call('ZRANGE', box.expiry, '-inf', now, 'BYSCORE', 'LIMIT', 0, AT_ONCE, 'WITHSCORES')
  for i = 1, #over, 2 do
    expire_one(box, over[i], over[i + 1])
  end
end

-- Do what is due, at most AT_ONCE of each kind; whether there is more. Expiries first: what expired is not to be claimed.
-- Only operations that would see the difference ask for it: a lease that has ended is refused by its time, swept or not.
local function sweep(box)
  if box.more_due == nil then
    local due = next_due(box)
    if due and due <= now then
      expire(box)
      end_leases(box)
      end_delays(box)
      due = next_due(box)
    end
    box.more_due = due ~= nil and due <= now
  end
  return box.more_due
end

-- The same; whether messages that have expired are left, which are not to be claimed.
local function sweep_expired(box)
  local ends = sweep(box) and earliest(box.expiry)
  return ends and ends <= now
end
