-- Functions that the algorithms' files use: for exact arithmetic, and for packed states. A packed state is one string
-- with the states of several limits of one key.
-- Lua 5.1 has no integers, only doubles. A double holds every integer up to 2^53 exactly, so all numbers here are
-- whole. A number with a fraction is written as two whole numbers, a *pair over n*: the pair (whole, part) means
-- whole + part/n.

-- Returns floor(a*b/n) and a*b mod n, for whole 0 <= a, b < 2^53, 0 < n < 2^53 and a quotient below 2^53.
local function muldiv(a, b, n)
  local product = a * b
  if product < 9007199254740992 then
    local rest = product % n
    return (product - rest) / n, rest
  end
  -- The product is too large for a double, so multiply by one bit of b at a time. Every step is exact.
  local a_rest = a % n
  local a_quotient = (a - a_rest) / n
  local quotient, rest, bit = 0, 0, 4503599627370496
  while bit >= 1 do
    quotient, rest = quotient * 2, rest * 2
    if rest >= n then quotient, rest = quotient + 1, rest - n end
    if b >= bit then
      b = b - bit
      quotient = quotient + a_quotient
      if rest >= n - a_rest then quotient, rest = quotient + 1, rest - (n - a_rest) else rest = rest + a_rest end
    end
    bit = bit / 2
  end
  return quotient, rest
end

-- Returns the greatest common divisor of a and b. Returns 1 if a or b is 2^53 or more: % is not exact then.
local function gcd(a, b)
  if a >= 9007199254740992 or b >= 9007199254740992 then return 1 end
  while b > 0 do a, b = b, a % b end
  return a
end

