-- One batch. ARGV: operations, each a name and its arguments, all of which it reads before it does anything; the reply has one
-- result for each, then in how many microseconds the next thing is due (-1: nothing is, or it was not asked), when this was,
-- how many index entries without a record were dropped, and the number and the error of each that failed. KEYS: those of the mailbox, then
-- those of the mailboxes that replies go to, and of records.

local box, others -- the mailbox, and those that replies of this batch go to, by the numbers of keys before theirs
local asked -- whether the answer is to tell when the next thing is due
local at -- the next argument

local function next_argument()
  local value = ARGV[at]
  at = at + 1
  return value
end

local function next_number()
  return tonumber(next_argument())
end

local function next_list()
  local count = next_number()
  local list = {}
  for i = 1, count do
    list[i] = ARGV[at + i - 1]
  end
  at = at + count
  return list
end

-- Whether a transient mailbox does not exist (any more): what is sent to it is dropped, so that it does not come back.
local function is_missing(of)
  return of.is_transient and redis.call('EXISTS', of.state) == 0
end

-- A reply: where the keys of its mailbox begin, its rank, and where in ARGV it is; nil: there is none.
local function next_reply()
  local behind = next_number()
  if behind < 0 then
    return nil
  end
  local rank = next_argument()
  at = at + 2
  return behind, rank, at - 2
end

-- Messages of one kind, which a record's write sends.
local function next_group()
  local count, rank, delay, life = next_number(), next_argument(), next_number(), next_number()
  local parts = next_number()
  local from = at
  at = at + count * size_of(parts)
  return { from = from, count = count, rank = rank, delay = delay, life = life, parts = parts }
end

-- The mailbox whose keys begin behind that number of keys.
local function mailbox_at(behind)
  if behind == 0 then
    return box
  end
  others[behind] = others[behind] or box_of(behind)
  return others[behind]
end

local function send_reply(behind, rank, from)
  local to = mailbox_at(behind)
  if not is_missing(to) then
    send_one(to, ARGV[from], rank, ARGV[from + 1]) -- also without memory: what ends frees more than it takes
  end
end

-- Delete when a message was last pushed to listeners that are gone. After the longest lease no claim of theirs is left.
local function delete_old_listeners(of)
  local known = redis.call('HGETALL', of.state)
  for i = 1, #known, 2 do
    if string.sub(known[i], 1, 1) == 'g' and (tonumber(known[i + 1]) or 0) < now - LONGEST_LEASE then
      redis.call('HDEL', of.state, known[i])
    end
  end
end

-- For receives that wait: also for messages of a process that was stopped just as it was woken.
local function sweep_for(of, waiter)
  sweep(of)
  if waiter ~= '' then -- the server may have lost the list, as it may have lost all
    make_known(of)
    list_waiter(of, waiter)
  end
  if redis.call('ZCARD', of.ready) > 0 then
    of.added = of.added + 1
  end
end

-- Mend what is to be mended, if that is due: `every` is the pause between two recoveries; below 0: not now.
local function recover_every(of, every)
  return every < 0 and { 0, 0 } or recover(of, every)
end

-- Delete bodies that were stored for messages which have not been.
local function delete_unused_bodies(of, ids)
  for _, id in ipairs(ids) do
    if redis.call('HEXISTS', of.messages, id) == 0 then
      redis.call('HDEL', of.bodies, id)
    end
  end
end

-- What a sender is told, whose messages are stored (see send) if no more than `capacity` wait then; below 0: any number may.
local function send_within(of, capacity, from, count, rank, delay, expires, parts, large)
  if is_missing(of) then
    return {}
  end
  local has_keys = parts % 2 == 1
  if has_keys or capacity >= 0 then
    sweep(of)
  end
  if capacity >= 0 then
    local there, new = waiting(of), how_many_new(of, from, count, parts, {})
    if new > 0 and there + new > capacity then
      return sweep(of) and { 'again' } or { 'full', there, new }
    end
  end
  local ids = send(of, from, count, rank, delay, expires, parts, large)
  if not ids then
    return { 'oom' }
  end
  return has_keys and ids or {}
end

