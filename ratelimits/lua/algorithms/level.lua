-- token_bucket, gcra, leaky_bucket and leaky_bucket_queue work in the same way. (Their codes are 1, 2, 3 and 4:
-- `l.code`.) Each charge adds to a debt, and the debt becomes smaller as time passes.
-- One permit comes back in q + r/n µs, its *interval*. The debt is the time until all spent permits have come back. It
-- is stored as T + g/(n*m) µs, exactly. Usually m is 1. After a change of the rate, the fraction of the old debt may
-- need a larger denominator. Then m is larger.
-- The *room* is the largest debt that is allowed: the time in which `capacity` permits come back. It has two
-- fields, `room` and `part`: its length is room + part/n µs. A queue holds `capacity` permits that wait and one that
-- proceeds now, so its *room* is the time of capacity + 1 permits. With capacity 0 every request is refused.
-- `special` has two meanings. For token_bucket it is the number of permits that count as spent when a bucket is new.
-- For a queue it is `delay_after`: if at most this number of permits is ahead of a request, the request does not wait.
-- A record begins with the moment of the last charge, and the q, r and n of that moment. It has one of three forms:
-- without fractions (r is 0), with fractions, and with m above 1 or a large n.
-- "--@params" names the params of the limit. "--@record" names a form of the record and its fields, each after its
-- type: I7 is an unsigned integer of 7 bytes, and d a double. The fields after "|" are not stored: in this form they
-- always have the values that stand there.
--@params * q r n room part capacity special
--@record whole I7 last I7 stored_q I7 T | stored_r=0 stored_n=1 m=1 g=0
--@record fraction I7 last I7 stored_q I4 stored_r I4 stored_n I7 T I4 g | m=1
--@record stretched d last d stored_q d stored_r d stored_n d m d T d g

-- Returns T, g and m after a change of the rate. T + g/(n*m) is the new debt: old debt * new interval / old interval.
-- The result is exact if a denominator below 2^52 is enough. Otherwise it is rounded up, by so little that no decision
-- changes. 4503599627370496 is 2^52, 9007199254740992 is 2^53, and 2251799813685248 is 2^51.
--@rarely
local function stretch(T, g, m, old_q, old_r, old_n, q, r, n)
  local exact = exact_numbers()
  local big, times, plus, at_most, gcd = exact.big, exact.times, exact.plus, exact.at_most, exact.gcd
  -- Write the three factors as fractions: the old debt is debt/(old_n*m), the new interval is (q*n + r)/n, and the old
  -- interval is (old_q*old_n + old_r)/old_n. So the new debt is top / (unit * n).
  local debt = plus(times(times(big(T), big(old_n)), big(m)), big(g))
  local top = times(debt, plus(times(big(q), big(n)), big(r)))
  local unit = times(big(m), plus(times(big(old_q), big(old_n)), big(old_r)))

  -- Returns the greatest x with (base + x) * unit <= product.
  local function greatest(base, unit, product)
    local x, bit = 0, 4503599627370496
    while bit >= 1 do
      if at_most(times(plus(base, big(x + bit)), unit), product) then x = x + bit end
      bit = bit / 2
    end
    return x
  end
  -- The new debt is whole + part/n µs, rounded down.
  local whole = greatest(big(0), times(unit, big(n)), top)
  local base = times(big(whole), big(n))
  local part = greatest(base, unit, top)
  -- If nothing was lost by rounding down, the result is exact.
  if at_most(top, times(plus(base, big(part)), unit)) then return whole, part, 1 end
  local denominator = m * (old_q * old_n + old_r)
  if denominator < 9007199254740992 then
    -- Calculate the denominator of top / unit in lowest terms. `denominator` is `unit`. The second result of muldiv is
    -- a remainder. So x + g has the same remainder as `debt`, y + r the same as q*n + r, and their product the same as
    -- `top`.
    local _, x = muldiv(T % denominator, old_n * m % denominator, denominator)
    local _, y = muldiv(q % denominator, n % denominator, denominator)
    local _, rest = muldiv((x + g) % denominator, (y + r) % denominator, denominator)
    m = denominator / gcd(rest, denominator)
    if n * m < 4503599627370496 then return whole, greatest(times(base, big(m)), unit, times(top, big(m))), m end
  end
  m = 1
  while n * m < 2251799813685248 do m = m * 2 end
  part = greatest(times(base, big(m)), unit, times(top, big(m))) + 1
  if part == n * m then return whole + 1, 0, 1 end
  return whole, part, m
end

local level = {}

function level.initial(l)
  l.m, l.T, l.g = 1, 0, 0
  if l.code == 1 and l.special > 0 then
    l.T, l.g = muldiv(l.special, l.r, l.n)
    l.T = l.T + l.special * l.q
  end
end

-- Uses the rate at which the state was written. A receipt is settled at this rate.
function level.stored_params(l)
  l.q, l.r, l.n = l.stored_q, l.stored_r, l.stored_n
  local permits = l.code == 4 and l.capacity > 0 and l.capacity + 1 or l.capacity
  l.room, l.part = muldiv(permits, l.r, l.n)
  l.room = l.room + permits * l.q
