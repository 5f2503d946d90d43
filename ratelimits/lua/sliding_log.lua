-- sliding_log (8): at most capacity in any interval of `period`, by the times of all that was charged.
-- The times are a list (packed by the server, 11 times smaller than a sorted set), oldest first, each "t" or "t:count"
-- for several at one moment, in µs from the entry's base. They never step back: a decision is made as at `last` or later.
-- Entry: name, algorithm, expiry, last, period, base, total (of the list).   Params: period, -, -, -, -, capacity.
do
  local log = {}

  local function parse(item)
    local colon = string.find(item, ':', 1, true)
    if colon then return tonumber(string.sub(item, 1, colon - 1)), tonumber(string.sub(item, colon + 1)) end
    return tonumber(item), 1
  end

  local function item(t, count)
    return count == 1 and int(t) or int(t) .. ':' .. int(count)
  end

  function log.birth(l)
    l.base, l.total, l.live, l.ended, l.fresh = l.now, 0, 0, 0, true
  end

  -- Counts what has ended by `now` without touching it: a refusal or a peek changes nothing.
  local function expire(l, now, period)
    local at, gone = l.ended, 0
    while gone < l.live do
      local items = redis.call('LRANGE', l.own, at, at + 63)
      if #items == 0 then gone = l.live break end -- the server has let go of the list
      for i = 1, #items do
        local t, count = parse(items[i])
        if t + l.base + period > now then
          l.ended, l.live = at + i - 1, l.live - gone
          return
        end
        gone = gone + count
      end
      at = at + #items
    end
    l.ended, l.live = at, l.live - gone
  end

  function log.under(l, e) l.p[1] = e[5] end

  function log.resolve(l, e)
    l.base, l.total = e[6] - l.shift, e[7]
    l.live, l.ended = l.total, 0
    if e[5] ~= l.p[1] then
      -- What had ended under the old period does not come back under a longer one.
      expire(l, l.changed, e[5])
      l.cut, l.lost = l.ended, l.total - l.live
    end
    expire(l, l.now, l.p[1])
  end

  function log.check(l)
    local capacity = l.p[6]
    if l.cost > capacity then l.retry = NEVER return end
    local need = l.live + l.cost - capacity
    if need <= 0 then l.ok = true return end
    local at = l.ended
    while true do
      local items = redis.call('LRANGE', l.own, at, at + 63)
      for i = 1, #items do
        local t, count = parse(items[i])
        need = need - count
        if need <= 0 then l.retry = t + l.base + l.p[1] - l.now return end
      end
      if #items == 0 then error('the log of a limit is shorter than its count: reset the key') end
      at = at + #items
    end
  end

  local function trim(l)
    if l.fresh then redis.call('DEL', l.own) l.fresh = false end
    if l.ended > 0 then redis.call('LTRIM', l.own, l.ended, -1) l.ended = 0 end
    l.total, l.cut = l.live, nil
  end

  function log.charge(l)
    trim(l)
    local t, count = l.now - l.base, l.cost
    if l.now == l.last and l.live > 0 then
      local tail, many = parse(redis.call('LINDEX', l.own, -1))
      if tail == t then
        redis.call('RPOP', l.own)
        count = count + many
      end
    end
    redis.call('RPUSH', l.own, item(t, count))
    l.live, l.total = l.live + l.cost, l.total + l.cost
  end

  function log.refund(l)
    -- Nothing is trimmed here: a clock that steps back before the next charge finds what has ended since.
    local cost = math.min(l.cost, l.live)
    local left = cost
    local at = redis.call('LLEN', l.own) - 1
    while left > 0 and at >= 0 do
      local t, count = parse(redis.call('LINDEX', l.own, at))
      if l.charged_at > 0 and t + l.base < l.charged_at then break end
      if l.charged_at == 0 or t + l.base == l.charged_at then
        local given = math.min(left, count)
        if given < count then
          redis.call('LSET', l.own, at, item(t, count - given))
        else
          redis.call('LSET', l.own, at, '-')
          redis.call('LREM', l.own, -1, '-')
        end
        left, l.live, l.total = left - given, l.live - given, l.total - given
      end
      at = at - 1
    end
    return left < cost
  end

  function log.measure(l)
    local reset = 0
    if l.live > 0 then reset = parse(redis.call('LINDEX', l.own, -1)) + l.base + l.p[1] - l.now end
    return math.max(l.p[6] - l.live, 0), reset
  end

  function log.entry(l, last)
    if l.fresh then trim(l) end
    if l.cut then
      redis.call('LTRIM', l.own, l.cut, -1)
      l.total, l.ended = l.total - l.lost, l.ended - l.cut
    end
    return {l.name, l.code, 0, last, l.p[1], l.base, l.total}, l.p[1] + math.max(l.now - last, 0)
  end

  function log.keep(l, ttl)
    if ttl then redis.call('PEXPIRE', l.own, ttl) else redis.call('PERSIST', l.own) end
  end

  function log.reset(l) redis.call('DEL', l.own) end

  A[8] = log
end
