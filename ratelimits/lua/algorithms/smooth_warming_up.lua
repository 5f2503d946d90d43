-- smooth_warming_up (code 10): the algorithm of Guava's SmoothWarmingUp. After a time without requests the rate is low,
-- and it rises to the normal rate. The algorithm uses the functions of smooth.lua. If a function stands in both files,
-- the function in this file is used.
-- The *store* is the permits that were saved while no request came. At the normal rate the interval between permits is
-- q + r/n µs, the *stable interval*. While the store is full, the interval is the stable interval * cold factor. It
-- becomes shorter as permits are taken from the store. When the store has fallen to the *threshold*, the interval is
-- the stable interval.
-- The store is written as a time: permits * stable interval. With these numbers the results are equal to Guava's:
--   W, the warm-up time
--   threshold = W / 2
--   maximum of the store = threshold + 2 * W / (1 + cold factor) = W * saving rate
--   saving rate = (5 + cold factor) / (2 + 2 * cold factor) = top/bottom
--   time that is added to the store = the time without requests * saving rate
-- The store is S + g/(n*factor*m) µs. n*factor is a multiple of n, of `bottom` and of 2, so the times above are whole
-- multiples of 1/(n*factor) µs. `m` is 1, unless a change of the params needs a larger denominator. (`factor` is
-- not the cold factor: `cold` is the cold factor * 10^6.) `next` is the moment at which the next request may proceed,
-- and `ahead` is next - last. Times are limited to 4503599627370496 µs (142 years): a longer time would not be exact.
--@params smooth_warming_up q r n factor W cold top bottom
--@record warming I7 last I7 stored_q I4 stored_r I4 stored_n i7 ahead I7 S I7 g I4 stored_factor I7 stored_W I4 stored_cold I4 stored_top I4 stored_bottom | m=1
--@record large_warming I7 last I7 stored_q I7 stored_r I7 stored_n I7 m i7 ahead I7 S I7 g I7 stored_factor I7 stored_W I7 stored_cold I7 stored_top I7 stored_bottom

-- Returns the store S + g/(base*m) and `next` as they are at `now`, if no request comes until then. `base` is n*factor.
local function warm_saved_until(now, S, g, next, m, base, W, top, bottom)
  if now <= next then return S, g, next end
  local whole, part = muldiv(now - next, top, bottom)
  S, g = S + whole, g + part * (base / bottom) * m
  if g >= base * m then S, g = S + 1, g - base * m end
  local most, most_part = muldiv(W, top, bottom)
  most_part = most_part * (base / bottom) * m
  if S > most or (S == most and g >= most_part) then S, g = most, most_part end
  return S, g, now
end

-- Returns the time that permits take if they come from the part of the store above the threshold:
--   floor(taken + taken*(2*above - taken)*(cold factor^2 - 1)/(4*W))
-- (The interval falls in a straight line while the store becomes emptier. So the time is the area below this line: a
-- trapezium.) `above` is the part of the store above the threshold. `taken` is the time that is taken from this part.
-- The two times are above + above_part/n and taken + taken_part/n µs.
local function time_above(taken, taken_part, above, above_part, n, W, cold)
  -- The relative error of this estimate is below 1e-14. If no whole number is within this error, then the estimate,
  -- rounded down, is the exact result.
  local taken_double, above_double = taken + taken_part / n, above + above_part / n
  local estimate = taken_double
    + taken_double * (2 * above_double - taken_double) * ((cold - 1e6) * (cold + 1e6)) / (4e12 * W)
  local guess, margin = math.floor(estimate), estimate * 1e-14
  if math.floor(estimate - margin) == guess and math.floor(estimate + margin) == guess then return guess end
  local exact = rarely().exact_numbers()
  local big, times, plus, at_most = exact.big, exact.times, exact.plus, exact.at_most
  local taken_big = plus(times(big(taken), big(n)), big(taken_part))
  -- `both_big` is 2*above - taken, calculated as above + (above - taken), so that no step is negative.
  local rest, rest_part = above - taken, above_part - taken_part
  if rest_part < 0 then rest, rest_part = rest - 1, rest_part + n end
  local both_big = plus(times(big(above + rest), big(n)), big(above_part + rest_part))
  -- Both times are in units of 1/n µs. So the formula is taken_big * (unit + both_big * (cold^2 - 10^12)) / (unit * n).
  local unit = times(times(big(4 * W), big(1e12)), big(n))
  local top = times(taken_big, plus(unit, times(both_big, times(big(cold - 1e6), big(cold + 1e6)))))
  local bottom = times(unit, big(n))
  -- The exact time is top/bottom. Correct the guess until guess <= top/bottom < guess + 1.
  for _ = 1, 100 do
    if guess > 0 and not at_most(times(big(guess), bottom), top) then
      guess = guess - 1
    elseif at_most(times(big(guess + 1), bottom), top) then
      guess = guess + 1
    else
      return guess
    end
  end
  error('the numbers of a state do not fit together: reset the key')
