-- token_bucket (1), gcra (2), leaky_bucket (3) and leaky_bucket_queue (4) work in the same way. Each charge adds to a
-- debt, and the debt becomes smaller as time passes.
-- One permit takes q + r/n µs. The debt is the exact time until all spent permits have come back: T + g/(n*m) µs.
-- Usually m is 1. After a change of the rate, the fraction of the old debt may need a larger denominator. Then m is
-- larger. The *room* is the largest debt that is allowed. It is the time that `capacity` permits take, as a pair over
-- n (see prelude.lua). In a queue with a capacity above 0, the room is the time that capacity + 1 permits take.
-- Entry: name, algorithm, expiry, last, q, r, n, m, T, g.
-- Params: q, r, n, the pair of the room (two params), capacity, and one more: for token_bucket the number of permits
-- that are already spent in a new state, for a queue `delay_after`.
do
  -- The positions in an entry.
  local E_Q, E_R, E_N, E_M, E_T, E_G = 5, 6, 7, 8, 9, 10

  -- The formats of the payload: without fractions (r is 0), with fractions, and with m above 1. fast.lua reads only
  -- the first two.
  local WHOLE, FRACTION, STRETCHED = '<I7I7I7', '<I7I7I4I4I7I4', '<ddddddd'

  local level = {}

  -- Uses the shortest format for these numbers.
  function level.pack(entry)
    if entry[E_N] == 1 and entry[E_M] == 1 then return struct.pack(WHOLE, entry[4], entry[E_Q], entry[E_T]) end
    if entry[E_N] < 4294967296 and entry[E_M] == 1 then
      return struct.pack(FRACTION, entry[4], entry[E_Q], entry[E_R], entry[E_N], entry[E_T], entry[E_G])
    end
    return struct.pack(STRETCHED, unpack(entry, 4, 10))
  end

  function level.unpack(raw, at)
    local size = #raw - at + 1
    if size == 21 then
      local last, q, T = struct.unpack(WHOLE, raw, at)
      return last, q, 0, 1, 1, T, 0
    elseif size == 33 then
      local last, q, r, n, T, g = struct.unpack(FRACTION, raw, at)
      return last, q, r, n, 1, T, g
    end
    return struct.unpack(STRETCHED, raw, at)
  end

  -- Returns the time that `count` permits take, as a pair over n*m.
  local function time_of(l, count)
    local params = l.params
    local whole, part = muldiv(count, params[2], params[3])
    return whole + count * params[1], part * l.m
  end

  -- Returns the highest cost that the limit can admit, if no permits are spent.
  local function max_cost(l)
    local capacity = l.params[6]
    return l.code == 4 and capacity > 0 and capacity + 1 or capacity
  end

  function level.initial(l)
    local params = l.params
    l.m = 1
    l.T, l.g = 0, 0
    if l.code == 1 and params[7] > 0 then l.T, l.g = time_of(l, params[7]) end
  end

  -- Makes the debt smaller by the time (µs) that has passed.
  local function shrink_debt(l, elapsed)
    if elapsed > l.T or (elapsed == l.T and l.g == 0) then
      l.T, l.g, l.m = 0, 0, 1
    elseif elapsed > 0 then
      l.T = l.T - elapsed
    end
  end

  -- Returns the debt after a change of the rate: the old debt * new interval / old interval, as a pair over n*m, and
  -- this m. The result is exact if a denominator below 2^52 is enough. Otherwise it is rounded up, by so little that
  -- no decision changes.
  local function stretch(l, entry)
    local params, n = l.params, l.params[3]
    local debt = plus(times(times(big(l.T), big(entry[E_N])), big(l.m)), big(l.g))
    local top = times(debt, plus(times(big(params[1]), big(n)), big(params[2])))
    local unit = times(big(l.m), plus(times(big(entry[E_Q]), big(entry[E_N])), big(entry[E_R])))
    -- Returns the greatest x with (base + x) * unit <= product.
    local function greatest(base, unit, product)
      local x, bit = 0, 4503599627370496
      while bit >= 1 do
        if at_most(times(plus(base, big(x + bit)), unit), product) then x = x + bit end
        bit = bit / 2
      end
      return x
    end
    local whole = greatest(big(0), times(unit, big(n)), top)
    local base, m = times(big(whole), big(n)), 1
    local part = greatest(base, unit, top)
    if at_most(top, times(plus(base, big(part)), unit)) then return whole, part, 1 end
    local denominator = l.m * (entry[E_Q] * entry[E_N] + entry[E_R])
    if denominator < 9007199254740992 then
      -- Calculate the denominator of top / unit in lowest terms.
      local _, x = muldiv(l.T % denominator, entry[E_N] * l.m % denominator, denominator)
      local _, y = muldiv(params[1] % denominator, n % denominator, denominator)
      local _, rest = muldiv((x + l.g) % denominator, (y + params[2]) % denominator, denominator)
      m = denominator / gcd(rest, denominator)
      if n * m < 4503599627370496 then return whole, greatest(times(base, big(m)), unit, times(top, big(m))), m end
      m = 1
    end
    while n * m < 2251799813685248 do m = m * 2 end
    part = greatest(times(base, big(m)), unit, times(top, big(m))) + 1
    if part == n * m then return whole + 1, 0, 1 end
    return whole, part, m
  end

  function level.use_stored_params(l, entry)
    local params = l.params
    params[1], params[2], params[3], l.m = entry[E_Q], entry[E_R], entry[E_N], 1
    params[4], params[5] = time_of(l, max_cost(l))
  end

  function level.resolve(l, entry)
    local params = l.params
    l.m, l.T, l.g = entry[E_M], entry[E_T], entry[E_G]
    local from = entry[4]
    if entry[E_Q] ~= params[1] or entry[E_R] ~= params[2] or entry[E_N] ~= params[3] then
      -- The state was written at another rate. The spent permits stay spent. Calculate their time at the new rate.
      shrink_debt(l, l.changed - from)
      from = l.changed
      l.T, l.g, l.m = stretch(l, entry)
      -- Limit the debt to 142 years. A longer time would not be exact, and it would not change any decision.
      if l.T > 4503599627370496 then l.T, l.g, l.m = 4503599627370496, 0, 1 end
    end
    shrink_debt(l, l.now - from)
  end

  function level.check(l)
    local params, cost = l.params, l.cost
    local queue = l.code == 4
    if cost > max_cost(l) then l.retry = NEVER return end
    local n = params[3] * l.m
    local T, g = time_of(l, cost)
    T, g = l.T + T - params[4], l.g + g - params[5] * l.m
    if g < 0 then T, g = T - 1, g + n elseif g >= n then T, g = T + 1, g - n end
    local over = g > 0 and T + 1 or T -- the time (µs) by which the debt would be larger than the room
    if queue then
      T, g = time_of(l, params[7])
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
    local T, g = time_of(l, l.cost)
    local n = l.params[3] * l.m
    T, g = l.T + T, l.g + g
    if g >= n then T, g = T + 1, g - n end
    if T > 4503599627370496 then T, g = 4503599627370496, 0 end
    l.T, l.g = T, g
  end

  function level.refund(l)
    if l.T == 0 and l.g == 0 then return false end
    local T, g = time_of(l, math.min(l.cost, 1e12))
    if T > l.T or (T == l.T and g >= l.g) then
      l.T, l.g, l.m = 0, 0, 1
    else
      T, g = l.T - T, l.g - g
      if g < 0 then T, g = T - 1, g + l.params[3] * l.m end
      l.T, l.g = T, g
    end
    return true
  end

  function level.standing(l)
    local params = l.params
    local T, g = params[4] - l.T, params[5] * l.m - l.g
    if g < 0 then T, g = T - 1, g + params[3] * l.m end
    return intervals(T, g, params[1], params[2], params[3], l.m), l.g > 0 and l.T + 1 or l.T
  end

  function level.entry(l, last)
    local params = l.params
    -- After a refund `last` may be earlier than now. Then write the debt as it was at `last`.
    local T, g, m = l.T, l.g, l.m
    if l.now > last and (T > 0 or g > 0) then T = T + l.now - last end
    -- If a new bucket begins with spent permits, store its state for FOREVER. If the state expired, the bucket would be
    -- new, and would begin with spent permits again.
    local life = math.max(l.code == 1 and params[7] > 0 and FOREVER or 0, T + 1)
    return {l.name, l.code, 0, last, params[1], params[2], params[3], m, T, g}, life
  end

  ALGORITHMS[1], ALGORITHMS[2], ALGORITHMS[3], ALGORITHMS[4] = level, level, level, level
end
