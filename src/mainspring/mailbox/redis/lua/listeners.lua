-- How a message that comes alone gets to a receive that waits: it is claimed for the process that has waited longest, and
-- pushed to it in the same step, so that it need not claim.

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

-- Publish a word on a channel. Return whether it was received; false also if the user may not publish there.
local function publish(box, name, word)
  local receivers = redis.pcall('SPUBLISH', box.channels .. name, word)
  return type(receivers) == 'number' and receivers > 0
end

-- Put a waiter on the list, if it is not there. `no_waiters`: the list was found empty in this call.
local function list_waiter(box, waiter)
  redis.call('ZADD', box.waiters, 'NX', now, waiter)
  box.no_waiters = false
end

-- Take the waiter that has waited longest off the list: its entry, the name of its channel, and how long a lease it wants;
-- nil: there is none.
local function next_waiter(box)
  local popped = redis.call('ZPOPMIN', box.waiters)
  if not popped[1] then
    box.no_waiters = true
    return nil
  end
  return popped, string.match(popped[1], '^(%w+)%.(%d+)$')
end

-- Push a message to the waiter that it was claimed for. Return whether it was received.
local function push(box, name, visible, receipt, value, extras)
  local strings, size = { visible, receipt, value }, string.len(value)
  for i = 2, #extras, 3 do
    strings[#strings + 1] = extras[i]
    strings[#strings + 1] = extras[i + 1]
    size = size + string.len(extras[i + 1])
  end
  if size > MOST_PUSHED then -- before all of it is copied
    return false
  end
  if not publish(box, name, 'm' .. written(strings)) then
    return false -- the listener is gone; claims that were pushed to it before are still to be undone
  end
  redis.pcall('HSET', box.state, 'g' .. name, text(box.tick))
  return true
end

-- Push a new message that no other precedes. If that is not possible, nothing has changed.
local function push_new(box, spot, rank, value)
  local who, name, visible = next_waiter(box)
  if not who then
    return false
  end
  if name and redis.call('ZCARD', box.ready) == 0 then
    local tick = last_tick(box)
    if box.is_limited and limits.room(box) < 1 then
      redis.call('ZADD', box.waiters, who[2], who[1])
      return false
    end
    box.tick = math.max(tick + 1, now)
    local receipt = text(box.tick) .. '.' .. rank .. '.' .. name .. '.' .. spot
    redis.call('ZADD', box.leases, text(now + visible), receipt)
    if push(box, name, visible, receipt, value, {}) then
      due_at(box, now + visible)
      return true
    end
    redis.call('ZREM', box.leases, receipt)
    box.tick = tick
  end
  redis.call('ZADD', box.waiters, who[2], who[1])
  return false
end
