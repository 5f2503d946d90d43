-- smooth_warming_up (10): the algorithm of Guava's SmoothWarmingUp, built on smooth.lua. After a time without requests
-- the rate is low, and it rises to the normal rate.
-- At the normal rate the interval between permits is q + r/n µs, the *stable interval*. While the store is full, the
-- interval is the stable interval * cold factor. It becomes shorter as permits are taken from the store. When the
-- store has fallen to the *threshold*, the interval is the stable interval.
-- The store is written as a time: permits * stable interval. With these numbers the results are equal to Guava's:
--   W, the warm-up time
--   saving rate = (5 + cold factor) / (2 + 2 * cold factor)
--   threshold = W / 2
--   maximum of the store = W * saving rate
--   time that is added to the store = the time without requests * saving rate
-- Params: q, r, n, denominator/n, W, cold factor * 10^6, numerator and denominator of the saving rate.
-- Entry: the same as in smooth.lua as far as g, then the last five params.
do
  local smooth = smooth_limit()

  function smooth.base(params) return params[3] * params[4] end

  -- Returns time * saving rate, as a pair over the denominator.
  local function saved_in(l, time)
    local whole, part = muldiv(time, l.params[7], l.params[8])
    return whole, part * (smooth.base(l.params) / l.params[8])
  end

  function smooth.maximum(l) return saved_in(l, l.params[5]) end

  function smooth.added_time(l, idle) return saved_in(l, idle) end

  function smooth.initial_store(l) return saved_in(l, l.params[5]) end

  function smooth.ratio(new, old)
    if new[5] == old[5] and new[6] == old[6] then return 1, 1 end
    local c, d = gcd(new[5], old[5]), gcd(new[7] * old[8], new[8] * old[7])
    return new[5] / c * (new[7] * old[8] / d), old[5] / c * (new[8] * old[7] / d)
  end

  -- Returns the time that permits take if they come from the part of the store above the threshold:
  --   floor(taken + taken*(2*above - taken)*(cold^2 - 1)/(4*W))
  -- `above` is the part of the store above the threshold. `taken` is the time that is taken from this part. Both are
  -- pairs over l.n * l.m.
  local function time_above(l, taken, taken_part, above, above_part)
    local n, W, cold = l.n * l.m, l.params[5], l.params[6]
    local taken_double, above_double = taken + taken_part / n, above + above_part / n
    local both_double = 2 * above_double - taken_double
    local guess = math.floor(taken_double + taken_double * both_double * ((cold / 1e6) ^ 2 - 1) / (4 * W))
    local taken_big = plus(times(big(taken), big(n)), big(taken_part))
    -- `both_big` is 2*above - taken, calculated as above + (above - taken), so that no step is negative.
    local rest, rest_part = above - taken, above_part - taken_part
    if rest_part < 0 then rest, rest_part = rest - 1, rest_part + n end
    local both_big = plus(times(big(above + rest), big(n)), big(above_part + rest_part))
    local unit = times(times(big(4 * W), big(1e12)), big(n))
    local top = times(taken_big, plus(unit, times(both_big, times(big(cold - 1e6), big(cold + 1e6)))))
    local bottom = times(unit, big(n))
    while guess > 0 and not at_most(times(big(guess), bottom), top) do guess = guess - 1 end
    while at_most(times(big(guess + 1), bottom), top) do guess = guess + 1 end
    return guess
  end

  function smooth.charge(l)
    local n, W = l.n * l.m, l.params[5]
    local whole, part = smooth.request_time(l)
    local taken, taken_part = l.S, l.g -- the time that is taken from the store
    if whole < taken or (whole == taken and part < taken_part) then taken, taken_part = whole, part end
    local threshold, threshold_part = (W - W % 2) / 2, W % 2 * n / 2
    local above, above_part = l.S - threshold, l.g - threshold_part -- the part of the store above the threshold
    if above_part < 0 then above, above_part = above - 1, above_part + n end
    if above > 0 or (above == 0 and above_part > 0) then
      local high, high_part = above, above_part -- the time that is taken from above the threshold
      if taken < high or (taken == high and taken_part < high_part) then high, high_part = taken, taken_part end
      l.next = l.next + time_above(l, high, high_part, above, above_part)
      taken, taken_part = taken - high, taken_part - high_part
      if taken_part < 0 then taken, taken_part = taken - 1, taken_part + n end
    end
    -- A permit from below the threshold takes the stable interval, and so does a permit that was not in the store. As
    -- in Guava, the times of both are rounded down before they are added.
    l.next = l.next + taken + smooth.spend(l, whole, part)
  end

  smooth.param_count = 8
  ALGORITHMS[10] = smooth
end
