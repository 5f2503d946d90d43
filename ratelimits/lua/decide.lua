-- Decides all limits of one request in one atomic step: either all of them admit and are charged, or none is charged.
-- Counts the decision in the open batch of usage. Loaded after prelude.lua, batch.lua and the algorithms' files.
--
-- A shard is a part of the accounts. A shard's `head` is a string: the version of the rules and the run (one life) of the
-- server with which the shard was last used. A limit's state is either a record in a packed state, which several limits of
-- a key share, or it is in Redis keys of the limit's own.
--
-- KEYS     1. the heads of all shards of this request, the account's shard first
--          2. the packed states
--          3. `open` of the account's shard, if there are meters
--          4. the receipt, if flag 2 is set
--          5. the first own key of each limit that has own keys, then the further own keys
--          The program numbers the states: first the packed states, then the limits' first own keys
-- ARGV[1]  nonce: unique for each call
-- ARGV[2]  the head that the caller expects, "<version of the rules> <run>"
-- ARGV[3]  request, '<BBBBBdddddd': op; flags (1 virtual clock: nothing expires; 2 once per receipt; 4 the whole receipt;
--          8 refuse instead of waiting; 16 the limits have no version, so they cannot be too old); numbers of heads, of
--          meters and of packed states; now (µs; -1: the server's clock); timeout (µs; -1: any); the moment at which a
--          settled receipt was charged (µs; 0 unknown); the receipt's time to live (ms); start and end of the time for
--          which ARGV is valid (µs). Then the costs, '<d' each: first one for each meter; further costs of limits
--          may follow. A limit names its cost by the position in this list, the slot. A cost is negative if a receipt is settled and
--          less was used than charged
-- ARGV[4]  program, a record for each limit, '<I4I4I4BBBBBdddddddddd': name (crc32), rule, version, algorithm, mode (1
--          shadow), number of its state, number of its own key (0 none), slot of its cost, eight params, moment from which
--          the params hold (µs; 0 now), longest wait (µs; -1: the request's timeout)
-- ARGV[5]  for fast.lua. The last arguments are also for fast.lua alone
-- ARGV[6…] for each meter the counter of an admitted request, "a|bin|period|meter|rule|version|account|key"; then the name
--          of the request's leases, if it is not the nonce
--
-- Returns  int64s '<i8…': 1, allowed, binding limit (0 none), remaining, retry_after (-1 never), reset_after, wait, the
--            moment of the decision, now; then ok, remaining, reset_after of each limit. Times in µs
--          0, version   nothing was decided: the caller's rules are older than `version`
--          -2, now      nothing was decided: ARGV is not valid at this time
--          2, 0         nothing was done: the receipt was refunded or settled before, or its time to live has passed
local TRY, PEEK, REFUND, RELEASE, RESET, CREATE, CHANGE, SETTLE = 1, 2, 3, 4, 5, 6, 7, 8
local call, unpack_struct = redis.call, struct.unpack
local op, flags, heads, meters, packed, now, timeout, charged_at, ttl, from, til, costs =
  unpack_struct('<BBBBBdddddd', ARGV[3])
local virtual, once, whole, at_once = flags % 2 == 1, flags % 4 >= 2, flags % 8 >= 4, flags % 16 >= 8
local free = flags >= 16
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1e6 + time[2]
end
local function answer(...) return struct.pack('<' .. string.rep('i8', select('#', ...)), ...) end
if now < from or now >= til then return answer(-2, now) end

-- 1. Compare the heads of all shards with the expected one. Write nothing until all of them were read: if a shard has newer
-- rules, nothing may change.
local expected, run = string.match(ARGV[2], '^(%d+) (.*)$')
local new_versions, new_runs, asked = {}, {}, false
for i = 1, heads do
  local head = call('GET', KEYS[i])
  if head ~= ARGV[2] then
    local stored, before = string.match(head or '', '^(%d+) (.*)$')
    stored = tonumber(stored or 0)
    -- A receipt can be refunded or settled even if the rules have changed since.
    if tonumber(expected) < stored and op <= PEEK and not free then return answer(0, stored) end
    if before ~= run and not virtual and not asked then
      -- The caller learnt the run when it connected. The run can change while connections stay open.
      run, asked = server_run(), true
    end
    if tonumber(expected) > stored or before ~= run then new_versions[i] = math.max(tonumber(expected), stored) end
    if before ~= run then new_runs[i] = true end
  end
end
for i, version in pairs(new_versions) do
  -- Seal the open batch of an earlier run, so that the counts which that run may have lost are all in one batch.
  if new_runs[i] then batch_seal(string.sub(KEYS[i], 1, -1 - #'${head}'), now, run, ARGV[1]) end
  call('SET', KEYS[i], int(version) .. ' ' .. run)
end

-- 2. Read the states. `at` is the moment of the decision, the same for all limits: now, or the latest moment in the states
-- if the clock has stepped back.
local before_own = heads + (meters > 0 and 1 or 0) + (once and 1 or 0)
local receipt = once and KEYS[before_own + packed]
local function state_key(number) return KEYS[(number > packed and before_own or heads) + number] end
local function corrupt(number)
  return redis.error_reply('CORRUPT the state at ' .. state_key(number) .. ' cannot be read: reset or delete it')
end
local states, orders, limits, program, pos, at = {}, {}, {}, ARGV[4], 1, now
local lease = ARGV[6 + meters] or ARGV[1]
local size = #program
while pos <= size do
  local l, name, code, index, own, slot, max_wait, a, b, c, d, e, f, g, h = {charged_at = charged_at, lease = lease}
  name, l.rule, l.version, code, l.mode, index, own, slot, a, b, c, d, e, f, g, h, l.changed, max_wait, pos =
    unpack_struct('<I4I4I4BBBBBdddddddddd', program, pos)
  l.timeout = at_once and 0 or max_wait >= 0 and max_wait or timeout
  l.name, l.code, l.index, l.slot, l.p = name, code, index, slot, {a, b, c, d, e, f, g, h}
  l.cost = unpack_struct('<d', ARGV[3], costs + slot * 8 - 8)
  if own > 0 then l.own = state_key(own) end
  local state = states[index]
  if not state then
    local raw = redis.pcall('GET', state_key(index))
    local sound, value, order = type(raw) ~= 'table', {}, {} -- a table is an error: the key is not a string
    if sound and raw then sound, value, order = pcall(records, raw) end
    if not sound then
      if op ~= RESET then return corrupt(index) end
      call('DEL', state_key(index))
      value, order = {}, {}
    end
    state = value
    states[index], orders[index] = state, order
  end
  local record = state[name]
  -- Ignore a record that has expired: other records kept the string alive, but the limit's own keys are gone.
  if record and (virtual or record.expiry * 1e6 > now) then
    l.known = true
    if record.code == code then
      local sound, entry = pcall(entry_of, record)
      if not sound and op ~= RESET then return corrupt(index) end
      l.entry = entry
      if sound and l.entry[4] > at and l.entry[4] <= now + CLOCK_BACK then at = l.entry[4] end
    end
  end
  limits[#limits + 1] = l
end
for i = 1, #limits do
  local l, algorithm = limits[i], A[limits[i].code]
  local entry = l.entry
  l.now, l.shift = at, 0
  if entry and op ~= RESET then
    local last = entry[4]
    if last > at then l.shift, last = last - at, at end
    l.last = last
    l.changed = l.changed == 0 and at or math.max(last, math.min(l.changed, at))
    -- Settle a receipt under the state's present parameters: the rule may have changed since the receipt was given.
    if op == SETTLE and algorithm.use_stored_params then algorithm.use_stored_params(l, entry) end
    algorithm.resolve(l, entry)
  else
    algorithm.initial(l)
  end
  if l.stale then return answer(-2, now) end
end

-- 3. Refuse to use a receipt twice.
if once and (now > charged_at + ttl * 1000 or not call('SET', receipt, '1', 'NX', 'PX', ttl)) then return answer(2, 0) end

-- 4. Decide.
local allowed, never, binding, retry, wait = true, false, 0, 0, 0
for i = 1, #limits do
  local l = limits[i]
  if (op ~= TRY and op ~= PEEK) or l.cost == 0 then
    l.ok = true
  else
    A[l.code].check(l)
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
local dirty = {}
for i = 1, #limits do
  local l, algorithm = limits[i], A[limits[i].code]
  local last = l.last
  if op == TRY then
    if allowed and l.ok and l.cost > 0 then
      algorithm.charge(l)
      last, l.dirty = at, true
    elseif l.cost > 0 then
      if not l.entry then
        last, l.dirty = at, not never and l.retry ~= NEVER
      else
        l.dirty = l.shift > 0
      end
    end
  elseif op == CREATE then
    -- Do not change an existing state, except after the clock has stepped back.
    if not l.entry then last, l.dirty = at, true else l.dirty = l.shift > 0 end
  elseif op == CHANGE then
    if l.entry then last, l.dirty = at, true end
  elseif op == REFUND then
    if l.entry then l.dirty = l.cost > 0 and algorithm.refund(l) or l.shift > 0 end
  elseif op == RELEASE then
    if l.entry then l.dirty = algorithm.release and algorithm.release(l) or l.shift > 0 end
  elseif op == SETTLE then
    if l.known and not l.entry then
      -- Do nothing: the rule has another algorithm now, which never charged this request.
    elseif l.cost > 0 then
      algorithm.charge(l)
      last, l.dirty = at, true
    elseif l.cost < 0 and l.entry then
      l.cost = -l.cost
      local give = whole and algorithm.release or algorithm.refund
      l.dirty = give(l) or l.shift > 0
    end
  elseif op == RESET and l.known then
    states[l.index][l.name] = nil
    dirty[l.index] = true
    if l.own and algorithm.reset then algorithm.reset(l) end
  end
  if l.dirty then
    local entry, life = algorithm.entry(l, last)
    entry[3] = math.min(math.ceil((at + math.max(life, CLOCK_BACK)) / 1e6) + 1, 4294967295)
    states[l.index][l.name] = record_of(entry)
    dirty[l.index] = true
    if algorithm.keep then algorithm.keep(l, not virtual and entry[3] * 1000 - math.floor(now / 1000) or nil) end
  end
end
for index in pairs(dirty) do
  local state, out, latest = states[index], {}, 0
  local function keep(name)
    local record = state[name]
    if record and (virtual or record.expiry * 1e6 > now) then
      out[#out + 1] = record.raw
      latest = math.max(latest, record.expiry)
    end
    state[name] = nil
  end
  -- Keep the order of the records: requests with other rules, which share this string, then find theirs in the same places.
  for _, name in ipairs(orders[index]) do keep(name) end
  for i = 1, #limits do
    if limits[i].index == index then keep(limits[i].name) end
  end
  local key, value = state_key(index), struct.pack('<I4', latest) .. table.concat(out)
  if #out == 0 then
    call('DEL', key)
  elseif virtual then
    call('SET', key, value)
  else
    call('SET', key, value, 'PX', latest * 1000 - math.floor(now / 1000))
  end
end

-- 6. Count usage, once per request and meter.
if meters > 0 and (op == TRY or op == SETTLE) then
  local open, full = KEYS[heads + packed + 1], false
  local requests = (once and not whole) and 0 or 1
  local function count(field, cost) full = usage_add(open, field, cost, requests, ARGV[1], run, now) or full end
  for i = 1, meters do
    local cost, field = unpack_struct('<d', ARGV[3], costs + i * 8 - 8), ARGV[5 + i]
    local where, who = string.match(field, '^a(|%d+|%d+|[^|]*|)%d+|%d+(|.*)$')
    if op == SETTLE then
      count(((whole or cost < 0) and 'r' or 'a') .. string.sub(field, 2), math.abs(cost))
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
  if full then pcall(batch_seal, string.sub(open, 1, -1 - #'${open}'), now, run, ARGV[1]) end
end

-- 7. Reply.
local reply = {1, allowed and 1 or 0, binding, 0, retry, 0, allowed and wait or 0, at, now}
local remaining, reset
for i = 1, #limits do
  local l = limits[i]
  local left, full = A[l.code].standing(l)
  reply[7 + 3 * i], reply[8 + 3 * i], reply[9 + 3 * i] = l.ok and 1 or 0, left, full
  if l.mode == 0 then
    if not remaining or left < remaining then
      remaining = left
      if allowed then reply[3] = i end
    end
    if not reset or full > reset then reset = full end
  end
end
reply[4], reply[6] = remaining or 0, reset or 0
return answer(unpack(reply))
