-- smooth_bursty (9): the algorithm of Guava's SmoothBursty. The state has two parts: `next`, the moment at which the next
-- request may go, and the store, the permits that were saved while no request came.
-- A permit takes q + r/n µs. The store is kept as the time that its permits take, S + g/(n*m) µs, so that a change of the
-- rate does not change it.
-- Entry: name, algorithm, expiry, last, q, r, n, m, next - last, S, g, most.   Params: q, r, n, most (the maximum of the
-- store). smooth_warming_up.lua calls smooth_limit() for a second algorithm and replaces some of its functions.
local function smooth_limit()
  local smooth = {size = 4}

  -- base returns the denominator of the store's fraction, without m. most returns the maximum of the store over this
  -- denominator.
  function smooth.base(p) return p[3] end
  function smooth.most(l) return l.p[4], 0 end
  -- ratio returns the new and the old maximum of the store.
  function smooth.ratio(new, old) return new[4], old[4] end
  function smooth.initial_store(l) return 0, 0 end

  function smooth.initial(l)
    l.n, l.m, l.next = smooth.base(l.p), 1, l.now
    l.S, l.g = smooth.initial_store(l)
  end

  -- gain returns the time that is added to the store while no request comes for `idle` µs.
  function smooth.gain(l, idle) return idle, 0 end

  -- Adds the time since `next` to the store.
  local function sync(l, now)
    if now <= l.next then return end
    local n = l.n * l.m
    local S, g = smooth.gain(l, now - l.next)
    S, g = l.S + S, l.g + g * l.m
    if g >= n then S, g = S + 1, g - n end
    local most, part = smooth.most(l)
    if S > most or (S == most and g >= part * l.m) then S, g = most, part * l.m end
    l.S, l.g, l.next = S, g, now
  end

  function smooth.use_stored_params(l, e)
    l.p = {e[5], e[6], e[7], unpack(e, 12)}
  end

  function smooth.resolve(l, e)
    local p, old, same = l.p, {e[5], e[6], e[7]}, e[5] == l.p[1] and e[6] == l.p[2] and e[7] == l.p[3]
    for i = 12, #e do
      old[i - 8] = e[i]
      same = same and e[i] == p[i - 8]
    end
    l.next = e[4] - l.shift + e[9]
    l.n, l.m, l.S, l.g = smooth.base(old), e[8], e[10], e[11]
    if not same then
      -- The rate has changed. Do as Guava's setRate: first add the idle time at the old rate, then multiply the store by
      -- new maximum / old maximum.
      l.p = old
      sync(l, l.changed)
      local a, b = smooth.ratio(p, old)
      local base = l.n * l.m
      l.p, l.n = p, smooth.base(p)
      if b == 0 then l.S, l.g, l.m = 0, 0, 1 else l.S, l.g, l.m = scale(l.S, l.g, base, a, b, l.n) end
    end
    l.owed = l.next > l.now
    sync(l, l.now)
  end

  function smooth.check(l)
    local wait = math.max(l.next - l.now, 0)
    -- Refuse a cost that takes more than 142 years: such a time would not be exact.
    if l.cost * l.p[1] + muldiv(l.cost, l.p[2], l.p[3]) > 4503599627370496 then l.retry = NEVER return end
    if l.timeout == ANY or wait <= l.timeout then
      l.ok, l.wait = true, wait
    else
      l.retry = wait - l.timeout
    end
  end

  -- Returns the time that the request's permits take, as a pair over n*m.
  function smooth.permits(l)
    local whole, part = muldiv(l.cost, l.p[2], l.p[3])
    return math.min(whole + l.cost * l.p[1], 4503599627370496), part * (l.n / l.p[3]) * l.m
  end

  -- Takes the time K + k/(n*m) from the store. Returns the time that was missing in the store, rounded down to whole µs.
  function smooth.spend(l, K, k)
    local n = l.n * l.m
    if K > l.S or (K == l.S and k >= l.g) then
      K, k = K - l.S, k - l.g
      l.S, l.g, l.m = 0, 0, 1
      return k < 0 and K - 1 or K
    end
    K, k = l.S - K, l.g - k
    if k < 0 then K, k = K - 1, k + n end
    l.S, l.g = K, k
    return 0
  end

  function smooth.charge(l)
    l.next = l.next + smooth.spend(l, smooth.permits(l))
  end

  function smooth.refund(l)
    -- A refund makes the wait of later requests shorter. It does not put permits back into the store.
    if not l.owed then return false end
    l.next = math.max(l.next - (smooth.permits(l)), l.now)
    return true
  end

  function smooth.standing(l)
    if l.next > l.now then return 0, l.next - l.now end
    return intervals(l.S, l.g, l.p[1], l.p[2], l.p[3], l.n / l.p[3] * l.m), 0
  end

  function smooth.entry(l, last)
    local p = l.p
    -- Limit `next` to 142 years from now: a later time would not be exact, and makes no difference.
    l.next = math.min(l.next, l.now + 4503599627370496)
    return {l.name, l.code, 0, last, p[1], p[2], p[3], l.m, l.next - last, l.S, l.g, unpack(p, 4, smooth.size)},
      math.max(FOREVER, l.next - l.now)
  end

  return smooth
end
A[9] = smooth_limit()