end

-- A request takes its permits from the store S + g/base, until the store is empty. Returns the time in µs that these
-- permits from the store take. A permit from above the threshold takes longer than at the normal rate. At the normal
-- rate all permits of the request take whole + part/base µs. `base` is n*factor*m.
local function time_from_store(whole, part, S, g, base, W, cold)
  local taken, taken_part, time = S, g, 0 -- the time that is taken from the store
  if whole < taken or (whole == taken and part < taken_part) then taken, taken_part = whole, part end
  local threshold, threshold_part = (W - W % 2) / 2, W % 2 * base / 2
  local above, above_part = S - threshold, g - threshold_part -- the part of the store above the threshold
  if above_part < 0 then above, above_part = above - 1, above_part + base end
  if above > 0 or (above == 0 and above_part > 0) then
    local high, high_part = above, above_part -- the time that is taken from above the threshold
    if taken < high or (taken == high and taken_part < high_part) then high, high_part = taken, taken_part end
    time = time_above(high, high_part, above, above_part, base, W, cold)
    taken, taken_part = taken - high, taken_part - high_part
    if taken_part < 0 then taken = taken - 1 end -- only the whole part is used below
  end
  -- Permits from below the threshold take the stable interval. Their time is rounded down, as in Guava. The time of the
  -- permits that were not in the store comes from `spend`.
  return time + taken
end

local warming = {}

function warming.initial(l)
  l.m, l.next = 1, at
  l.S, l.g = muldiv(l.W, l.top, l.bottom)
  l.g = l.g * (l.n * l.factor / l.bottom)
end

function warming.stored_params(l)
  l.q, l.r, l.n, l.factor, l.W = l.stored_q, l.stored_r, l.stored_n, l.stored_factor, l.stored_W
  l.cold, l.top, l.bottom = l.stored_cold, l.stored_top, l.stored_bottom
end

function warming.resolve(l)
  l.next = l.last + l.ahead
  if l.stored_q ~= l.q or l.stored_r ~= l.r or l.stored_n ~= l.n or l.stored_factor ~= l.factor or l.stored_W ~= l.W
    or l.stored_cold ~= l.cold or l.stored_top ~= l.top or l.stored_bottom ~= l.bottom then
    -- The params have changed. Do the same as `setRate` of Guava: first add the idle time at the old rate, then
    -- multiply the store by new maximum / old maximum.
    local changed, base = rarely().moment_of_change(l.number, l.last, at), l.stored_n * l.stored_factor
    l.S, l.g, l.next = warm_saved_until(changed, l.S, l.g, l.next, l.m, base, l.stored_W, l.stored_top, l.stored_bottom)
    local new, old = 1, 1
    if l.W ~= l.stored_W or l.cold ~= l.stored_cold then
      -- A maximum is W * top/bottom. new/old is the new maximum divided by the old maximum, in lowest terms.
      local gcd = rarely().exact_numbers().gcd
      local c, d = gcd(l.W, l.stored_W), gcd(l.top * l.stored_bottom, l.bottom * l.stored_top)
      new, old = l.W / c * (l.top * l.stored_bottom / d), l.stored_W / c * (l.bottom * l.stored_top / d)
    end
    l.S, l.g, l.m = rarely().exact_numbers().scale(l.S, l.g, base * l.m, new, old, l.n * l.factor)
  end
  l.next_is_later = l.next > at
  l.S, l.g, l.next = warm_saved_until(at, l.S, l.g, l.next, l.m, l.n * l.factor, l.W, l.top, l.bottom)
end

function warming.charge(l)
  local whole, part = muldiv(l.cost, l.r, l.n)
  local base, missing = l.n * l.factor * l.m, 0
  whole, part = math.min(whole + l.cost * l.q, 4503599627370496), part * l.factor * l.m
  l.next = l.next + time_from_store(whole, part, l.S, l.g, base, l.W, l.cold)
  l.S, l.g, missing = spend(whole, part, l.S, l.g, base)
  if l.S == 0 and l.g == 0 then l.m = 1 end
  l.next = l.next + missing
end

function warming.standing(l)
  if l.next > at + 4503599627370496 then l.next = at + 4503599627370496 end
  l.remaining, l.reset = 0, 0
  if l.next > at then l.reset = l.next - at else l.remaining = intervals(l.S, l.g, l.q, l.r, l.n, l.factor * l.m) end
end

function warming.store(l)
  l.ahead, l.life = l.next - l.last, l.next - at
  if l.life < FOREVER then l.life = FOREVER end
  l.stored_q, l.stored_r, l.stored_n, l.stored_factor, l.stored_W = l.q, l.r, l.n, l.factor, l.W
  l.stored_cold, l.stored_top, l.stored_bottom = l.cold, l.top, l.bottom
end