local operations = {
  send_one = function() -- without a delay, an expiry, a capacity and a dedup key
    local rank, id = next_argument(), next_argument()
    local value = next_argument()
    if full then
      return { 'oom' }
    end
    if not is_missing(box) then
      send_one(box, id, rank, value)
    end
    return {}
  end,
  send = function()
    local count, rank, delay, expires = next_number(), next_argument(), next_number(), next_number()
    local capacity, parts = next_number(), next_number()
    local from = at
    at = at + count * size_of(parts)
    local large = next_list()
    local done, result = pcall(send_within, box, capacity, from, count, rank, delay, expires, parts, large)
    pcall(delete_unused_bodies, box, large)
    if not done and result ~= NO_BODY then
      error(result, 0)
    end
    return done and result or { 'again' }
  end,
  claim = function()
    local limit, visible, claimant = next_number(), next_number(), next_argument()
    local waiter, more_wait = next_argument(), next_argument() == '1'
    if sweep_expired(box) then -- others want to be served before the rest of it is done
      return { {}, {}, {}, 1 }
    end
    pcall(limits.let_in, box)
    local found, is_cut = lease(box, limit, visible, claimant)
    local got = #found[1]
    if is_cut and got == 0 then
      return { {}, {}, {}, 1 }
    end
    if got < limit and not is_cut then
      box.added = 0 -- all that came has been taken
      asked = true
      box.waiter = waiter
    end
    if waiter ~= '' and (got == 0 or more_wait) then
      list_waiter(box, waiter)
      if got == limit or is_cut then -- what came while it was not on the list has woken no process
        box.added = math.max(box.added, redis.call('ZCARD', box.ready))
      end
    end
    if box.is_transient then -- the server may have lost it
      make_known(box)
    end
    return found
  end,
  ack = function()
    return acknowledge(box, next_list())
  end,
  open = function()
    local every, records = next_number(), next_number()
    with_records(box, records)
    make_known(box)
    delete_old_listeners(box)
    local done, mended = pcall(recover_every, box, every)
    return { {}, unpack(done and mended or { 0, 0 }) }
  end,
  reply = function()
    local receipt, behind, rank, from = next_argument(), next_reply()
    if not held(box, receipt) then
      return 0
    end
    if behind then
      send_reply(behind, rank, from)
    end
    acknowledge(box, { receipt })
    return 1
  end,
  reply_with_result = function() -- the same, and keep the result as a record
    local records, name, value, life = next_number(), next_argument(), next_argument(), next_number()
    local receipt, behind, rank, from = next_argument(), next_reply()
    if not held(box, receipt) then
      return 0
    end
    put_record(with_records(box, records), name, value, life) -- also without memory, as it comes for what ends
    if behind then
      send_reply(behind, rank, from)
    end
    acknowledge(box, { receipt })
    publish(box, 'results', 'r' .. id_of_receipt(receipt))
    return 1
  end,
  nack = function()
    local receipt, delay, charged = next_argument(), next_number(), next_number()
    local front = next_argument() == '1'
    return nack(box, receipt, delay, charged, front, next_argument())
  end,
  dead_letter = function()
    local receipt, why, history = next_argument(), next_argument(), next_argument()
    local behind, rank, from = next_reply()
    local claimed, _, _, id = held_lease(box, receipt)
    if not claimed then
      return 0
    end
    verify(box)
    if behind then
      send_reply(behind, rank, from)
    end
    dead_letter(box, id, why, claimed, history)
    redis.call('ZREM', box.leases, receipt)
    return 1
  end,
  extend = function()
    local receipt = next_argument()
    return extend(box, receipt, next_number())
  end,
  checkpoint = function()
    local receipt = next_argument()
    return save_checkpoint(box, receipt, next_argument())
  end,
  unclaim = function()
    unclaim(box, next_list())
    return 1
  end,
  undo_lost_claims = function()
    local claimant = next_argument()
    undo_lost_claims(box, claimant, next_number())
    return 1
  end,
  wake_others = function() -- the caller was woken for messages that it does not take
    box.added = box.added + next_number()
    return 1
  end,
  leave = function()
    local name, last_claim, for_good = next_argument(), next_number(), next_argument() == '1'
    local were_there = true
    for _, waiter in ipairs(next_list()) do
      were_there = redis.call('ZREM', box.waiters, waiter) == 1 and were_there
    end
    local last = tonumber(redis.call('HGET', box.state, 'g' .. name) or nil) or 0
    if last > last_claim then
      undo_lost_claims(box, name, last_claim)
    end
    if for_good then
      redis.call('HDEL', box.state, 'g' .. name)
    end
    if for_good or not were_there then -- it may have been woken for messages that others now have to be woken for
      box.added = math.max(box.added, redis.call('ZCARD', box.ready))
    end
    return last
  end,
  remove_waiters = function() -- no receive waits under these names; what was published to them still arrives
    for _, waiter in ipairs(next_list()) do
      redis.call('ZREM', box.waiters, waiter)
    end
    return 1
  end,
  sweep = function()
    asked = true
    sweep_for(box, next_argument())
    return 1
  end,
  sweep_each = function() -- several mailboxes, each with its waiter and the pause between recoveries; what fails, fails for one
    local results = {}
    for i = 1, next_number() do
      local of, records, waiter, every = mailbox_at(next_number()), next_number(), next_argument(), next_number()
      local done, result = pcall(function()
        sweep_for(of, waiter)
        pcall(remove_ended, with_records(of, records), AT_ONCE)
        local found, again = unpack(recover_every(of, every))
        local due = next_due(of)
        return { due and math.max(due - now, 0) or -1, of.dropped, found, again }
      end)
      results[i] = done and result or 'failed'
    end
    return results
  end,
  count = function()
    return sweep(box) and {} or counts(box)
  end,
  purge = function()
    verify(box)
    return sweep(box) and -1 or purge(box)
  end,
  drop = function() -- all of it
    with_records(box, next_number())
    verify(box)
    redis.call('UNLINK', box.records, box.record_names, box.record_ends, unpack(KEYS, 1, KEYS_OF_ONE))
    box = box_of(0)
    return 1
  end,
  list_dead = function()
    local limit, after, task = next_number(), next_argument(), next_argument()
    if sweep(box) or task ~= '' and not are_dead_indexed(box) then
      return -1
    end
    return task == '' and list_dead(box, limit, after) or list_dead_of(box, limit, after, task)
  end,
  find_dead = function()
    local ids = next_list()
    return sweep(box) and -1 or read_dead(box, ids)
  end,
  replay_dead = function()
    local capacity, most, count = next_number(), next_number(), next_number()
    local from = at
    at = at + math.max(count, 0)
    verify(box)
    if sweep(box) then
      return -1
    end
    local ids = find_dead(box, from, count, most)
    if capacity >= 0 then
      local there, new = waiting(box), count < 0 and redis.call('ZCARD', box.dead_order) or #ids
      if new > 0 and there + new > capacity then
        return { 'full', there, new }
      end
    end
    return replay_dead(box, ids)
  end,
  purge_dead = function()
    local most, count = next_number(), next_number()
    local from = at
    at = at + math.max(count, 0)
    verify(box)
    return sweep(box) and -1 or purge_dead(box, find_dead(box, from, count, most))
  end,
  cancel = function()
    return cancel(box, next_argument())
  end,
  find = function()
    local ids = next_list()
    return sweep(box) and -1 or find(box, ids)
  end,
  reschedule = function()
    local id, delay = next_argument(), next_number()
    return sweep(box) and -1 or reschedule(box, id, delay)
  end,
  list_messages = function()
    local place, limit, since, list = next_argument(), next_number(), next_number(), next_argument()
    local after = next_argument()
    return sweep(box) and -1 or list_messages(box, place, limit, since, list, after)
  end,
  replace_body = function()
    local id, body = next_argument(), next_argument()
    return sweep(box) and -1 or replace_body(box, id, body)
  end,
  change_limits = function()
    verify(box)
    for _ = 1, next_number() do
      local task, declared, paused, instead = next_argument(), next_argument(), next_argument(), next_argument()
      limits.change(box, task, declared ~= '' and declared, paused, instead)
    end
    return 1
  end,
  set_task = function()
    local receipt, task = next_argument(), next_argument()
    if not held(box, receipt) then
      return 0
    end
    if not limits.set_task(box, id_of_receipt(receipt), task) then
      return 1
    end
    return nack(box, receipt, 0, 0, true, '') + 1
  end,
  limits = function()
    return sweep(box) and -1 or limits.all(box)
  end,
  write_record = function()
    local records, name, version = next_number(), next_argument(), next_argument()
    local is_kept, value, life, capacity = next_argument() == '1', next_argument(), next_number(), next_number()
    local groups = {}
    for i = 1, next_number() do
      groups[i] = next_group()
    end
    return write_record(with_records(box, records), name, version, is_kept and value, life, capacity, groups)
  end,
  find_records = function()
    local records = next_number()
    return { read_records(with_records(box, records), next_list()) }
  end,
  list_records = function()
    local records, from, to = next_number(), next_argument(), next_argument()
    return list_records(with_records(box, records), from, to, next_number())
  end,
}

