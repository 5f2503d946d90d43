-- Decides all limits of one request in one atomic step: either all of them admit and are charged, or none is charged.
-- Counts the decision in the open batch of usage. Loaded after prelude.lua, batch.lua and the algorithms' files.
--
-- A shard is a part of the accounts. A shard's `head` is a string: the version of the rules and the run (one life) of
-- the server with which the shard was last used.
-- The state of a limit is stored in one of two ways: as a record in a packed state, a string that several limits of a
-- key share; or in Redis keys that belong to this limit alone, its own keys.
--
-- KEYS     1. the heads of all shards of this request, the account's shard first
--          2. the packed states
--          3. `open` of the account's shard, if there are meters
--          4. the receipt, if flag 2 is set
--          5. the first own key of each limit that has own keys
--          6. the further own keys
--          The program numbers the states: first the packed states, then the first own keys
-- ARGV[1]  nonce: unique for each call
-- ARGV[2]  the head that the caller expects, "<version of the rules> <run>"
-- ARGV[3]  request, '<BBBBBdddddd':
--            op, the operation: engine/call.py describes each
--            flags, a sum: 1 the clock is virtual, so nothing expires; 2 a receipt is refunded or settled, which can
--              be done once; 4 refund the whole receipt; 8 refuse instead of waiting; 16 the limits have no version,
--              so they cannot be too old; 32 if a `concurrency` limit refuses, the caller waits for a release; 64 the
--              caller has not yet decided these limits in this run, so look for lasting limits with older data
--            number of heads, number of meters, number of packed states
--            now (µs; -1: use the server's clock)
--            timeout (µs; -1: any)
--            the moment at which a settled receipt was charged (µs; 0: unknown)
--            the receipt's time to live (ms)
--            start and end of the time for which ARGV is valid (µs)
--          The costs follow, '<d' each: first one for each meter, then further costs of limits, if there are any. The
--          position of a cost in this list is its slot, from 1. If a receipt is settled and less was used than
--          charged, a cost is negative
-- ARGV[4]  program, a record for each limit, '<I4I4I4BBBBBdddddddddd': name (crc32), rule, version, algorithm, mode (1
--          is shadow; 2 more: the limit is restored if its state is lost; 4 more: if it has no state), number of its
--          state, number of its first own key (0: none), slot of its cost, eight params, the moment from which the params hold (µs; 0: now), longest wait (µs; -1: the request's timeout)
-- ARGV[5]  for fast.lua. The last arguments are also for fast.lua alone
-- ARGV[6…] for each meter the name of the counter of an admitted request,
--          "a|bin|period|meter|rule|version|account|key". Then the name of the request's leases, if it is not the
--          nonce
--
-- Returns  int64s '<i8…'. All times are in µs. The first number says which reply it is:
--          1   decided. Then: allowed, binding limit (0: none), remaining, retry_after (-1: never), reset_after, wait,
--              the moment of the decision, now. Then for each limit: ok, remaining, reset_after
--          0   nothing was decided: the caller's rules are too old. Then: the newest version
--          -2  nothing was decided: ARGV is not valid now. Then: now
--          -3  nothing was decided: Redis may have lost the state of a lasting limit. Restore it first. Then: now
--          2   nothing was done: the receipt was used before, or its time to live has passed. Then: 0
local TRY, PEEK, REFUND, RELEASE, RESET, CREATE, CHANGE, SETTLE, RESTORE = 1, 2, 3, 4, 5, 6, 7, 8, 9
local call, unpack_struct = redis.call, struct.unpack
local op, flags, head_count, meter_count, packed_count, now, timeout, charged_at, ttl, valid_from, valid_until, costs_at
  = unpack_struct('<BBBBBdddddd', ARGV[3])
local is_virtual, has_receipt, whole_receipt, at_once = flags % 2 == 1, flags % 4 >= 2, flags % 8 >= 4, flags % 16 >= 8
local unversioned, announces, is_first = flags % 32 >= 16, flags % 64 >= 32, flags >= 64
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1e6 + time[2]
end
local function reply_of(...) return struct.pack('<' .. string.rep('i8', select('#', ...)), ...) end
if now < valid_from or now >= valid_until then return reply_of(-2, now) end

-- 1. Compare the heads of all shards with the expected head. Read all of them before anything is written: if a shard
-- has newer rules, nothing may change.
local expected_version, run = string.match(ARGV[2], '^(%d+) (.*)$')
local new_versions, new_runs, asked_server = {}, {}, false
for i = 1, head_count do
  local head = call('GET', KEYS[i])
  if head ~= ARGV[2] then
    local stored_version, stored_run = string.match(head or '', '^(%d+) (.*)$')
    stored_version = tonumber(stored_version or 0)
    -- A receipt can be refunded or settled even if the rules have changed since.
    if tonumber(expected_version) < stored_version and op <= PEEK and not unversioned then
      return reply_of(0, stored_version)
    end
    if stored_run ~= run and not is_virtual and not asked_server then
      -- The caller asked for the run when it connected. While the connection stays open, the run can change.
      run, asked_server = server_run(), true
    end
    if tonumber(expected_version) > stored_version or stored_run ~= run then
      new_versions[i] = math.max(tonumber(expected_version), stored_version)
    end
    if stored_run ~= run then new_runs[i] = true end
  end
end
for i, version in pairs(new_versions) do
  -- Seal the open batch of an earlier run. If that run has lost counts, they were all in this batch.
  if new_runs[i] then batch_seal(string.sub(KEYS[i], 1, -1 - #'${head}'), now, run, ARGV[1]) end
  call('SET', KEYS[i], int(version) .. ' ' .. run)
end

-- 2. Read the states. `at` is the moment of the decision, the same for all limits. Usually it is `now`. If the clock has
-- stepped back by at most CLOCK_BACK, it is the latest moment in the states.
local before_own_keys = head_count + (meter_count > 0 and 1 or 0) + (has_receipt and 1 or 0)
local receipt = has_receipt and KEYS[before_own_keys + packed_count]
local function state_key(number) return KEYS[(number > packed_count and before_own_keys or head_count) + number] end
local function corrupt(number)
  return redis.error_reply('CORRUPT the state at ' .. state_key(number) .. ' cannot be read: reset or delete it')
end
local states, names_of, limits, program, pos, at = {}, {}, {}, ARGV[4], 1, now
local lease = ARGV[6 + meter_count] or ARGV[1]
local size = #program
while pos <= size do
  local name, code, state_number, own_number, slot, max_wait, a, b, c, d, e, f, g, h
  local l = {charged_at = charged_at, lease = lease, announces = announces}
  name, l.rule, l.version, code, l.mode, state_number, own_number, slot, a, b, c, d, e, f, g, h, l.changed, max_wait,
    pos = unpack_struct('<I4I4I4BBBBBdddddddddd', program, pos)
  l.lasting, l.mode = math.floor(l.mode / 2), l.mode % 2
  l.timeout = at_once and 0 or max_wait >= 0 and max_wait or timeout
  l.name, l.code, l.state_number, l.slot, l.params = name, code, state_number, slot, {a, b, c, d, e, f, g, h}
  l.cost = unpack_struct('<d', ARGV[3], costs_at + slot * 8 - 8)
  if own_number > 0 then l.redis_key = state_key(own_number) end
  local state = states[state_number]
  if not state then
    local raw = redis.pcall('GET', state_key(state_number))
    local readable, found, names = type(raw) ~= 'table', {}, {} -- a table is an error: the key is not a string
    if readable and raw then readable, found, names = pcall(records, raw) end
    if not readable then
      if op ~= RESET then return corrupt(state_number) end
      call('DEL', state_key(state_number))
      found, names = {}, {}
    end
    state = found
    states[state_number], names_of[state_number] = state, names
  end
  local record = state[name]
  -- Ignore a record that has expired. It still exists only because other records in the string have not expired. The
  -- limit's own keys do not exist any more.
  if record and (is_virtual or record.expiry * 1e6 > now) then
    l.has_record = true
    if record.code == code then
      local readable, entry = pcall(entry_of, record)
      readable = readable and type(entry[4]) == 'number'
      if not readable and op ~= RESET then return corrupt(state_number) end
      l.entry = entry
      if readable and l.entry[4] > at and l.entry[4] <= now + CLOCK_BACK then at = l.entry[4] end
    end
  end
  limits[#limits + 1] = l
end
-- Returns whether the state of a lasting limit must be restored: there is no state although the limit needs one, or Redis
-- may have lost what the limit has counted in its window. That is so if the shard's data is younger than the window, and
-- the state does not exist or is older than the data. `meta` says how old the data is: it begins when a lasting limit is
-- decided for the first time in a run, or after all keys were deleted.
local data_since
local function is_lost(l)
  if is_virtual then return l.lasting >= 2 and not l.entry end
  if l.entry and op == TRY and not is_first then return false end
  if not data_since then
    local meta = string.sub(KEYS[1], 1, -1 - #'${head}') .. '${meta}'
    local stored = call('HMGET', meta, 'data_run', 'data_since')
    -- If the clock has stepped back, no state would be as new as the data.
    if stored[1] ~= run or tonumber(stored[2]) > now then
      stored[2] = int(now)
      call('HSET', meta, 'data_run', run, 'data_since', stored[2])
    end
    data_since = tonumber(stored[2])
  end
  if not l.entry then return l.lasting >= 2 or data_since > l.start end
  return data_since > l.start and l.entry[4] < data_since
end
for i = 1, #limits do
  local l, algorithm = limits[i], ALGORITHMS[limits[i].code]
  local entry = l.entry
  l.now, l.shift = at, 0
  if entry and op ~= RESET then
    local last = entry[4]
    if last > at then l.shift, last = last - at, at end
    l.last = last
    l.changed = l.changed == 0 and at or math.max(last, math.min(l.changed, at))
    -- Settle a receipt with the parameters that the state has now: the rule may have changed after the receipt was
    -- given.
    if op == SETTLE and algorithm.use_stored_params then algorithm.use_stored_params(l, entry) end
    algorithm.resolve(l, entry)
  else
    algorithm.initial(l)
  end
  if l.stale then return reply_of(-2, now) end
  if l.lasting > 0 and (op == TRY or op == RESTORE or op == RESET) then
    l.lost = is_lost(l)
    if l.lost and op == TRY then return reply_of(-3, now) end
  end
end

-- 3. Refuse to use a receipt twice.
if has_receipt and (now > charged_at + ttl * 1000 or not call('SET', receipt, '1', 'NX', 'PX', ttl)) then
  return reply_of(2, 0)
end

-- 4. Decide.
local allowed, never, binding, retry, wait = true, false, 0, 0, 0
for i = 1, #limits do
  local l = limits[i]
  if (op ~= TRY and op ~= PEEK) or l.cost == 0 then
    l.ok = true
  else
    ALGORITHMS[l.code].check(l)
    if l.mode == 0 then
      if l.ok then
        wait = math.max(wait, l.wait or 0)
      else
        allowed = false
        if l.retry == NEVER then
          if not never then never, binding = true, i end
        elseif not never and l.retry > retry then
          retry, binding = l.retry, i
        end
      end
    end
  end
end
if never then retry = NEVER end

-- 5. Charge the limits and write their states.
local changed_states = {}
for i = 1, #limits do
  local l, algorithm = limits[i], ALGORITHMS[limits[i].code]
  local last = l.last
  if op == TRY then
    if allowed and l.ok and l.cost > 0 then
      algorithm.charge(l)
      last, l.must_write = at, true
    elseif l.cost > 0 then
      if not l.entry then
        last, l.must_write = at, not never and l.retry ~= NEVER
      else
        l.must_write = l.shift > 0
      end
    end
  elseif op == CREATE then
    -- Do not change an existing state, except after the clock has stepped back.
    if not l.entry then last, l.must_write = at, true else l.must_write = l.shift > 0 end
  elseif op == CHANGE then
    if l.entry then last, l.must_write = at, true end
  elseif op == REFUND then
    if l.entry then l.must_write = l.cost > 0 and algorithm.refund(l) or l.shift > 0 end
  elseif op == RELEASE then
    if l.entry then l.must_write = algorithm.release and algorithm.release(l) or l.shift > 0 end
  elseif op == SETTLE then
    if l.has_record and not l.entry then
      -- Do nothing: the rule has another algorithm now, which never charged this request.
    elseif l.cost > 0 then
      algorithm.charge(l)
      last, l.must_write = at, true
    elseif l.cost < 0 and l.entry then
      l.cost = -l.cost
      local give = whole_receipt and algorithm.release or algorithm.refund
      l.must_write = give(l) or l.shift > 0
    end
  elseif op == RESTORE then
    if l.lost then
      algorithm.restore(l)
      last, l.must_write = at, true
    end
  elseif op == RESET and l.lasting > 0 then
    -- Keep a new state: if it did not exist, it would be restored.
    last, l.must_write = at, true
  elseif op == RESET and l.has_record then
    states[l.state_number][l.name] = nil
    changed_states[l.state_number] = true
    if l.redis_key and algorithm.reset then algorithm.reset(l) end
  end
  if l.must_write then
    local entry, life = algorithm.entry(l, last)
    entry[3] = math.min(math.ceil((at + math.max(life, CLOCK_BACK)) / 1e6) + 1, 4294967295)
    states[l.state_number][l.name] = record_of(entry)
    changed_states[l.state_number] = true
    if algorithm.keep then algorithm.keep(l, not is_virtual and entry[3] * 1000 - math.floor(now / 1000) or nil) end
  end
end
for state_number in pairs(changed_states) do
  local state, out, latest = states[state_number], {}, 0
  local function keep(name)
    local record = state[name]
    if record and (is_virtual or record.expiry * 1e6 > now) then
      out[#out + 1] = record.raw
      latest = math.max(latest, record.expiry)
    end
    state[name] = nil
  end
  -- Write the records in the same order as before. fast.lua is faster if it finds them where they were.
  for _, name in ipairs(names_of[state_number]) do keep(name) end
  for i = 1, #limits do
    if limits[i].state_number == state_number then keep(limits[i].name) end
  end
  local key, value = state_key(state_number), struct.pack('<I4', latest) .. table.concat(out)
  if #out == 0 then
    call('DEL', key)
  elseif is_virtual then
    call('SET', key, value)
  else
    call('SET', key, value, 'PX', latest * 1000 - math.floor(now / 1000))
  end
end

-- 6. Count usage, once for each meter.
if meter_count > 0 and (op == TRY or op == SETTLE) then
  local open, is_full = KEYS[head_count + packed_count + 1], false
  local requests = (has_receipt and not whole_receipt) and 0 or 1
  local function count(field, cost) is_full = usage_add(open, field, cost, requests, ARGV[1], run, now) or is_full end
  for i = 1, meter_count do
    local cost, field = unpack_struct('<d', ARGV[3], costs_at + i * 8 - 8), ARGV[5 + i]
    -- The parts of the counter's name before and after "rule|version".
    local where, who = string.match(field, '^a(|%d+|%d+|[^|]*|)%d+|%d+(|.*)$')
    if op == SETTLE then
      count(((whole_receipt or cost < 0) and 'r' or 'a') .. string.sub(field, 2), math.abs(cost))
    elseif allowed then
      count(field, cost)
      for j = 1, #limits do
        local l = limits[j]
        if not l.ok and l.slot == i then count('s' .. where .. l.rule .. '|' .. l.version .. who, cost) end
      end
    else
      local l = limits[binding]
      count('d' .. where .. l.rule .. '|' .. l.version .. who, cost)
    end
  end
  -- Ignore an error: the request was decided and counted, and the periodic task will seal the batch.
  if is_full then pcall(batch_seal, string.sub(open, 1, -1 - #'${open}'), now, run, ARGV[1]) end
end

-- 7. Reply.
local reply = {1, allowed and 1 or 0, binding, 0, retry, 0, allowed and wait or 0, at, now}
local least_remaining, longest_reset
for i = 1, #limits do
  local l = limits[i]
  local remaining, reset = ALGORITHMS[l.code].standing(l)
  reply[7 + 3 * i], reply[8 + 3 * i], reply[9 + 3 * i] = l.ok and 1 or 0, remaining, reset
  if l.mode == 0 then
    if not least_remaining or remaining < least_remaining then
      least_remaining = remaining
      if allowed then reply[3] = i end
    end
    if not longest_reset or reset > longest_reset then longest_reset = reset end
  end
end
reply[4], reply[6] = least_remaining or 0, longest_reset or 0
return reply_of(unpack(reply))