-- Converts a whole number to a list of numbers below 10^7, each for seven decimal digits, the lowest first. Such a
-- list holds a number above 2^53 exactly. For two such lists, `times` returns a * b, `plus` returns a + b, and
-- `at_most` returns whether a <= b.
local function big(x)
  local out = {}
  repeat
    out[#out + 1] = x % 1e7
    x = (x - x % 1e7) / 1e7
  until x == 0
  return out
end

local function times(a, b)
  local out = {}
  for i = 1, #a + #b do out[i] = 0 end
  for i = 1, #a do
    local carry = 0
    for j = 1, #b do
      local sum = out[i + j - 1] + a[i] * b[j] + carry
      out[i + j - 1] = sum % 1e7
      carry = (sum - sum % 1e7) / 1e7
    end
    out[i + #b] = carry
  end
  return out
end

local function plus(a, b)
  local out, carry = {}, 0
  for i = 1, math.max(#a, #b) + 1 do
    local sum = (a[i] or 0) + (b[i] or 0) + carry
    out[i] = sum % 1e7
    carry = (sum - sum % 1e7) / 1e7
  end
  return out
end

local function at_most(a, b)
  for i = math.max(#a, #b), 1, -1 do
    local x, y = a[i] or 0, b[i] or 0
    if x ~= y then return x < y end
  end
  return true
end

-- Returns the number (whole + part/base) * a/b as a pair over n*m, and the m that it has chosen. The result is exact
-- if this is possible with n*m below 2^52. Otherwise m is 1, and the result is rounded down. If a or b is 2^53 or
-- more, the calculation uses doubles and is only as exact as they are.
local function scale(whole, part, base, a, b, n)
  local common = gcd(a, b)
  a, b = a / common, b / common
  if a >= 9007199254740992 or b >= 9007199254740992 then
    whole = (whole + part / base) * (a / b)
    part = (whole - math.floor(whole)) * base
    whole, a, b = math.floor(whole), 1, 1
  end
  local out, left = muldiv(whole, a, b)
  -- The rest of the result, left/b + part*a/(base*b), is not in `out` yet.
  local function reduce(x, y)
    common = gcd(x, y)
    return x / common, y / common
  end
  local upper, lower = a, b
  part, base = reduce(part, base)
  upper, base = reduce(upper, base)
  part, lower = reduce(part, lower)
  left, b = reduce(left, b)
  local top, bottom = left / b + part / base * upper / lower, 1
  if base * lower < 9007199254740992 then
    local more, rest = muldiv(part, upper, base * lower)
    common = gcd(b, base * lower)
    if b / common * base * lower < 9007199254740992 then
      bottom = b / common * base * lower
      top = left * (bottom / b) + rest * (b / common)
      out = out + more
    end
  end
  local over = bottom == 1 and top - math.floor(top) or top % bottom
  out, top = out + (top - over) / bottom, over
  if bottom > 1 then
    top, bottom = reduce(top, bottom)
    local m = bottom / gcd(bottom, n)
    if n * m < 4503599627370496 then return out, top * (n * m / bottom), m end
  end
  part = top / bottom * n
  part = math.floor(part)
  if part >= n then return out + 1, part - n, 1 end
  return out, part, 1
end

-- Returns how many intervals of the length q + r/n fit into whole + part/(n*m). Estimates the number with doubles,
-- then corrects it exactly.
local function intervals(whole, part, q, r, n, m)
  if whole < 0 then return 0 end
  if r == 0 then return (whole - whole % q) / q end
  local count = math.floor((whole + part / (n * m)) / (q + r / n))
  if count >= 4503599627370496 then return count end -- too large to correct
  while true do
    local sum, sum_part = muldiv(count, r, n)
    sum, sum_part = sum + count * q, sum_part * m
    if sum > whole or (sum == whole and sum_part > part) then
      count = count - 1
    else
      sum, sum_part = muldiv(count + 1, r, n)
      sum, sum_part = sum + (count + 1) * q, sum_part * m
      if sum > whole or (sum == whole and sum_part > part) then return count end
      count = count + 1
    end
  end
end

-- Returns a whole number as text, with all its digits.
local function int(x) return string.format('%.0f', x) end

-- A state lives this much longer (µs) than it is needed, so that it still exists if the clock steps back.
local CLOCK_BACK = 60000000
local FOREVER = 34560000000000 -- a time to live (µs): 400 days
local ANY = -1 -- a timeout: any wait is accepted
local NEVER = -1 -- a retry_after: the request can never be admitted

-- A packed state begins with its expiry in seconds, '<I4'. Then it has a record for each limit. A record has a header,
-- '<I4BI2I4': name of the limit (crc32), code of the algorithm, size, expiry in seconds. The payload follows: `size`
-- bytes in the algorithm's format.
-- An entry is an unpacked record: a list of name, code, expiry, `last` and the algorithm's other values. `last` is the
-- moment (µs) of the last charge.

-- The algorithms, by their code. The files that are loaded after this one add them. An algorithm is a table of
-- functions. Each function gets a limit `l`:
--   initial            sets the fields of `l` if the limit has no state
--   resolve            sets the fields of `l` from the state's entry, as they are at the moment of the decision
--   use_stored_params  makes the limit use the params with which the state was written, not those of the rule
--   check              decides: sets l.ok, and l.wait or l.retry (µs)
--   charge             takes permits
--   refund, release    give permits back, end leases; return whether they changed something
--   reset              deletes the limit's own Redis keys
--   standing           returns remaining and reset_after (µs)
--   entry              returns the new entry, and how long it is needed (µs)
--   keep               sets the time to live of the limit's own Redis keys
-- Fields of `l`:
--   now, cost          the moment of the decision (µs), and the permits of the request
--   params, changed    the params from the program, and the moment from which they hold (µs)
--   shift              0, or the time by which the clock has stepped back: `last` of the state minus `now` (µs)
--   redis_key          the first of the limit's own Redis keys
--   announces          true if a refused caller waits until a lease is released
--   charged_at         if a receipt is settled: the moment when it was charged (µs); 0: unknown
-- An algorithm whose state has a fixed format also has `pack` (entry to payload) and `unpack` (payload to values). The
-- states of other algorithms are packed by cmsgpack.
local ALGORITHMS = {}

-- Returns the records of a packed state: a table from name to {code, expiry, raw, payload, name}, and a list of the
-- names in the order of the records. `raw` is the record as bytes, `payload` is the position of the payload in these
-- bytes. Raises an error if `raw` is not a packed state.
local function records(raw)
  local by_name, names, pos = {}, {}, 5
  while pos <= #raw do
    local name, code, size, expiry, start = struct.unpack('<I4BI2I4', raw, pos)
    local stop = start + size - 1
    -- Accept the code of an unknown algorithm: a newer version of the app may have written this record.
    if stop > #raw or code < 1 then error('a record is cut off') end
    local bytes = string.sub(raw, pos, stop)
    by_name[name] = {code = code, expiry = expiry, raw = bytes, payload = start - pos + 1, name = name}
    names[#names + 1] = name
    pos = stop + 1
  end
  return by_name, names
end

-- Returns the entry of a record.
local function entry_of(record)
  local raw, code, at = record.raw, record.code, record.payload
  local unpack_payload = ALGORITHMS[code].unpack
  if unpack_payload then return {record.name, code, record.expiry, unpack_payload(raw, at)} end
  local entry = cmsgpack.unpack(string.sub(raw, at))
  entry[1], entry[2], entry[3] = record.name, code, record.expiry
  return entry
end

-- Returns the record of an entry.
local function record_of(entry)
  local code = entry[2]
  local pack = ALGORITHMS[code].pack
  local payload = pack and pack(entry) or cmsgpack.pack({0, 0, 0, unpack(entry, 4)})
  local header = struct.pack('<I4BI2I4', entry[1], code, #payload, entry[3])
  return {code = code, expiry = entry[3], raw = header .. payload, payload = #header + 1, name = entry[1]}
end
