-- Records: small values under a kind and a key, beside the messages. store.lua says how they are kept.
--
-- A record counts as gone from the instant of its end. Each write removes a few that have ended, each sweep of the mailbox many.

local ENDED_AT_ONCE = 10 -- records that have ended, of one write
local MOST_READ = 1000000 -- bytes of one answer, beyond which no further record is read: all of them are copied

-- The version of a record as it is stored; nil: there is none, or it has ended.
local function version_of(stored)
  local version, ends = string.match(stored or '', '^(%d+)|(%d*)|')
  if not version or ends ~= '' and tonumber(ends) <= now then
    return nil
  end
  return version
end

local function delete_records(box, names)
  bulk('ZREM', box.record_names, names)
  bulk('HDEL', box.records, names)
  bulk('ZREM', box.record_ends, names)
end

-- Remove records that have ended, at most `most`. Return whether there may be more.
local function remove_ended(box, most)
  local ended = redis.call('ZRANGE', box.record_ends, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
  delete_records(box, ended)
  return #ended == most
end

-- Store a record for `life` microseconds (0: for good), or delete it (value nil). Its version; 0: it is deleted.
local function put_record(box, name, value, life)
  pcall(remove_ended, box, ENDED_AT_ONCE)
  if not value then
    delete_records(box, { name })
    return 0
  end
  box.tick = math.max(last_tick(box) + 1, now)
  local ends = life > 0 and text(now + life) or ''
  redis.call('HSET', box.records, name, text(box.tick) .. '|' .. ends .. '|' .. value)
  redis.call('ZADD', box.record_names, 0, name)
  if ends ~= '' then
    redis.call('ZADD', box.record_ends, ends, name)
  else
    redis.call('ZREM', box.record_ends, name)
  end
  return box.tick
end

-- Whether `groups` of messages (see write_record) have room where no more than `capacity` may wait; else how many do, and
-- how many are new.
local function has_room(box, capacity, groups)
  local there, new, seen = waiting(box), 0, {}
  for _, group in ipairs(groups) do
    new = new + how_many_new(box, group.from, group.count, group.parts, seen)
  end
  return new == 0 or there + new <= capacity, there, new
end

-- Change a record (see put_record) if `version` is there ('0': if there is none; '': in any case), and send `groups` of messages
-- with it. What the writer is told: its version; none if another one is there.
local function write_record(box, name, version, value, life, capacity, groups)
  if version ~= '' and version ~= (version_of(redis.call('HGET', box.records, name)) or '0') then
    return {}
  end
  if full and (value or #groups > 0) then
    return { 'oom' }
  end
  if #groups > 0 then
    verify(box)
    sweep(box)
    local fits, there, new = true, 0, 0
    if capacity >= 0 then
      fits, there, new = has_room(box, capacity, groups)
    end
    if not fits then
      return sweep(box) and { 'again' } or { 'full', there, new }
    end
  end
  for _, group in ipairs(groups) do
    send(box, group.from, group.count, group.rank, group.delay, group.life, group.parts, {})
  end
  return { put_record(box, name, value, life) }
end

-- The records of these names, each behind its name, as far as one answer takes them; and how many names were looked up.
local function read_records(box, names)
  local found, size, looked_up = {}, 0, 0
  for _, name in ipairs(names) do
    if size > MOST_READ then
      break
    end
    looked_up = looked_up + 1
    local stored = redis.call('HGET', box.records, name)
    if version_of(stored) then
      found[#found + 1] = name
      found[#found + 1] = stored
      size = size + string.len(stored)
    end
  end
  return looked_up, found
end

-- Up to `limit` records whose names are in a range. Before them, the last name that was looked up, if there may be more.
local function list_records(box, from, to, limit)
  if remove_ended(box, AT_ONCE) then
    return -1
  end
  local names = redis.call('ZRANGE', box.record_names, from, to, 'BYLEX', 'LIMIT', 0, limit)
  local looked_up, found = read_records(box, names)
  return { (looked_up < #names or #names == limit) and names[looked_up] or '', found }
end
