-- concurrency (11): at most `capacity` permits are in use at once. An admitted request gets a lease for its permits.
-- The lease ends when it is released, or when `lease_ttl` has passed. A lease that has ended may still be stored for
-- some time.
--
-- A limit has three Redis keys: `l.redis_key`, and the same name with two endings.
--   (no ending)    sorted set with a member for each lease: "number:permits:name". The score is the lease's expiry, in
--                  µs after `l.base`
--   ${by_name}     hash with a field for each name: "number:permits" of each lease with this name, separated by spaces
--   ${beyond_one}  sorted set for leases with several permits
-- A decision counts the permits that end before a moment. With the third key, the decision need not read each lease.
-- The first key counts one permit of each lease. The other permits of a lease are split into powers of two, for
-- example 5 = 1 + 4. Each power is a member of the third key: a letter ("A" is 1, "B" is 2, "C" is 4), the expiry (16
-- digits), ":", the number of the lease. All scores are 0. So Redis sorts the members by power and expiry, and can
-- count the members of a power up to an expiry.
-- The third key also has an empty member. Because of this member the third key exists as long as the first. A cluster
-- needs this: while it moves a slot, a server runs a script only if this server has all keys of the script.
--
-- Two more Redis keys let callers wait for a release. They exist only while callers wait. The script does not declare
-- them, so that it also runs without them while a cluster moves the slot. If they cannot be used then, the callers wait
-- until the first lease expires.
--   ${announced}   string: the number of callers that were refused and wait for a release
--   ${freed}       list with an element for each caller that may try again. Callers take elements with BLPOP
--
-- Entry: name, algorithm, expiry, last, `l.base`, `l.stored_permits`, `l.next_number`, `l.powers`.
-- Params: lease_ttl, -, -, -, -, capacity.
-- Fields of a limit `l`:
--   stored_permits   permits of all stored leases
--   ended_permits    permits of the stored leases that have ended
--   live_permits     permits of the leases that have not ended
--   next_number      number of the next lease
--   powers           the sum of the powers of two that may be in the third key
--   lease            name of the request's leases
--   is_new           true if the limit had no state, or the server has lost its leases
do
  local leases = {}
  -- Maximum number of ended leases that one charge removes.
  local MAX_REMOVED = 4

  local function permits_of(member)
    return tonumber(string.match(member, '^%d+:(%d+):'))
  end

  -- Splits `number` into powers of two, and calls `act` with the letter and the value of each power.
  local function for_each_power(number, act)
    local letter, power = 65, 1
    while number > 0 do
      if number % 2 == 1 then act(string.char(letter), power) end
      number, letter, power = (number - number % 2) / 2, letter + 1, power * 2
    end
  end

  -- Returns the number of permits of all stored leases whose expiry is `t` or earlier.
  local function permits_ending_by(l, t)
    local count = redis.call('ZCOUNT', l.redis_key, '-inf', int(t))
    for_each_power(l.powers, function(letter, power)
      local last = letter .. string.format('%016.0f', t) .. ';'
      count = count + power * redis.call('ZLEXCOUNT', l.redis_key .. '${beyond_one}', '[' .. letter, '(' .. last)
    end)
    return count
  end

  function leases.initial(l)
    l.base, l.next_number, l.powers, l.is_new = l.now, 1, 0, true
    l.stored_permits, l.live_permits, l.ended_permits = 0, 0, 0
  end

  function leases.resolve(l, entry)
    l.base, l.stored_permits, l.next_number, l.powers = entry[5] - l.shift, entry[6], entry[7], entry[8] or 0
    -- The server may have evicted the set.
    if l.stored_permits > 0 and redis.call('EXISTS', l.redis_key) == 0 then return leases.initial(l) end
    l.ended_permits = permits_ending_by(l, l.now - l.base)
    l.live_permits = l.stored_permits - l.ended_permits
  end

  function leases.check(l)
    local capacity = l.params[6]
    if l.cost > capacity then l.retry = NEVER return end
    local need = l.live_permits + l.cost - capacity
    if need <= 0 then l.ok = true return end
    -- Find the first lease at whose expiry enough permits have ended. The leases are sorted by expiry. The rank
    -- of this lease is between `first` and `last`. It is below `need`, because each lease has at least one permit.
    need = need + l.ended_permits
    local size = redis.call('ZCARD', l.redis_key)
    local first, last = 0, math.min(need, size) - 1
    local function expiry(rank)
      return tonumber(redis.call('ZRANGE', l.redis_key, int(rank), int(rank), 'WITHSCORES')[2])
    end
    if last < 0 or permits_ending_by(l, expiry(last)) < need then
      error('the leases of a limit are fewer than its count: reset the key')
    end
    if l.powers == 0 then first = last end
    local function narrow(rank)
      if permits_ending_by(l, expiry(rank)) < need then first = rank + 1 else last = rank end
    end
    -- If large and small leases are mixed evenly, the rank of this lease is close to `likely`. Two steps there save
    -- about ten steps of the loop below. Each step of this loop halves the range.
    local likely = math.floor(need / l.stored_permits * size)
    for _, rank in ipairs({likely - 64, likely + 64}) do
      if first <= rank and rank < last then narrow(rank) end
    end
    while first < last do narrow(math.floor((first + last) / 2)) end
    l.retry = expiry(last) + l.base - l.now
    if l.announces then
      local key = l.redis_key .. '${announced}'
      redis.pcall('INCR', key)
      redis.pcall('PEXPIRE', key, math.ceil(l.retry / 1000))
    end
  end

  -- Wakes callers that wait for a release, at most one for each permit that was given back.
  local function wake(l, count)
    local key, freed = l.redis_key .. '${announced}', l.redis_key .. '${freed}'
    local announced = redis.pcall('GET', key)
    if type(announced) ~= 'string' then return end
    count = math.min(count, tonumber(announced), l.params[6])
    for _ = 1, count do redis.pcall('RPUSH', freed, '1') end
    redis.pcall('PEXPIRE', freed, math.ceil(l.params[1] / 1000))
    if redis.pcall('DECRBY', key, int(count)) == 0 then redis.pcall('DEL', key) end
  end

  -- Calls `act` with each member that a lease has in the third key, and with the member's power of two.
  local function for_each_member(number, count, expiry, act)
    for_each_power(count - 1, function(letter, power)
      act(letter .. string.format('%016.0f', expiry) .. ':' .. number, power)
    end)
  end

  -- Removes one lease from all three keys.
  local function remove_lease(l, member, expiry)
    local label, name = string.match(member, '^(%d+:%d+):(.*)$')
    local number, count = string.match(label, '^(%d+):(%d+)$')
    redis.call('ZREM', l.redis_key, member)
    for_each_member(number, tonumber(count), expiry, function(other_member)
      redis.call('ZREM', l.redis_key .. '${beyond_one}', other_member)
    end)
    local left = {}
    for other_label in string.gmatch(redis.call('HGET', l.redis_key .. '${by_name}', name) or '', '%S+') do
      if other_label ~= label then left[#left + 1] = other_label end
    end
    if #left == 0 then
      redis.call('HDEL', l.redis_key .. '${by_name}', name)
    else
      redis.call('HSET', l.redis_key .. '${by_name}', name, table.concat(left, ' '))
    end
    l.stored_permits = l.stored_permits - permits_of(member)
  end

  local function delete_all(l)
    redis.call('UNLINK', l.redis_key, l.redis_key .. '${by_name}', l.redis_key .. '${beyond_one}')
    l.stored_permits, l.ended_permits, l.powers = 0, 0, 0
  end

  -- Removes some of the ended leases, or all leases if all have ended. A charge removes more leases than it adds, so
  -- the number of ended leases does not grow without limit.
  local function remove_ended(l)
    if l.is_new or l.live_permits == 0 then delete_all(l) l.is_new = false end
    if l.ended_permits == 0 then return end
    local by = int(l.now - l.base)
    local ended = redis.call('ZRANGEBYSCORE', l.redis_key, '-inf', by, 'WITHSCORES', 'LIMIT', 0, MAX_REMOVED)
    for i = 1, #ended, 2 do
      l.ended_permits = l.ended_permits - permits_of(ended[i])
      remove_lease(l, ended[i], tonumber(ended[i + 1]))
    end
  end

  local function add_lease(l, name, count, expiry)
    local label = int(l.next_number) .. ':' .. int(count)
    local current = redis.call('HGET', l.redis_key .. '${by_name}', name)
    if l.stored_permits == 0 then redis.call('ZADD', l.redis_key .. '${beyond_one}', 0, '') end
    redis.call('ZADD', l.redis_key, int(expiry), label .. ':' .. name)
    for_each_member(int(l.next_number), count, expiry, function(other_member, power)
      redis.call('ZADD', l.redis_key .. '${beyond_one}', 0, other_member)
      if l.powers % (2 * power) < power then l.powers = l.powers + power end
    end)
    redis.call('HSET', l.redis_key .. '${by_name}', name, current and current .. ' ' .. label or label)
    l.next_number = l.next_number + 1
    l.stored_permits, l.live_permits = l.stored_permits + count, l.live_permits + count
  end

  function leases.charge(l)
    remove_ended(l)
    add_lease(l, l.lease, l.cost, l.now + l.params[1] - l.base)
  end

  -- Returns two lists: the leases with the request's name that have not ended, the oldest first, and their expiries.
  local function leases_of_name(l)
    local out, expiries = {}, {}
    for label in string.gmatch(redis.call('HGET', l.redis_key .. '${by_name}', l.lease) or '', '%S+') do
      local member = label .. ':' .. l.lease
      local expiry = tonumber(redis.call('ZSCORE', l.redis_key, member))
      if expiry > l.now - l.base then
        out[#out + 1] = member
        expiries[#out] = expiry
      end
    end
    return out, expiries
  end

  -- Ends all leases with the request's name. Does not remove leases that have ended already: they count again if the
  -- clock steps back before the next charge.
  function leases.release(l)
    local members, expiries = leases_of_name(l)
    local before = l.live_permits
    for i = 1, #members do
      l.live_permits = l.live_permits - permits_of(members[i])
      remove_lease(l, members[i], expiries[i])
    end
    if #members > 0 then wake(l, before - l.live_permits) end
    return #members > 0
  end

  -- Gives back permits of the leases with the request's name, the newest lease first.
  function leases.refund(l)
    local left, members, expiries = l.cost, leases_of_name(l)
    for i = #members, 1, -1 do
      local count = permits_of(members[i])
      if left > 0 then
        remove_lease(l, members[i], expiries[i])
        l.live_permits = l.live_permits - count
        if count > left then add_lease(l, l.lease, count - left, expiries[i]) end
        left = math.max(left - count, 0)
      end
    end
    if left < l.cost then wake(l, l.cost - left) end
    return left < l.cost
  end

  function leases.standing(l)
    local reset = 0
    if l.live_permits > 0 then
      reset = tonumber(redis.call('ZREVRANGE', l.redis_key, 0, 0, 'WITHSCORES')[2]) + l.base - l.now
    end
    return math.max(l.params[6] - l.live_permits, 0), reset
  end

  function leases.entry(l, last)
    if l.is_new then remove_ended(l) end
    local newest = redis.call('ZREVRANGE', l.redis_key, 0, 0, 'WITHSCORES')[2]
    local life = newest and tonumber(newest) + l.base - l.now or 0
    return {l.name, l.code, 0, last, l.base, l.stored_permits, l.next_number, l.powers}, life
  end

  function leases.keep(l, ttl)
    if ttl then
      for _, ending in ipairs({'', '${by_name}', '${beyond_one}'}) do
        redis.call('PEXPIRE', l.redis_key .. ending, ttl)
      end
    end
  end

  leases.reset = delete_all

  ALGORITHMS[11] = leases
end
