-- token_bucket (1), gcra (2), leaky_bucket (3) and leaky_bucket_queue (4) work in the same way: a charge adds to a debt,
-- and the debt shrinks as time passes. The debt is the exact time (µs) until all spent permits have come back.
-- A permit takes q + r/n µs. The debt is T + g/(n*m) µs. m is 1, unless the rate has changed and the fraction of the old
-- debt needs a larger denominator.
-- Entry: name, algorithm, expiry, last, q, r, n, m, T, g.   Params: q, r, n, room T, room g, capacity, then the permits
-- spent in a new state (token_bucket) or `delay_after` (queue). Room is the largest debt that is allowed: the time that
-- `capacity` permits take. In a queue with a capacity above 0 it is the time of one permit more.
do
  local E_Q, E_R, E_N, E_M, E_T, E_G = 5, 6, 7, 8, 9, 10

  local LEVEL, FRACTION, STRETCHED = '<I7I7I7', '<I7I7I4I4I7I4', '<ddddddd'

  local level = {}

  -- Uses the shortest form that has room for the numbers. fast.lua can read LEVEL and FRACTION.
  function level.pack(entry)
    if entry[E_N] == 1 and entry[E_M] == 1 then return struct.pack(LEVEL, entry[4], entry[E_Q], entry[E_T]) end
    if entry[E_N] < 4294967296 and entry[E_M] == 1 then
      return struct.pack(FRACTION, entry[4], entry[E_Q], entry[E_R], entry[E_N], entry[E_T], entry[E_G])
    end
    return struct.pack(STRETCHED, unpack(entry, 4, 10))
  end

  function level.unpack(raw, at)
    local size = #raw - at + 1
    if size == 21 then
      local last, q, T = struct.unpack(LEVEL, raw, at)
      return last, q, 0, 1, 1, T, 0
    elseif size == 33 then
      local last, q, r, n, T, g = struct.unpack(FRACTION, raw, at)
      return last, q, r, n, 1, T, g
    end
    return struct.unpack(STRETCHED, raw, at)
  end

  -- Returns the time that `count` permits take, as a pair over n*m.
  local function permits(l, count)
    local p = l.p
    local whole, part = muldiv(count, p[2], p[3])
    return whole + count * p[1], part * l.m
  end

  -- Returns how many permits the limit accepts at once when nothing is spent.
  local function accepted(l)
    local capacity = l.p[6]
    return l.code == 4 and capacity > 0 and capacity + 1 or capacity
  end

  function level.initial(l)
    local p = l.p
    l.m = 1
    l.T, l.g = 0, 0
    if l.code == 1 and p[7] > 0 then l.T, l.g = permits(l, p[7]) end
  end

  local function drain(l, elapsed)
    if elapsed > l.T or (elapsed == l.T and l.g == 0) then
      l.T, l.g, l.m = 0, 0, 1
    elseif elapsed > 0 then
      l.T = l.T - elapsed
    end
  end

  -- Returns the debt after a change of the rate, (T + g/(n*m)) * new interval / old interval, as whole, part and m. It is
  -- exact if a denominator below 2^52 is enough. Otherwise it is rounded up, by too little to change any answer.
  local function stretch(l, e)
    local p, n = l.p, l.p[3]
    local debt = plus(times(times(big(l.T), big(e[E_N])), big(l.m)), big(l.g))
    local top = times(debt, plus(times(big(p[1]), big(n)), big(p[2])))
    local unit = times(big(l.m), plus(times(big(e[E_Q]), big(e[E_N])), big(e[E_R])))
    -- Returns the greatest x with (base + x) * unit <= over.
    local function most(base, unit, over)
      local x, bit = 0, 4503599627370496
      while bit >= 1 do
        if at_most(times(plus(base, big(x + bit)), unit), over) then x = x + bit end
        bit = bit / 2
      end
      return x
    end
    local whole = most(big(0), times(unit, big(n)), top)
    local base, m = times(big(whole), big(n)), 1
    local part = most(base, unit, top)
    if at_most(top, times(plus(base, big(part)), unit)) then return whole, part, 1 end
    local below = l.m * (e[E_Q] * e[E_N] + e[E_R])
    if below < 9007199254740992 then
      -- Calculate the denominator of top / unit in lowest terms.
      local _, x = muldiv(l.T % below, e[E_N] * l.m % below, below)
      local _, y = muldiv(p[1] % below, n % below, below)
      local _, rest = muldiv((x + l.g) % below, (y + p[2]) % below, below)
      m = below / gcd(rest, below)
      if n * m < 4503599627370496 then return whole, most(times(base, big(m)), unit, times(top, big(m))), m end
      m = 1
    end
    while n * m < 2251799813685248 do m = m * 2 end
    part = most(times(base, big(m)), unit, times(top, big(m))) + 1
    if part == n * m then return whole + 1, 0, 1 end
    return whole, part, m
  end

  function level.use_stored_params(l, e)
    local p = l.p
    p[1], p[2], p[3], l.m = e[E_Q], e[E_R], e[E_N], 1
    p[4], p[5] = permits(l, accepted(l))
  end

  function level.resolve(l, e)
    local p = l.p
    l.m, l.T, l.g = e[E_M], e[E_T], e[E_G]
    local from = e[4]
    if e[E_Q] ~= p[1] or e[E_R] ~= p[2] or e[E_N] ~= p[3] then
      -- The state was written at another rate. Keep the number of spent permits, and calculate their time at the new rate.
      drain(l, l.changed - from)
      from = l.changed
      l.T, l.g, l.m = stretch(l, e)
      -- Limit the debt to 142 years: a longer one would not be exact, and makes no difference.
      if l.T > 4503599627370496 then l.T, l.g, l.m = 4503599627370496, 0, 1 end
    end
    drain(l, l.now - from)
  end

  function level.check(l)
    local p, c = l.p, l.cost
    local queue = l.code == 4
    if c > accepted(l) then l.retry = NEVER return end
    local n = p[3] * l.m
    local T, g = permits(l, c)
    T, g = l.T + T - p[4], l.g + g - p[5] * l.m
    if g < 0 then T, g = T - 1, g + n elseif g >= n then T, g = T + 1, g - n end
    local over = g > 0 and T + 1 or T
    if queue then
      T, g = permits(l, p[7])
      T, g = l.T - T, l.g - g
      if g < 0 then T, g = T - 1, g + n end
      local wait = math.max(g > 0 and T + 1 or T, 0)
      if over <= 0 and (l.timeout == ANY or wait <= l.timeout) then
        l.ok, l.wait = true, wait
      else
        l.retry = l.timeout == ANY and over or math.max(over, wait - l.timeout)
      end
    elseif over <= 0 then
      l.ok = true
    elseif l.code <= 2 and (l.timeout == ANY or over <= l.timeout) then
      l.ok, l.wait = true, over
    else
      l.retry = l.code <= 2 and over - math.max(l.timeout, 0) or over
    end
  end

  function level.charge(l)
    local T, g = permits(l, l.cost)
    local n = l.p[3] * l.m
    T, g = l.T + T, l.g + g
    if g >= n then T, g = T + 1, g - n end
    if T > 4503599627370496 then T, g = 4503599627370496, 0 end
    l.T, l.g = T, g
  end

  function level.refund(l)
    if l.T == 0 and l.g == 0 then return false end
    local T, g = permits(l, math.min(l.cost, 1e12))
    if T > l.T or (T == l.T and g >= l.g) then
      l.T, l.g, l.m = 0, 0, 1
    else
      T, g = l.T - T, l.g - g
      if g < 0 then T, g = T - 1, g + l.p[3] * l.m end
      l.T, l.g = T, g
    end
    return true
  end

  function level.standing(l)
    local p = l.p
    local T, g = p[4] - l.T, p[5] * l.m - l.g
    if g < 0 then T, g = T - 1, g + p[3] * l.m end
    return intervals(T, g, p[1], p[2], p[3], l.m), l.g > 0 and l.T + 1 or l.T
  end

  function level.entry(l, last)
    local p = l.p
    -- After a refund `last` may be before now. Then write the debt that there was at `last`.
    local T, g, m = l.T, l.g, l.m
    if l.now > last and (T > 0 or g > 0) then T = T + l.now - last end
    return {l.name, l.code, 0, last, p[1], p[2], p[3], m, T, g}, math.max(l.code == 1 and p[7] > 0 and FOREVER or 0, T + 1)
  end

  A[1], A[2], A[3], A[4] = level, level, level, level
end
