-- Whether all commands of the functions can succeed on a mailbox: its keys are of their types, and the user may use them.

local USED = {
  { 'hash', 'messages', 'HDEL HEXISTS HGET HLEN HMGET HRANDFIELD HSCAN HSET HSTRLEN' },
  { 'zset', 'ready', 'ZADD ZCARD ZMSCORE ZRANGE ZREM ZREMRANGEBYRANK ZSCAN ZSCORE' },
  { 'zset', 'delayed', 'ZADD ZCARD ZMSCORE ZRANGE ZREM ZSCAN ZSCORE' },
  { 'zset', 'leases', 'ZADD ZCARD ZMSCORE ZRANGE ZREM ZSCAN ZSCORE' },
  { 'hash', 'state', 'EXISTS HDEL HGET HGETALL HINCRBY HMGET HSET HSETNX PTTL' },
  { 'hash', 'more', 'HDEL HGET HLEN HMGET HRANDFIELD HSCAN HSET HSTRLEN' },
  { 'hash', 'dedup', 'HDEL HEXISTS HGET HRANDFIELD HSCAN HSET HSETNX HSTRLEN' },
  { 'zset', 'expiry', 'ZADD ZCARD ZRANGE ZREM ZSCORE' },
  { 'hash', 'dead', 'HDEL HEXISTS HGET HLEN HRANDFIELD HSCAN HSET HSTRLEN' },
  { 'zset', 'dead_order', 'ZADD ZCARD ZRANGE ZRANK ZREM ZSCAN ZSCORE' },
  { 'zset', 'dead_tasks', 'ZADD ZRANGE ZREM ZSCAN' },
  { 'hash', 'dead_details', 'HDEL HGET HMGET HSCAN HSET' },
  { 'hash', 'records', 'HDEL HEXISTS HGET HLEN HRANDFIELD HSCAN HSET HSTRLEN' },
  { 'zset', 'record_names', 'ZADD ZCARD ZRANGE ZREM ZSCAN' },
  { 'zset', 'record_ends', 'ZADD ZRANGE ZREM ZSCAN' },
  { 'zset', 'waiters', 'ZADD ZCARD ZPOPMIN ZREM ZSCORE' },
  { 'hash', 'limiters', 'HDEL HGET HLEN HMGET HRANDFIELD HSCAN HSET HSTRLEN' },
  { 'zset', 'waits', 'ZADD ZCARD ZLEXCOUNT ZMSCORE ZRANGE ZREM ZSCAN ZSCORE' },
  { 'zset', 'listed', 'ZADD ZCARD ZLEXCOUNT ZRANGE ZREM ZSCAN' },
  { 'hash', 'bodies', 'HDEL HEXISTS HGET HLEN HMGET HRANDFIELD HSCAN HSET HSTRLEN' },
}

local ALL_KEYS = { EXISTS = true, UNLINK = true } -- each argument of theirs is a key

-- What stands in the way: commands that the user may not use, and keys of another type.
local function obstacles(box)
  local found, refused = {}, {}
  for _, used in ipairs(USED) do
    local kind, key = used[1], box[used[2]]
    local commands = key and used[3] .. ' PEXPIRE UNLINK' or '' -- nil: a key that the call does not need
    for command in string.gmatch(commands, '%u+') do
      local more = ALL_KEYS[command] and {} or { '0', '0' }
      if not refused[command] and not redis.acl_check_cmd(command, key, unpack(more)) then
        refused[command] = true
        found[#found + 1] = 'may not use ' .. command .. ' on ' .. key
      end
    end
    local there = key and redis.pcall('TYPE', key) or { ok = 'none' }
    if there.err then
      found[#found + 1] = 'may not use TYPE on ' .. key
    elseif there.ok ~= kind and there.ok ~= 'none' then
      found[#found + 1] = 'cannot use ' .. key .. ', which is a ' .. there.ok .. ' and no ' .. kind
    end
  end
  if not redis.acl_check_cmd('TIME') then
    found[#found + 1] = 'may not use TIME'
  end
  local channel = box.channels .. 'all'
  for command, more in pairs({ SPUBLISH = { '' }, SSUBSCRIBE = {} }) do
    if not redis.acl_check_cmd(command, channel, unpack(more)) then
      found[#found + 1] = 'may not use ' .. command .. ' on ' .. channel
    end
  end
  return found
end

-- Raise an error where something stands in the way; to be called before the first write.
local function verify(box)
  if not box.verified then
    local found = obstacles(box)
    if found[1] then
      error({ err = 'NOPERM the user ' .. table.concat(found, ', ') }, 0)
    end
    box.verified = true
  end
end