-- Push the message that is first in turn. Return whether that was possible.
local function push_first(of, name, visible)
  local added, first_due = of.added, of.first_due
  local receipts, values, extras = unpack((lease(of, 1, tonumber(visible), name)))
  if not receipts[1] then
    return false
  end
  if push(of, name, visible, receipts[1], values[1], extras) then
    return true
  end
  unclaim(of, receipts)
  of.added, of.first_due = added, first_due
  return false
end

-- Wake as many waiters as there are new messages; a message that comes alone is pushed to the first. If its listener is gone,
-- the next one is woken.
local function wake(of)
  local who, name, visible = next_waiter(of)
  if not who then
    return
  end
  local there, alone = redis.call('ZCARD', of.ready), of.added == 1
  if alone and (there > 1 or redis.call('ZCARD', of.expiry) > 0) then -- what has expired is not to be pushed
    alone = not sweep_expired(of)
    there = redis.call('ZCARD', of.ready)
  end
  local wanted = math.min(of.added, there)
  if wanted == 0 then
    redis.call('ZADD', of.waiters, who[2], who[1])
  end
  while wanted > 0 and who do
    if name and (alone and push_first(of, name, visible) or publish(of, name, 'w' .. of.added)) then
      wanted = wanted - 1
    end
    if wanted > 0 then
      who, name, visible = next_waiter(of)
    end
  end
