-- concurrency (11): at most `capacity` permits are in use at once. Each admitted request holds a lease for its permits,
-- which ends when it is released, or by itself after lease_ttl. A lease that has ended may stay in the sets for some time.
--
-- own      sorted set of leases by expiry (µs after the entry's base): members "number:permits:name"
-- own:n    hash: name -> "number:permits" of the leases with this name, separated by spaces
-- own:x    sorted set for leases with more than one permit. `own` has one member for each lease, which counts one permit.
--          The other permits are split into powers of two, and each power has a member here: a letter for the power ("A"
--          is 1, "B" is 2), expiry (16 digits), ":", number. All scores are 0, so the members are in the order of power
--          and expiry. So one count for each power gives the permits of all leases that end by a moment, without reading
--          the leases. An empty member keeps the set alive as long as `own`: while a slot of a cluster moves, a node runs
--          a script only if it has all keys of the script.
-- Entry: name, algorithm, expiry, last, base, total (permits in the sets, also those of ended leases), next number, `extra`
-- (the sum of the powers of two that may be in own:x).
-- Params: lease_ttl, -, -, -, -, capacity.
-- Limit (l): live are the permits of leases that have not ended, gone are those of ended leases; fresh: forget all leases.
do
  local leases = {}
  -- Maximum number of ended leases that one charge removes.
  local MAX_REMOVED = 4

  local function permits(member)
    return tonumber(string.match(member, '^%d+:(%d+):'))
  end

  -- Splits `number` into powers of two, and calls `act` with the letter and the value of each.
  local function powers(number, act)
    local letter, power = 65, 1
    while number > 0 do
      if number % 2 == 1 then act(string.char(letter), power) end
      number, letter, power = (number - number % 2) / 2, letter + 1, power * 2
    end
  end

  -- Returns the permits of all leases that end by `t`.
  local function ending_by(l, t)
    local count = redis.call('ZCOUNT', l.own, '-inf', int(t))
    powers(l.extra, function(letter, power)
      local last = letter .. string.format('%016.0f', t) .. ';'
      count = count + power * redis.call('ZLEXCOUNT', l.own .. '${beyond_one}', '[' .. letter, '(' .. last)
    end)
    return count
  end

  function leases.initial(l)
    l.base, l.total, l.number, l.extra, l.live, l.gone, l.fresh = l.now, 0, 1, 0, 0, 0, true
  end

  function leases.resolve(l, e)
    l.base, l.total, l.number, l.extra = e[5] - l.shift, e[6], e[7], e[8] or 0
    -- The server may have evicted the set.
    if l.total > 0 and redis.call('EXISTS', l.own) == 0 then return leases.initial(l) end
    l.gone = ending_by(l, l.now - l.base)
    l.live = l.total - l.gone
  end

  function leases.check(l)
    local capacity = l.p[6]
    if l.cost > capacity then l.retry = NEVER return end
    local need = l.live + l.cost - capacity
    if need <= 0 then l.ok = true return end
    -- Find the first lease such that `need` permits have ended when it ends. Each lease has at least one permit.
    need = need + l.gone
    local size = redis.call('ZCARD', l.own)
    local first, last = 0, math.min(need, size) - 1
    local function expiry(rank)
      return tonumber(redis.call('ZRANGE', l.own, int(rank), int(rank), 'WITHSCORES')[2])
    end
    if last < 0 or ending_by(l, expiry(last)) < need then
      error('the leases of a limit are fewer than its count: reset the key')
    end
    if l.extra == 0 then first = last end
    local function look(rank)
      if ending_by(l, expiry(rank)) < need then first = rank + 1 else last = rank end
    end
    -- If large and small leases are mixed evenly, the rank is close to `likely`. Two looks there save about ten halvings.
    local likely = math.floor(need / l.total * size)
    for _, rank in ipairs({likely - 64, likely + 64}) do
      if first <= rank and rank < last then look(rank) end
    end
    while first < last do look(math.floor((first + last) / 2)) end
    l.retry = expiry(last) + l.base - l.now
  end

  -- Calls `act` with each member of own:x that belongs to one lease.
  local function extras(number, count, expiry, act)
    powers(count - 1, function(letter, power)
      act(letter .. string.format('%016.0f', expiry) .. ':' .. number, power)
    end)
  end

  -- Removes one lease from all three keys.
  local function drop(l, member, expiry)
    local short, name = string.match(member, '^(%d+:%d+):(.*)$')
    local number, count = string.match(short, '^(%d+):(%d+)$')
    redis.call('ZREM', l.own, member)
    extras(number, tonumber(count), expiry, function(extra) redis.call('ZREM', l.own .. '${beyond_one}', extra) end)
    local left = {}
    for other in string.gmatch(redis.call('HGET', l.own .. '${by_name}', name) or '', '%S+') do
      if other ~= short then left[#left + 1] = other end
    end
    if #left == 0 then
      redis.call('HDEL', l.own .. '${by_name}', name)
    else
      redis.call('HSET', l.own .. '${by_name}', name, table.concat(left, ' '))
    end
    l.total = l.total - permits(member)
  end

  local function forget(l)
    redis.call('UNLINK', l.own, l.own .. '${by_name}', l.own .. '${beyond_one}')
    l.total, l.gone, l.extra = 0, 0, 0
  end

  -- Removes some ended leases, or everything if no lease is live. Each charge removes more leases than it adds, so ended
  -- leases do not accumulate.
  local function trim(l)
    if l.fresh or l.live == 0 then forget(l) l.fresh = false end
    if l.gone == 0 then return end
    local by = int(l.now - l.base)
    local ended = redis.call('ZRANGEBYSCORE', l.own, '-inf', by, 'WITHSCORES', 'LIMIT', 0, MAX_REMOVED)
    for i = 1, #ended, 2 do
      l.gone = l.gone - permits(ended[i])
      drop(l, ended[i], tonumber(ended[i + 1]))
    end
  end

  local function add(l, name, count, expiry)
    local short = int(l.number) .. ':' .. int(count)
    local current = redis.call('HGET', l.own .. '${by_name}', name)
    if l.total == 0 then redis.call('ZADD', l.own .. '${beyond_one}', 0, '') end
    redis.call('ZADD', l.own, int(expiry), short .. ':' .. name)
    extras(int(l.number), count, expiry, function(extra, power)
      redis.call('ZADD', l.own .. '${beyond_one}', 0, extra)
      if l.extra % (2 * power) < power then l.extra = l.extra + power end
    end)
    redis.call('HSET', l.own .. '${by_name}', name, current and current .. ' ' .. short or short)
    l.number, l.total, l.live = l.number + 1, l.total + count, l.live + count
  end

  function leases.charge(l)
    trim(l)
    add(l, l.lease, l.cost, l.now + l.p[1] - l.base)
  end

  -- Returns the leases of the request's name that have not ended, oldest first, and their expiries.
  local function leases_of_name(l)
    local out, expiries = {}, {}
    for short in string.gmatch(redis.call('HGET', l.own .. '${by_name}', l.lease) or '', '%S+') do
      local member = short .. ':' .. l.lease
      local expiry = tonumber(redis.call('ZSCORE', l.own, member))
      if expiry > l.now - l.base then
        out[#out + 1] = member
        expiries[#out] = expiry
      end
    end
    return out, expiries
  end

  -- Release and refund do not remove ended leases: these are live again if the clock steps back before the next charge.
  function leases.release(l)
    local members, expiries = leases_of_name(l)
    for i = 1, #members do
      l.live = l.live - permits(members[i])
      drop(l, members[i], expiries[i])
    end
    return #members > 0
  end

  -- Gives back permits of the named leases, the newest first.
  function leases.refund(l)
    local left, members, expiries = l.cost, leases_of_name(l)
    for i = #members, 1, -1 do
      local count = permits(members[i])
      if left > 0 then
        drop(l, members[i], expiries[i])
        l.live = l.live - count
        if count > left then add(l, l.lease, count - left, expiries[i]) end
        left = math.max(left - count, 0)
      end
    end
    return left < l.cost
  end

  function leases.standing(l)
    local reset = 0
    if l.live > 0 then
      reset = tonumber(redis.call('ZREVRANGE', l.own, 0, 0, 'WITHSCORES')[2]) + l.base - l.now
    end
    return math.max(l.p[6] - l.live, 0), reset
  end

  function leases.entry(l, last)
    if l.fresh then trim(l) end
    local newest = redis.call('ZREVRANGE', l.own, 0, 0, 'WITHSCORES')[2]
    local life = newest and tonumber(newest) + l.base - l.now or 0
    return {l.name, l.code, 0, last, l.base, l.total, l.number, l.extra}, life
  end

  function leases.keep(l, ttl)
    if ttl then
      for _, ending in ipairs({'', '${by_name}', '${beyond_one}'}) do redis.call('PEXPIRE', l.own .. ending, ttl) end
    end
  end

  leases.reset = forget

  A[11] = leases
end
