-- How a message that comes alone gets to who waits: it is claimed for the one that has waited longest, and sent to it in the
-- same step, so that it need not come and ask.

-- Strings as the protocol writes a list of them, so that its parser reads them.
local function written(strings)
  local lines = { '*' .. #strings }
  for _, one in ipairs(strings) do
    lines[#lines + 1] = '$' .. string.len(one)
    lines[#lines + 1] = one
  end
  lines[#lines + 1] = ''
  return table.concat(lines, '\r\n')
end

-- Send a word on a channel. Whether it was received; who may not send there reaches nobody.
local function tell(box, name, word)
  local heard = redis.pcall('SPUBLISH', box.base .. name, word)
  return type(heard) == 'number' and heard > 0
end

-- Put one that waits on the list, if it is not there. `nobody`: the list was found empty in this call.
local function list_waiter(box, waiter)
  redis.call('ZADD', box.waiters, 'NX', now, waiter)
  box.nobody = false
end

-- Take the one that has waited longest off the list: what the list has of it, the name of its channel, and how long a lease
-- it wants; nil: nobody waits.
local function next_waiter(box)
  local popped = redis.call('ZPOPMIN', box.waiters)
  if not popped[1] then
    box.nobody = true
    return nil
  end
  return popped, string.match(popped[1], '^(%w+)%.(%d+)$')
end

-- Send a message to the one that it has been claimed for. Whether it was received.
local function hand(box, name, visible, receipt, value, extras)
  local strings, size = { visible, receipt, value }, string.len(value)
  for i = 2, #extras, 3 do
    strings[#strings + 1] = extras[i]
    strings[#strings + 1] = extras[i + 1]
    size = size + string.len(extras[i + 1])
  end
  if size > HANDED then -- before all of it is copied
    return false
  end
  if not tell(box, name, 'm' .. written(strings)) then
    return false -- nobody listens as that any more; what was sent there before is still to go back
  end
  local last = #box.handed
  box.handed[last + 1], box.handed[last + 2] = 'g' .. name, text(box.tick)
  return true
end

-- Hand a new message over that has not waited, where none waits before it. If that is not possible, nothing has changed.
local function hand_new(box, spot, rank, value)
  local who, name, visible = next_waiter(box)
  if not who then
    return false
  end
  if name and redis.call('ZCARD', box.ready) == 0 then
    local tick = box.tick
    box.tick = math.max(tick + 1, now)
    local receipt = text(box.tick) .. '.' .. rank .. '.' .. name .. '.' .. spot
    redis.call('ZADD', box.leases, text(now + visible), receipt)
    if hand(box, name, visible, receipt, value, {}) then
      due_at(box, now + visible)
      return true
    end
    redis.call('ZREM', box.leases, receipt)
    box.tick = tick
  end
  redis.call('ZADD', box.waiters, who[2], who[1])
  return false
end
