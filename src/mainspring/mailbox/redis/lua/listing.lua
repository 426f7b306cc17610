-- Lists of the unfinished messages in pages, and changes of one.
--
-- A list goes along a place: pending messages in the order of delivery, then those that wait at limiters, delayed ones as they are
-- due, those in flight as their leases end. If fewer messages are of the task or the key that is asked for, it goes along those, in
-- the order of their places.

local LOOKED_AT = 1000 -- messages of one page
local INDEXES = { pending = { 'ready', 'waits' }, delayed = { 'delayed' }, in_flight = { 'leases' } }

-- Whether text `a` comes before `b` in a sorted set: by bytes, whatever the server's locale.
local function comes_before(a, b)
  for i = 1, math.min(string.len(a), string.len(b)) do
    local one, other = string.byte(a, i), string.byte(b, i)
    if one ~= other then
      return one < other
    end
  end
  return string.len(a) < string.len(b)
end

-- The number of the first entry of a sorted set that comes behind `member` with its score, whether that is there or not.
local function number_behind(key, score, member)
  local low, high = 0, redis.call('ZCARD', key)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call('ZRANGE', key, middle, middle, 'WITHSCORES')
    local at = tonumber(found[2])
    if at < score or at == score and not comes_before(member, found[1]) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function id_at(index, member)
  if index == 'ready' then
    return string.sub(member, 17)
  elseif index == 'waits' then
    return limits.waiting_id(member)
  elseif index == 'delayed' then
    return string.match(member, '^%-?%d+%.(.*)$')
  end
  local _, _, _, id = of_receipt(member)
  return id
end

