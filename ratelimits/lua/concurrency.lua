-- concurrency (11): at most capacity in flight. Every acquire is a lease with an expiry of its own.
-- own      sorted set of leases by expiry (µs from the entry's base): members "number:permits:name"
-- own:n    hash: name -> "number:permits" of its leases, a space between two
-- Entry: name, algorithm, expiry, last, base, total (of the set, ended leases included), next number.
-- Params: lease_ttl, -, -, -, -, capacity.
do
  local leases = {}

  local function permits(member)
    return tonumber(string.match(member, '^%d+:(%d+):'))
  end

  function leases.birth(l)
    l.base, l.total, l.number, l.live, l.fresh = l.now, 0, 1, 0, true
  end

  function leases.resolve(l, e)
    l.base, l.total, l.number = e[5] - l.shift, e[6], e[7]
    -- The server may have let go of the set.
    if l.total > 0 and redis.call('EXISTS', l.own) == 0 then return leases.birth(l) end
    l.ended = redis.call('ZRANGEBYSCORE', l.own, '-inf', int(l.now - l.base))
    l.live = l.total
    for i = 1, #l.ended do l.live = l.live - permits(l.ended[i]) end
  end

  function leases.check(l)
    local capacity = l.p[6]
    if l.cost > capacity then l.retry = NEVER return end
    local need, at = l.live + l.cost - capacity, l.ended and #l.ended or 0
    if need <= 0 then l.ok = true return end
    while true do
      local items = redis.call('ZRANGE', l.own, at, at + 63, 'WITHSCORES')
      for i = 1, #items, 2 do
        need = need - permits(items[i])
        if need <= 0 then l.retry = tonumber(items[i + 1]) + l.base - l.now return end
      end
      if #items == 0 then error('the leases of a limit are fewer than its count: reset the key') end
      at = at + #items / 2
    end
  end

  -- Takes one lease out of the set and out of its name.
  local function drop(l, member)
    local short, name = string.match(member, '^(%d+:%d+):(.*)$')
    redis.call('ZREM', l.own, member)
    local left = {}
    for other in string.gmatch(redis.call('HGET', l.own .. ':n', name) or '', '%S+') do
      if other ~= short then left[#left + 1] = other end
    end
    if #left == 0 then
      redis.call('HDEL', l.own .. ':n', name)
    else
      redis.call('HSET', l.own .. ':n', name, table.concat(left, ' '))
    end
    l.total = l.total - permits(member)
  end

  local function trim(l)
    if l.fresh then redis.call('DEL', l.own, l.own .. ':n') l.fresh = false end
    for i = 1, l.ended and #l.ended or 0 do drop(l, l.ended[i]) end
    l.ended = nil
  end

  local function add(l, name, count, expiry)
    local short = int(l.number) .. ':' .. int(count)
    local held = redis.call('HGET', l.own .. ':n', name)
    redis.call('ZADD', l.own, int(expiry), short .. ':' .. name)
    redis.call('HSET', l.own .. ':n', name, held and held .. ' ' .. short or short)
    l.number, l.total, l.live = l.number + 1, l.total + count, l.live + count
  end

  function leases.charge(l)
    trim(l)
    add(l, l.lease, l.cost, l.now + l.p[1] - l.base)
  end

  -- The leases of the name that have not ended, oldest first, and their expiries.
  local function held(l)
    local out, expiries = {}, {}
    for short in string.gmatch(redis.call('HGET', l.own .. ':n', l.lease) or '', '%S+') do
      local member = short .. ':' .. l.lease
      local expiry = tonumber(redis.call('ZSCORE', l.own, member))
      if expiry > l.now - l.base then
        out[#out + 1] = member
        expiries[#out] = expiry
      end
    end
    return out, expiries
  end

  -- Neither of these trims: a clock that steps back before the next charge finds what has ended since.
  function leases.release(l)
    local members = held(l)
    for i = 1, #members do
      l.live = l.live - permits(members[i])
      drop(l, members[i])
    end
    return #members > 0
  end

  -- Makes the named lease smaller, its newest part first.
  function leases.refund(l)
    local left, members, expiries = l.cost, held(l)
    for i = #members, 1, -1 do
      local count = permits(members[i])
      if left > 0 then
        drop(l, members[i])
        l.live = l.live - count
        if count > left then add(l, l.lease, count - left, expiries[i]) end
        left = math.max(left - count, 0)
      end
    end
    return left < l.cost
  end

  function leases.measure(l)
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
    return {l.name, l.code, 0, last, l.base, l.total, l.number}, life
  end

  function leases.keep(l, ttl)
    if ttl then
      redis.call('PEXPIRE', l.own, ttl)
      redis.call('PEXPIRE', l.own .. ':n', ttl)
    end
  end

  function leases.reset(l) redis.call('DEL', l.own, l.own .. ':n') end

  A[11] = leases
end
