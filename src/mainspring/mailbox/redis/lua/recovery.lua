-- Recovery from a key that was deleted, or that the server evicted: records that no index entry points at are
-- pending again, index entries and notes without a record are dropped.
--
-- All processes of the mailbox ask for it now and then; the state tells when it is next due ("recovery": an instant, a number
-- and a cursor), so that only one of them does it. As a rule that is to compare how many records and index entries there are.
-- Where they differ, and once a day, all keys are gone through, some entries at a time. The notes come first: then the
-- difference is that of records which nothing points at.

local SOME = 100 -- entries of one step
local MUCH = 1000000 -- bytes of one step, by the size of a record at random: all of them are copied
local PAUSE = 50000 -- between two steps

-- The ids of the messages in flight, and how many leases have no record: those end by themselves.
local function in_flight(box)
  local ids, without = {}, 0
  each_lease(box, function(receipt)
    local _, _, _, id = of_receipt(receipt)
    if id and redis.call('HEXISTS', box.messages, id) == 1 then
      ids[id] = true
    else
      without = without + 1
    end
  end)
  return ids, without
end

-- Make those of the messages pending that are neither pending nor delayed nor in flight. How many that were.
local function restore(box, found)
  local ids, spots, late = {}, {}, {}
  for i = 1, #found, 2 do
    ids[#ids + 1] = found[i]
  end
  local moved, about = redis.call('HMGET', box.more, unpack(fields('p', ids))), limits.list_again(box, ids)
  for i, id in ipairs(ids) do
    local place, rank = of_head(found[2 * i])
    spots[i], late[i] = (moved[i] or place) .. id, rank .. '.' .. id
  end
  local pending = redis.call('ZMSCORE', box.ready, unpack(spots))
  local delayed = redis.call('ZMSCORE', box.delayed, unpack(late))
  local keys = redis.call('HMGET', box.more, unpack(fields('k', ids)))
  local held, lost
  local count = 0
  for i, id in ipairs(ids) do
    if keys[i] then
      redis.call('HSETNX', box.dedup, keys[i], id)
    end
    if not pending[i] and not delayed[i] and not (about[i] and limits.find(box, id, about[i], string.sub(spots[i], 1, 16))) then
      if not held then
        local without
        held, without = in_flight(box)
        lost = redis.call('HLEN', box.messages) - waiting(box) + without
      end
      if not held[id] and count < lost then -- else it has an index entry with another place, which `more` has lost
        local place, rank = of_head(found[2 * i])
        place = moved[i] or place
        enqueue(box, id, rank, string.len(place) == 16 and place or nil, 0, 'moved')
        count = count + 1
      end
    end
  end
  return count
end

-- Delete the entries of a key whose records are gone; how many that were. `id_of` an entry of it; nil: it is no entry.
local function delete_without_record(found, remove, key, records, id_of)
  local gone = {}
  for i = 1, #found, 2 do
    local id = id_of(found[i], found[i + 1])
    if not id or redis.call('HEXISTS', records, id) == 0 then
      gone[#gone + 1] = found[i]
    end
  end
  bulk(remove, key, gone)
  return #gone
end

-- The same for an index, which should have had none.
local function drop_without_record(box, ...)
  box.dropped = box.dropped + delete_without_record(...)
  return 0
end

-- Dead letters that an index has lost are put back there, in `dead_order` at its end; living messages are no dead letters.
local function restore_dead(box, found)
  local count = 0
  for i = 1, #found, 2 do
    local id = found[i]
    local number = redis.call('ZSCORE', box.dead_order, id)
    if not number and redis.call('HEXISTS', box.messages, id) == 1 then
      delete_dead(box, id)
    else
      if not number then
        number = next_seq(box, 1)
        redis.call('ZADD', box.dead_order, number, id)
        count = count + 1
      end
      list_by_task(box, id, number)
    end
  end
  return count
end

-- Records that an index has lost are put back there.
local function restore_records(box, found)
  for i = 1, #found, 2 do
    local ends = string.match(found[i + 1], '^%d+|(%d*)|')
    redis.call('ZADD', box.record_names, 0, found[i])
    if ends and ends ~= '' then
      redis.call('ZADD', box.record_ends, ends, found[i])
    end
  end
  return 0
end

local PARTS = {
  { 'ZSCAN', 'ready', function(box, found)
    return drop_without_record(box, found, 'ZREM', box.ready, box.messages, function(spot)
      return string.sub(spot, 17)
    end)
  end },
  { 'ZSCAN', 'delayed', function(box, found)
    return drop_without_record(box, found, 'ZREM', box.delayed, box.messages, function(spot)
      return string.match(spot, '^%-?%d+%.(.*)$')
    end)
  end },
  { 'HSCAN', 'dedup', function(box, found)
    return drop_without_record(box, found, 'HDEL', box.dedup, box.messages, function(_, id)
      return id
    end)
  end },
  { 'HSCAN', 'more', function(box, found)
    return drop_without_record(box, limits.lose(box, found), 'HDEL', box.more, box.messages, function(field)
      return string.sub(field, 2)
    end)
  end },
  { 'ZSCAN', 'waits', function(box, found)
    return drop_without_record(box, found, 'ZREM', box.waits, box.messages, limits.waiting_id)
  end },
  { 'ZSCAN', 'listed', function(box, found)
    delete_without_record(found, 'ZREM', box.listed, box.more, limits.listed_field)
    return 0
  end },
  { 'HSCAN', 'limiters', limits.mend },
  { 'ZSCAN', 'dead_order', function(box, found)
    return drop_without_record(box, found, 'ZREM', box.dead_order, box.dead, function(id)
      return id
    end)
  end },
  { 'ZSCAN', 'dead_tasks', function(box, found)
    delete_without_record(found, 'ZREM', box.dead_tasks, box.dead_order, limits.dead_id)
    return 0
  end },
  { 'HSCAN', 'messages', restore },
  { 'HSCAN', 'dead', restore_dead },
  { 'ZSCAN', 'record_names', function(box, found)
    return drop_without_record(box, found, 'ZREM', box.record_names, box.records, function(name)
      return name
    end)
  end },
  { 'ZSCAN', 'record_ends', function(box, found)
    return drop_without_record(box, found, 'ZREM', box.record_ends, box.records, function(name)
      return name
    end)
  end },
  { 'HSCAN', 'records', restore_records },
  { 'HSCAN', 'bodies', function(box, found)
    delete_without_record(found, 'HDEL', box.bodies, box.messages, function(id)
      return id
    end)
    return 0
  end },
}

local function step_of(box, scan, key)
  if scan == 'ZSCAN' then
    return SOME
  end
  local field = redis.call('HRANDFIELD', box[key])
  local size = field and redis.call('HSTRLEN', box[key], field) or 0
  return math.max(1, math.min(SOME, math.floor(MUCH / (size + 1))))
end

local function is_whole(box)
  local messages = redis.call('HLEN', box.messages)
  return messages == waiting(box) and redis.call('HLEN', box.dead) == redis.call('ZCARD', box.dead_order)
    and redis.call('HLEN', box.bodies) <= messages and (has_more(box) or redis.call('ZCARD', box.listed) == 0)
    and redis.call('HLEN', box.records) == redis.call('ZCARD', box.record_names)
end

-- Do what is due of it; how many messages and dead letters have been found again, and in how many microseconds to come again.
-- `every` microseconds it is looked whether there is anything to mend.
local function recover(box, every)
  local known = redis.call('HMGET', box.state, 'recovery', 'recovered')
  local due, part, cursor = string.match(known[1] or '', '^(%d+) (%d+) (%d+)$')
  due, part = tonumber(due), tonumber(part)
  if due and due > now and due - now <= math.max(every, PAUSE) then
    return { 0, due - now }
  end
  local last = tonumber(known[2] or nil)
  if not PARTS[part] then
    if is_whole(box) and (not last or now - last < DAY) then
      redis.call('HSET', box.state, 'recovery', text(now + every) .. ' 0 0', 'recovered', text(last or now))
      return { 0, every }
    end
    part, cursor = 1, '0'
  end
  verify(box)
  local found, seen = 0, 0
  while PARTS[part] and seen < SOME do
    local scan, key, mend = unpack(PARTS[part])
    local step = step_of(box, scan, key)
    local scanned = redis.call(scan, box[key], cursor, 'COUNT', step)
    if #scanned[2] > 0 then
      found = found + mend(box, scanned[2])
    end
    cursor, seen = scanned[1], seen + #scanned[2] / 2 * SOME / step
    if cursor == '0' then
      part = part + 1
    end
  end
  local pause = PARTS[part] and PAUSE or every
  redis.call('HSET', box.state, 'recovery', text(now + pause) .. ' ' .. part .. ' ' .. cursor)
  if not PARTS[part] then
    redis.call('HSET', box.state, 'recovered', text(now))
  end
  return { found, pause }
end
