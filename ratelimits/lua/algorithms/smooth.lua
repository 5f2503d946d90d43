-- smooth_bursty (9): the algorithm of Guava's SmoothBursty. The state has two parts: `next`, the moment at which the
-- next request may proceed, and the *store*, the permits that were saved while no request came.
-- One permit takes q + r/n µs. The store is written as a time, not as permits: S + g/(n*m) µs, the time that its
-- permits take. So a change of the rate does not change this time, unless the maximum of the store changes too.
-- Entry: name, algorithm, expiry, last, q, r, n, m, next - last, S, g, maximum of the store.
-- Params: q, r, n, maximum of the store.
-- smooth_warming_up.lua also calls `smooth_limit`, for a second algorithm, and replaces some of the functions.
local function smooth_limit()
  local smooth = {param_count = 4}

  -- Returns the denominator of the store's fraction, without m.
  function smooth.base(params) return params[3] end

  -- Returns the maximum of the store, as a pair over this denominator.
  function smooth.maximum(l) return l.params[4], 0 end

  -- Returns two numbers: their ratio is new maximum / old maximum of the store.
  function smooth.ratio(new, old) return new[4], old[4] end

  -- Returns the store of a limit without a state.
  function smooth.initial_store(l) return 0, 0 end

  function smooth.initial(l)
    l.n, l.m, l.next = smooth.base(l.params), 1, l.now
    l.S, l.g = smooth.initial_store(l)
  end

  -- Returns the time that is added to the store if no request comes for `idle` µs.
  function smooth.added_time(l, idle) return idle, 0 end

  -- Adds the time since `next` to the store.
  local function sync(l, now)
    if now <= l.next then return end
    local n = l.n * l.m
    local S, g = smooth.added_time(l, now - l.next)
    S, g = l.S + S, l.g + g * l.m
    if g >= n then S, g = S + 1, g - n end
    local maximum, part = smooth.maximum(l)
    if S > maximum or (S == maximum and g >= part * l.m) then S, g = maximum, part * l.m end
    l.S, l.g, l.next = S, g, now
  end

  function smooth.use_stored_params(l, entry)
    l.params = {entry[5], entry[6], entry[7], unpack(entry, 12)}
  end

  function smooth.resolve(l, entry)
    local params, old = l.params, {entry[5], entry[6], entry[7]}
    local same = entry[5] == params[1] and entry[6] == params[2] and entry[7] == params[3]
    for i = 12, #entry do
      old[i - 8] = entry[i]
      same = same and entry[i] == params[i - 8]
    end
    l.next = entry[4] - l.shift + entry[9]
    l.n, l.m, l.S, l.g = smooth.base(old), entry[8], entry[10], entry[11]
    if not same then
      -- The rate has changed. Do the same as `setRate` of Guava: first add the idle time at the old rate, then
      -- multiply the store by new maximum / old maximum.
      l.params = old
      sync(l, l.changed)
      local new_maximum, old_maximum = smooth.ratio(params, old)
      local base = l.n * l.m
      l.params, l.n = params, smooth.base(params)
      if old_maximum == 0 then
        l.S, l.g, l.m = 0, 0, 1
      else
        l.S, l.g, l.m = scale(l.S, l.g, base, new_maximum, old_maximum, l.n)
      end
    end
    l.next_is_later = l.next > l.now
    sync(l, l.now)
  end

  function smooth.check(l)
    local wait = math.max(l.next - l.now, 0)
    -- Refuse a cost that takes more than 142 years: such a time would not be exact.
    local params = l.params
    if l.cost * params[1] + muldiv(l.cost, params[2], params[3]) > 4503599627370496 then l.retry = NEVER return end
    if l.timeout == ANY or wait <= l.timeout then
      l.ok, l.wait = true, wait
    else
      l.retry = wait - l.timeout
    end
  end

  -- Returns the time that the request's permits take, as a pair over n*m.
  function smooth.request_time(l)
    local whole, part = muldiv(l.cost, l.params[2], l.params[3])
    return math.min(whole + l.cost * l.params[1], 4503599627370496), part * (l.n / l.params[3]) * l.m
  end

  -- Takes the time whole + part/(n*m) from the store. If the store has less, takes all of it and returns the missing
  -- time in µs, rounded down.
  function smooth.spend(l, whole, part)
    local n = l.n * l.m
    if whole > l.S or (whole == l.S and part >= l.g) then
      whole, part = whole - l.S, part - l.g
      l.S, l.g, l.m = 0, 0, 1
      return part < 0 and whole - 1 or whole
    end
    whole, part = l.S - whole, l.g - part
    if part < 0 then whole, part = whole - 1, part + n end
    l.S, l.g = whole, part
    return 0
  end

  function smooth.charge(l)
    l.next = l.next + smooth.spend(l, smooth.request_time(l))
  end

  function smooth.refund(l)
    -- Shorten the wait of later requests. Do not put permits back into the store.
    if not l.next_is_later then return false end
    l.next = math.max(l.next - (smooth.request_time(l)), l.now)
    return true
  end

  function smooth.standing(l)
    if l.next > l.now then return 0, l.next - l.now end
    return intervals(l.S, l.g, l.params[1], l.params[2], l.params[3], l.n / l.params[3] * l.m), 0
  end

  function smooth.entry(l, last)
    local params = l.params
    -- Limit `next` to 142 years from now. A later time would not be exact, and it would not change any decision.
    l.next = math.min(l.next, l.now + 4503599627370496)
    local wait, life = l.next - last, math.max(FOREVER, l.next - l.now)
    local q, r, n = params[1], params[2], params[3]
    return {l.name, l.code, 0, last, q, r, n, l.m, wait, l.S, l.g, unpack(params, 4, smooth.param_count)}, life
  end

  return smooth
end
ALGORITHMS[9] = smooth_limit()
