-- Dead letters, counts, purge.

local function read_dead(box, ids)
  local found = {}
  for _, id in ipairs(ids) do
    local value = redis.call('HGET', box.dead, id)
    if value then
      local record = redis.call('HMGET', box.dead_details, 'm' .. id, 'w' .. id, 'c' .. id, 'h' .. id)
      found[#found + 1] = { id, value, record[1] or '', record[2] or '', record[3], record[4] }
    end
  end
  return found
end

-- Leave out ids whose record was deleted by hand.
local function with_record(box, ids)
  local there, gone = {}, {}
  for _, id in ipairs(ids) do
    local list = redis.call('HEXISTS', box.dead, id) == 1 and there or gone
    list[#list + 1] = id
  end
  bulk('ZREM', box.dead_order, gone)
  box.dropped = box.dropped + #gone
  return there, #gone
end

-- Put a dead letter into the index by task. One of an earlier version has its task in its body alone, if it is a call. Return how
-- many bytes were read.
local function list_by_task(box, id, number)
  local about, size = redis.call('HGET', box.dead_details, 't' .. id), 0
  if not about then
    local value = redis.call('HGET', box.dead, id) or ''
    local head, call = '^(%d+)|(%d+)|(%-?%d+)|', '{"task":"([%w_.:/-]+)","args":'
    local place, sent, rank, task = string.match(value, head .. '%-' .. call)
    if not task then
      place, sent, rank, task = string.match(value, head .. '%+[^\n]*\n' .. call)
    end
    size = string.len(value)
    if task then
      about = limits.about_call(rank, place, sent, task)
      redis.call('HSET', box.dead_details, 't' .. id, about)
    end
  end
  if about then
    redis.call('ZADD', box.dead_tasks, 0, limits.task_written(about) .. place_of(number) .. id)
  end
  return size
end

-- The same for entries of `dead_tasks`.
local function with_record_of_task(box, members)
  local there, gone = {}, {}
  for _, member in ipairs(members) do
    local id = limits.dead_id(member)
    if redis.call('HEXISTS', box.dead, id) == 1 then
      there[#there + 1] = id
    else
      gone[#gone + 1] = member
    end
  end
  bulk('ZREM', box.dead_tasks, gone)
  return there, #gone
end

-- A page of the dead letters of a task, as it is written.
local function list_dead_of(box, limit, after, task)
  local number = after ~= '' and redis.call('ZSCORE', box.dead_order, after)
  local from = number and '(' .. task .. place_of(number) .. after or '[' .. task
  local ids, gone
  repeat
    ids, gone = with_record_of_task(box,
      redis.call('ZRANGE', box.dead_tasks, from, '(' .. task .. ':', 'BYLEX', 'LIMIT', 0, limit))
  until gone == 0
  return read_dead(box, ids)
end

local function list_dead(box, limit, after)
  local from = 0
  if after ~= '' then
    local rank = redis.call('ZRANK', box.dead_order, after)
    from = rank and rank + 1 or 0
  end
  local ids, gone
  repeat
    ids, gone = with_record(box, redis.call('ZRANGE', box.dead_order, from, from + limit - 1))
  until gone == 0
  return read_dead(box, ids)
end

-- The ids from ARGV[from] on that are dead letters, oldest first; with no count, the `most` oldest of all.
local function find_dead(box, from, count, most)
  if count < 0 then
    return (with_record(box, redis.call('ZRANGE', box.dead_order, 0, most - 1)))
  end
  local given = {}
  local seen = {}
  for i = from, from + count - 1 do
    local place = tonumber(redis.call('ZSCORE', box.dead_order, ARGV[i]) or nil)
    if place and not seen[ARGV[i]] then
      seen[ARGV[i]] = true
      given[#given + 1] = { place, ARGV[i] }
    end
  end
  table.sort(given, function(a, b) return a[1] < b[1] end)
  local ids = {}
  for i, found in ipairs(given) do
    ids[i] = found[2]
  end
  return (with_record(box, ids))
end

local function replay_dead(box, ids)
  for _, id in ipairs(ids) do
    local value = redis.call('HGET', box.dead, id)
    local place, rank = of_head(value)
    local tail = string.sub(value, string.len(place) + 1)
    place = new_place(box)
    local kept = redis.call('HMGET', box.dead_details, 'c' .. id, 'k' .. id, 't' .. id)
    local entry = kept[3] and limits.replayed(box, id, kept[3], place)
    place = entry and entry.place or place
    redis.call('HSET', box.messages, id, place .. tail)
    if entry then
      limits.add(box, { entry })
    end
    if not (entry and limits.due_again(box, entry, place)) then
      redis.call('ZADD', box.ready, rank, place .. id)
      box.added = box.added + 1
    end
    if kept[1] then
      redis.call('HSET', box.more, 'c' .. id, kept[1])
    end
    if kept[2] and redis.call('HSETNX', box.dedup, kept[2], id) == 1 then -- else another message has it by now
      redis.call('HSET', box.more, 'k' .. id, kept[2])
    end
    delete_dead(box, id)
  end
  return #ids
end

local function purge_dead(box, ids)
  for _, id in ipairs(ids) do
    limits.purged_dead(box, id)
    delete_dead(box, id)
  end
  box.settled = box.settled + #ids
  return #ids
end

-- How long ago the oldest of the first in line was sent, one for each rank; 0: no message is pending.
local function queue_age(box)
  local oldest = now
  local first = redis.call('ZRANGE', box.ready, 0, 0, 'WITHSCORES')
  while first[1] do
    local value = redis.call('HGET', box.messages, string.sub(first[1], 17))
    local sent = value and tonumber(string.match(value, '^%d+|(%d+)|'))
    oldest = math.min(oldest, sent or now)
    first = redis.call('ZRANGE', box.ready, '(' .. first[2], '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
  end
  return now - oldest
end

local function counts(box)
  local pending = redis.call('ZCARD', box.ready) + redis.call('ZCARD', box.waits)
  return { redis.call('ZCARD', box.delayed), pending, redis.call('ZCARD', box.leases),
    (tonumber(redis.call('HGET', box.state, 'settled') or nil) or 0) + box.settled, redis.call('ZCARD', box.dead_order),
    queue_age(box) }
end

local function purge(box)
  local dropped = waiting(box)
  redis.call('UNLINK', box.messages, box.ready, box.delayed, box.leases, box.more, box.dedup, box.expiry, box.bodies,
    box.waits, box.listed)
  limits.clear(box)
  box.settled = box.settled + dropped
  return dropped
end