end

-- Return whether a waiter is not told by the answer to this call when the next thing is due.
local function others_wait(of)
  local waiters = redis.call('ZCARD', of.waiters)
  return waiters > 1 or waiters == 1 and not (of.waiter and redis.call('ZSCORE', of.waiters, of.waiter))
end

local function tell_due(of)
  local due = others_wait(of) and next_due(of)
  if due and of.first_due <= due then
    publish(of, 'all', 'd' .. text(of.first_due - now))
  end
end

-- What is behind the operations of a batch. They have been done: nothing of this is an error of theirs. Who should have been
-- called and was not, looks by itself after a while.
local function finish(of, behind)
  repeat -- a message that is pushed may open a limiter for the next one
    pcall(limits.let_in, of)
    if of.added > 0 and not of.no_waiters then
      pcall(wake, of)
      of.added = 0
    end
  until not (of.touched and next(of.touched))
  pcall(limits.save, of)
  if of.first_due then
    pcall(tell_due, of)
  end
  if of.tick then
    redis.pcall('HSET', of.state, 'tick', text(of.tick))
  end
  if of.settled > 0 and type(redis.pcall('HINCRBY', of.state, 'settled', of.settled)) == 'table' then
    redis.pcall('HSET', of.state, 'settled', of.settled) -- what stood there was no number
  end
  if of.is_transient then
    local known = redis.pcall('PTTL', of.state)
    local left = of.used and DAY or math.max(tonumber(known) or DAY, 1000)
    for i = 1, KEYS_OF_TRANSIENT do
      redis.pcall('PEXPIRE', KEYS[behind + i], left)
    end
  end
end

local function run(keys, arguments)
  if not math then -- the first call
    redis, math, string, table, ipairs, next, pairs, pcall, setmetatable, tonumber, type, unpack = globals()
  end
  KEYS, ARGV = keys, arguments
  if ARGV[1] == 'open' then
    local found = obstacles(with_records(box_of(0), ARGV[3]))
    if found[1] then
      return { { found, 0, 0 }, -1, 0, 0 }
    end
  end
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
  box, others, asked, at = box_of(0), {}, false, 1
  local results, failed = {}, {}
  while at <= #ARGV do
    local done, result = pcall(operations[next_argument()])
    if not done then
      failed[#failed + 1] = #results
      failed[#failed + 1] = type(result) == 'table' and result.err or tostring(result)
      result = 0
    end
    results[#results + 1] = result
  end
  finish(box, 0)
  for behind, other in pairs(others) do
    finish(other, behind)
  end
  local due = asked and next_due(box)
  results[#results + 1] = due and math.max(due - now, 0) or -1
  results[#results + 1] = now
  results[#results + 1] = box.dropped
  for _, failure in ipairs(failed) do
    results[#results + 1] = failure
  end
  return results
end

redis.register_function(NAME, function(keys, arguments)
  full = false
  return run(keys, arguments)
end)

-- For a server whose memory is full, which refuses the other one: what is in hand can be finished, and only what is new is
-- refused, to its senders alone.
redis.register_function({
  function_name = NAME .. '_full',
  callback = function(keys, arguments)
    full = true
    return run(keys, arguments)
  end,
  flags = { 'allow-oom' },
})
