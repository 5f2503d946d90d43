-- smooth_bursty (code 9): the algorithm of Guava's SmoothBursty. The state has two parts: `next`, the moment at which
-- the next request may proceed, and the *store*, the permits that were saved while no request came.
-- One permit takes q + r/n µs. The store is written as a time, not as permits: S + g/(n*m) µs, the time that its
-- permits take. `m` is 1, unless a change of the maximum needs a larger denominator. As in Guava, a change of the rate
-- leaves this time as it is, unless it also changes the maximum of the store.
-- smooth_warming_up.lua is a second algorithm: it has the functions of this file, and replaces some of them.
-- "--@params" names the params of the limit. "--@record" names a form of the record and its fields, each after its
-- type: I7 is an unsigned integer of 7 bytes, and i7 a signed one. The field after "|" is not stored: in this form it
-- always has the value that stands there.
--@params smooth_bursty q r n most
--@record bursty I7 last I7 stored_q I4 stored_r I4 stored_n i7 ahead I7 S I7 g I7 stored_most | m=1
--@record large_bursty I7 last I7 stored_q I7 stored_r I7 stored_n I7 m i7 ahead I7 S I7 g I7 stored_most
-- `most` is the maximum of the store, in µs. `ahead` is next - last. Times are limited to 4503599627370496 µs (142
-- years): a longer time would not be exact.

-- Returns the store S + g/base and `next` as they are at `now`, if no request comes until then. `most` is the maximum
-- of the store, in µs.
local function saved_until(now, S, g, next, most)
  if now <= next then return S, g, next end
  S = S + now - next
  if S >= most then S, g = most, 0 end
  return S, g, now
end

-- Takes the time whole + part/base from the store S + g/base. Returns the store that is left, and the time that the
-- store could not give (µs, rounded down).
local function spend(whole, part, S, g, base)
  if whole > S or (whole == S and part >= g) then
    -- What is missing is whole - S + (part - g)/base.
    return 0, 0, part < g and whole - S - 1 or whole - S
  end
  S, g = S - whole, g - part
  if g < 0 then S, g = S - 1, g + base end
  return S, g, 0
end

local smooth = {}

function smooth.initial(l)
  l.m, l.next, l.S, l.g = 1, at, 0, 0
end

function smooth.stored_params(l)
  l.q, l.r, l.n, l.most = l.stored_q, l.stored_r, l.stored_n, l.stored_most
end

function smooth.resolve(l)
  l.next = l.last + l.ahead
  if l.stored_q ~= l.q or l.stored_r ~= l.r or l.stored_n ~= l.n or l.stored_most ~= l.most then
    -- The rate or the maximum has changed. Do the same as `setRate` of Guava: first add the idle time at the old rate,
    -- then multiply the store by new maximum / old maximum.
    local changed = rarely().moment_of_change(l.number, l.last, at)
    l.S, l.g, l.next = saved_until(changed, l.S, l.g, l.next, l.stored_most)
    if l.stored_most == 0 then
      l.S, l.g, l.m = 0, 0, 1
    else
      -- `scale` multiplies the time (the first three numbers) by the quotient of the next two.
      l.S, l.g, l.m = rarely().exact_numbers().scale(l.S, l.g, l.stored_n * l.m, l.most, l.stored_most, l.n)
    end
  end
  l.next_is_later = l.next > at
  l.S, l.g, l.next = saved_until(at, l.S, l.g, l.next, l.most)
end

function smooth.check(l)
  -- Refuse a cost that takes more than 142 years: such a time would not be exact.
  if l.cost * l.q + muldiv(l.cost, l.r, l.n) > 4503599627370496 then
    l.retry = NEVER
  else
    l.wait = l.next > at and l.next - at or 0
    if l.timeout == ANY or l.wait <= l.timeout then
      l.ok = true
    else
      l.retry = l.wait - l.timeout
    end
  end
end

function smooth.charge(l)
  local whole, part = muldiv(l.cost, l.r, l.n)
  local missing
  l.S, l.g, missing = spend(math.min(whole + l.cost * l.q, 4503599627370496), part * l.m, l.S, l.g, l.n * l.m)
  if l.S == 0 and l.g == 0 then l.m = 1 end
  l.next = l.next + missing
end

function smooth.refund(l)
  -- If the next request must wait, shorten this wait. Never put permits back into the store.
  if l.next_is_later then
    l.undone = true
    l.next = math.max(l.next - math.min(l.cost * l.q + muldiv(l.cost, l.r, l.n), 4503599627370496), at)
  end
end

function smooth.standing(l)
  -- Limit `next` to 142 years from now. A later time would not be exact, and it would not change any decision.
  if l.next > at + 4503599627370496 then l.next = at + 4503599627370496 end
  l.remaining, l.reset = 0, 0
  if l.next > at then l.reset = l.next - at else l.remaining = intervals(l.S, l.g, l.q, l.r, l.n, l.m) end
end

function smooth.store(l)
  l.ahead, l.life = l.next - l.last, l.next - at
  if l.life < FOREVER then l.life = FOREVER end
  l.stored_q, l.stored_r, l.stored_n, l.stored_most = l.q, l.r, l.n, l.most
end
