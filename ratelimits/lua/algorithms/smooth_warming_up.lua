-- smooth_warming_up (10): the algorithm of Guava's SmoothWarmingUp, built on smooth.lua. After a time without requests the
-- rate is slow, and it rises to the normal rate. `stable` is the interval between permits at the normal rate, q + r/n µs.
-- The interval is stable*cold_factor while the store is full. It falls as permits are taken from the store, and is
-- `stable` from the threshold on.
-- Stored permits are kept as time (permits * stable). With the warm-up time W, the threshold is W/2, the maximum is
-- W*gain, and idle time adds time*gain, where gain = (5 + cold)/(2 + 2*cold). These numbers are equal to Guava's.
-- Params: q, r, n, denominator/n, W, cold factor * 10^6, gain as a fraction u/v in two params.
-- Entry: the fields of smooth.lua up to g, then the last five params.
do
  local smooth = smooth_limit()

  function smooth.base(p) return p[3] * p[4] end

  -- Returns time * gain, as a pair over the denominator.
  local function share(l, time)
    local whole, part = muldiv(time, l.p[7], l.p[8])
    return whole, part * (smooth.base(l.p) / l.p[8])
  end

  function smooth.most(l) return share(l, l.p[5]) end

  function smooth.gain(l, idle) return share(l, idle) end

  function smooth.initial_store(l) return share(l, l.p[5]) end

  function smooth.ratio(new, old)
    if new[5] == old[5] and new[6] == old[6] then return 1, 1 end
    local c, d = gcd(new[5], old[5]), gcd(new[7] * old[8], new[8] * old[7])
    return new[5] / c * (new[7] * old[8] / d), old[5] / c * (new[8] * old[7] / d)
  end

  -- Returns the time that permits from above the threshold take: floor(taken + taken*(2*above - taken)*(cold^2 - 1)/(4*W)).
  -- `above` (aw, ap) is the stored time above the threshold, `taken` (tw, tp) is the part that is taken from it.
  local function area(l, tw, tp, aw, ap)
    local n, W, cold = l.n * l.m, l.p[5], l.p[6]
    local t, a = tw + tp / n, aw + ap / n
    local guess = math.floor(t + t * (2 * a - t) * ((cold / 1e6) ^ 2 - 1) / (4 * W))
    local taken = plus(times(big(tw), big(n)), big(tp))
    -- Calculate 2*above - taken as above + (above - taken), so that no step is negative.
    local lw, lp = aw - tw, ap - tp
    if lp < 0 then lw, lp = lw - 1, lp + n end
    local both = plus(times(big(aw + lw), big(n)), big(ap + lp))
    local unit = times(times(big(4 * W), big(1e12)), big(n))
    local top = times(taken, plus(unit, times(both, times(big(cold - 1e6), big(cold + 1e6)))))
    local bottom = times(unit, big(n))
    while guess > 0 and not at_most(times(big(guess), bottom), top) do guess = guess - 1 end
    while at_most(times(big(guess + 1), bottom), top) do guess = guess + 1 end
    return guess
  end

  function smooth.charge(l)
    local n, W = l.n * l.m, l.p[5]
    local K, k = smooth.permits(l)
    local tw, tp = l.S, l.g -- the time that is taken from the store
    if K < tw or (K == tw and k < tp) then tw, tp = K, k end
    local half, odd = (W - W % 2) / 2, W % 2 * n / 2
    local aw, ap = l.S - half, l.g - odd -- the stored time above the threshold
    if ap < 0 then aw, ap = aw - 1, ap + n end
    if aw > 0 or (aw == 0 and ap > 0) then
      local mw, mp = aw, ap
      if tw < mw or (tw == mw and tp < mp) then mw, mp = tw, tp end
      l.next = l.next + area(l, mw, mp, aw, ap)
      tw, tp = tw - mw, tp - mp
      if tp < 0 then tw, tp = tw - 1, tp + n end
    end
    -- A permit below the threshold takes the stable interval. So does a permit that was not in the store. As in Guava, both
    -- times are rounded down separately.
    l.next = l.next + tw + smooth.spend(l, K, k)
  end

  smooth.size = 8
  A[10] = smooth
end