end

function level.resolve(l)
  -- T and g are the debt at the moment `from`.
  local from = l.last
  if l.stored_q ~= l.q or l.stored_r ~= l.r or l.stored_n ~= l.n then
    -- The state was written at another rate. The spent permits stay spent. Calculate their time at the new rate.
    from = rarely().moment_of_change(l.number, l.last, at)
    local elapsed = from - l.last
    if elapsed > l.T or (elapsed == l.T and l.g == 0) then
      l.T, l.g, l.m = 0, 0, 1
    elseif elapsed > 0 then
      l.T = l.T - elapsed
    end
    l.T, l.g, l.m = rarely().stretch(l.T, l.g, l.m, l.stored_q, l.stored_r, l.stored_n, l.q, l.r, l.n)
    -- Limit the debt to 142 years. A longer time would not be exact, and it would not change any decision.
    if l.T > 4503599627370496 then l.T, l.g, l.m = 4503599627370496, 0, 1 end
  end
  local elapsed = at - from
  if elapsed > l.T or (elapsed == l.T and l.g == 0) then
    l.T, l.g, l.m = 0, 0, 1
  elseif elapsed > 0 then
    l.T = l.T - elapsed
  end
end

function level.check(l)
  if l.cost > (l.code == 4 and l.capacity > 0 and l.capacity + 1 or l.capacity) then
    l.retry = NEVER
  else
    local n, more, rest = l.n * l.m, 0, 0
    -- The time of the cost is cost * q + more + rest/l.n µs.
    if l.r > 0 then more, rest = muldiv(l.cost, l.r, l.n) end
    -- The debt after this request, minus the room, is T + g/n µs.
    local T, g = l.T + more + l.cost * l.q - l.room, l.g + (rest - l.part) * l.m
    if g < 0 then T, g = T - 1, g + n elseif g >= n then T, g = T + 1, g - n end
    local excess = g > 0 and T + 1 or T -- the time (µs) by which the debt would be larger than the room
    if l.code == 4 then
      -- The wait is the time of the permits that are ahead, minus the time of `delay_after` permits.
      T, g = muldiv(l.special, l.r, l.n)
      T, g = l.T - T - l.special * l.q, l.g - g * l.m
      if g < 0 then T, g = T - 1, g + n end
      l.wait = math.max(g > 0 and T + 1 or T, 0)
      if excess <= 0 and (l.timeout == ANY or l.wait <= l.timeout) then
        l.ok = true
      else
        l.retry = l.timeout == ANY and excess or math.max(excess, l.wait - l.timeout)
      end
    elseif excess <= 0 then
      l.ok = true
    -- Under token_bucket (1) and gcra (2) a request may wait. Under leaky_bucket (3) it may not.
    elseif l.code <= 2 and (l.timeout == ANY or excess <= l.timeout) then
      l.ok, l.wait = true, excess
    else
      l.retry = l.code <= 2 and excess - l.timeout or excess
    end
  end
end

function level.charge(l)
  local T, g = 0, 0
  if l.r > 0 then T, g = muldiv(l.cost, l.r, l.n) end
  T, g = l.T + T + l.cost * l.q, l.g + g * l.m
  if g >= l.n * l.m then T, g = T + 1, g - l.n * l.m end
  if T > 4503599627370496 then T, g = 4503599627370496, 0 end
  l.T, l.g = T, g
end

function level.refund(l)
  if l.T > 0 or l.g > 0 then
    l.undone = true
    local cost = math.min(l.cost, 1e12) -- the maximum capacity
    local T, g = muldiv(cost, l.r, l.n)
    T, g = T + cost * l.q, g * l.m
    if T > l.T or (T == l.T and g >= l.g) then
      l.T, l.g, l.m = 0, 0, 1
    else
      l.T, l.g = l.T - T, l.g - g
      if l.g < 0 then l.T, l.g = l.T - 1, l.g + l.n * l.m end
    end
  end
end

function level.standing(l)
  local T, g = l.room - l.T, l.part * l.m - l.g
  if g < 0 then T, g = T - 1, g + l.n * l.m end
  l.remaining, l.reset = intervals(T, g, l.q, l.r, l.n, l.m), l.g > 0 and l.T + 1 or l.T
end

function level.store(l)
  -- `T` is the debt at `at`, but the record has the debt at `last`. A charge sets `last` to `at`, and a refund does
  -- not. So after a refund, add the time that has passed since `last`: at `last` the debt was larger by this time.
  if at > l.last and (l.T > 0 or l.g > 0) then l.T = l.T + at - l.last end
  -- If a new bucket begins with spent permits, store its state for FOREVER (400 days). If the state expired, the bucket
  -- would be new, and would begin with spent permits again.
  l.life = l.T + 1
  if l.code == 1 and l.special > 0 and l.life < FOREVER then l.life = FOREVER end
  l.stored_q, l.stored_r, l.stored_n = l.q, l.r, l.n
end