-- Add a message to a page, if it was sent at `since` or later, and is of `list`. How many bytes it has.
local function add_row(box, page, id, place, when, since, list)
  local value = redis.call('HGET', box.messages, id)
  local rank, sent
  if value then
    sent, rank = string.match(value, '^%d+|(%d+)|(%-?%d+)|')
    if (tonumber(sent) or 0) >= since then
      local known = redis.call('HMGET', box.more, 'b' .. id, 'c' .. id, 'h' .. id, 't' .. id)
      if list == '' or known[4] and limits.is_of(list, id, known[4]) then
        page[#page + 1] = { id, value, place, rank or '0', when, unpack(known, 1, 4) }
      end
    end
  end
  return value and string.len(value) or 0
end

-- A page of a list along a place.
local function list_all(box, place, limit, since, list, after)
  local indexes, page, looked_at, size = INDEXES[place], {}, 0, 0
  local at, score, member = string.match(after, '^(%d) (%S+) (.*)$')
  at, score = tonumber(at), tonumber(score)
  if not indexes[at] or not score then
    at, score = 1, nil
  end
  while indexes[at] do
    local index = indexes[at]
    local from = score and number_behind(box[index], score, member) or 0
    while true do
      local found = redis.call('ZRANGE', box[index], from, from + SOME - 1, 'WITHSCORES')
      for i = 1, #found, 2 do
        if #page == limit or looked_at == LOOKED_AT or size > MUCH then
          return page, table.concat({ at, string.format('%.17g', score or 0), member or '' }, ' ')
        end
        local id, when = id_at(index, found[i]), tonumber(found[i + 1])
        if id and index == 'leases' then
          when = tonumber((of_receipt(found[i])))
        end
        size = size + (id and add_row(box, page, id, place, when, since, list) or 0)
        looked_at, score, member = looked_at + 1, tonumber(found[i + 1]), found[i]
      end
      if #found < 2 * SOME then
        break
      end
      from = from + SOME
    end
    at, score, member = at + 1, nil, nil
  end
  return page, ''
end

-- Which of these messages are in a place, by their numbers; and when a delayed one is due.
local function are_in(box, ids, about, place)
  local spots, late = {}, {}
  local moved = redis.call('HMGET', box.more, unpack(fields('p', ids)))
  for i, id in ipairs(ids) do
    local rank, first = string.match(about[i] or '', '^%d (%-?%d+) (%d+) ')
    moved[i] = moved[i] or first or ''
    spots[i], late[i] = moved[i] .. id, (rank or '') .. '.' .. id
  end
  local ready = place ~= 'delayed' and redis.call('ZMSCORE', box.ready, unpack(spots)) or {}
  local delayed = place ~= 'pending' and redis.call('ZMSCORE', box.delayed, unpack(late)) or {}
  local found = {}
  for i, id in ipairs(ids) do
    local is_pending = place ~= 'delayed' and about[i] and (ready[i] or limits.find(box, id, about[i], moved[i]))
    if place == 'pending' then
      found[i] = is_pending and 0
    elseif place == 'delayed' then
      found[i] = tonumber(delayed[i] or nil)
    else
      found[i] = about[i] and not is_pending and not delayed[i] and 0
    end
  end
  return found
end

-- A page of a list along the messages of a task or a key.
local function list_some(box, place, limit, since, list, after)
  local from = string.sub(after, 1, string.len(list)) == list and '(' .. after or '[' .. list
  local members = redis.call('ZRANGE', box.listed, from, '(' .. list .. ':', 'BYLEX', 'LIMIT', 0, LOOKED_AT)
  if #members == 0 then
    return {}, ''
  end
  local ids, page, size, last = {}, {}, 0, after
  for i, member in ipairs(members) do
    ids[i] = string.sub(limits.listed_field(member), 2)
  end
  local about = redis.call('HMGET', box.more, unpack(fields('t', ids)))
  local whens = are_in(box, ids, about, place)
  for i, id in ipairs(ids) do
    if #page == limit or size > MUCH then
      return page, last
    end
    if whens[i] and tonumber(string.match(about[i], '^%d %-?%d+ %d+ (%d+)')) >= since then
      size = size + add_row(box, page, id, place, whens[i], since, '')
    end
    last = members[i]
  end
  return page, #members == LOOKED_AT and last or ''
end

-- Whether a list goes along its place. The next pages go the way of the first.
local function goes_along_place(box, place, list, after)
  if list == '' or string.find(after, '^%d ') then
    return true
  elseif string.sub(after, 1, string.len(list)) == list then
    return false
  end
  local there = 0
  for _, index in ipairs(INDEXES[place]) do
    there = there + redis.call('ZCARD', box[index])
  end
  return there <= redis.call('ZLEXCOUNT', box.listed, '[' .. list, '(' .. list .. ':')
end

-- Messages of a place that were sent at `since` or later: rows as `find` has them, with the id in the place of its number, and
-- where the next page begins ('': nowhere). `list`: the begin of their entries in `listed`; '': all messages.
local function list_messages(box, place, limit, since, list, after)
  local page, behind
  if goes_along_place(box, place, list, after) then
    page, behind = list_all(box, place, limit, since, list, after)
  else
    page, behind = list_some(box, place, limit, since, list, after)
    if place == 'in_flight' then
      tell_claims(box, page)
    end
  end
  return { page, behind }
end

-- Put the dead letters of an earlier version into the index by task, some at a time. Return whether all are there.
local function are_dead_indexed(box)
  local upto = redis.call('HGET', box.state, 'by_task')
  if upto == 'all' then
    return true
  end
  local found = redis.call('ZRANGE', box.dead_order, '(' .. (tonumber(upto or nil) or 0), '+inf', 'BYSCORE',
    'LIMIT', 0, LOOKED_AT, 'WITHSCORES')
  local size, last = 0, 0
  while last < #found and size <= MUCH do
    size, last = size + list_by_task(box, found[last + 1], found[last + 2]), last + 2
  end
  local is_end = last == #found and #found < 2 * LOOKED_AT
  redis.call('HSET', box.state, 'by_task', is_end and 'all' or found[last])
  return is_end
end

-- Let a message that waits have another body: 0 there is none such, 1 it is in flight, 2 it is done, 3 there is no memory.
local function replace_body(box, id, body)
  local value, _, spot = find_waiting(box, id)
  if not spot then
    return value and 1 or 0
  elseif full then
    return 3
  end
  verify(box)
  local head, rest = string.match(value, '^(%d+|%d+|%-?%d+|)(.*)$')
  if string.sub(rest, 1, 1) == '@' then
    redis.call('HSET', box.messages, id, head .. string.sub(rest, 2) .. body)
    redis.call('HDEL', box.bodies, id)
    return 2
  end
  local details = string.sub(rest, 1, 1) == '-' and '-' or string.match(rest, '^[^\n]*\n') or '-'
  redis.call('HSET', box.messages, id, head .. details .. body)
  return 2
end
