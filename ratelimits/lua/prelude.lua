-- Functions for exact arithmetic, and for packed states: one string with the states of several limits of one key.
-- The algorithms' files use these functions.
-- Lua 5.1 has no integers, only doubles. Doubles hold every integer up to 2^53 exactly, so all numbers here are whole. A
-- number with a fraction is a pair (whole, part) over a fixed denominator n. It means whole + part/n.

-- Returns floor(a*b/n) and a*b mod n, for whole 0 <= a, b < 2^53, 0 < n < 2^53 and a quotient below 2^53.
local function muldiv(a, b, n)
  local product = a * b
  if product < 9007199254740992 then
    local rest = product % n
    return (product - rest) / n, rest
  end
  -- The product is too large for a double, so multiply by one bit of b at a time. Every step is exact.
  local ar = a % n
  local aq = (a - ar) / n
  local quotient, rest, bit = 0, 0, 4503599627370496
  while bit >= 1 do
    quotient, rest = quotient * 2, rest * 2
    if rest >= n then quotient, rest = quotient + 1, rest - n end
    if b >= bit then
      b = b - bit
      quotient = quotient + aq
      if rest >= n - ar then quotient, rest = quotient + 1, rest - (n - ar) else rest = rest + ar end
    end
    bit = bit / 2
  end
  return quotient, rest
end

-- Returns the greatest common divisor. Returns 1 if a number is 2^53 or more, since % is not exact for such numbers.
local function gcd(a, b)
  if a >= 9007199254740992 or b >= 9007199254740992 then return 1 end
  while b > 0 do a, b = b, a % b end
  return a
end

-- Converts a whole number to a list of limbs of seven digits, lowest first. Lists hold numbers beyond 2^53 exactly.
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

-- Returns (whole + part/base) * a/b as a pair over n*m, and m. The result is exact if a denominator n*m below 2^52 is
-- enough. Otherwise it is rounded down to a multiple of 1/n. If a or b is 2^53 or more, the result is as exact as doubles
-- are.
local function scale(whole, part, base, a, b, n)
  local common = gcd(a, b)
  a, b = a / common, b / common
  if a >= 9007199254740992 or b >= 9007199254740992 then
    whole = (whole + part / base) * (a / b)
    part = (whole - math.floor(whole)) * base
    whole, a, b = math.floor(whole), 1, 1
  end
  local out, left = muldiv(whole, a, b)
  -- The remainder is left/b + part*a/(base*b), usually a fraction of small numbers.
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

-- Returns how many intervals of q + r/n fit into whole + part/(n*m). It estimates with doubles, then corrects exactly.
local function intervals(whole, part, q, r, n, m)
  if whole < 0 then return 0 end
  if r == 0 then return (whole - whole % q) / q end
  local count = math.floor((whole + part / (n * m)) / (q + r / n))
  if count >= 4503599627370496 then return count end -- too large to correct
  while true do
    local t, g = muldiv(count, r, n)
    t, g = t + count * q, g * m
    if t > whole or (t == whole and g > part) then
      count = count - 1
    else
      t, g = muldiv(count + 1, r, n)
      t, g = t + (count + 1) * q, g * m
      if t > whole or (t == whole and g > part) then return count end
      count = count + 1
    end
  end
end

local function int(x) return string.format('%.0f', x) end

-- States are kept for this much longer (µs) than needed, so that they still exist if the clock steps back.
local CLOCK_BACK = 60000000
local FOREVER = 34560000000000 -- 400 days
local ANY = -1 -- as a timeout: any wait is accepted
local NEVER = -1 -- as a retry_after

-- A packed state begins with its expiry in seconds, '<I4'. Records follow, each of one limit: '<I4BI2I4' name (crc32),
-- algorithm, size, expiry in seconds, then `size` bytes in the algorithm's format. An entry is an unpacked record: a list
-- of name, algorithm, expiry, `last` and the algorithm's other fields. `last` is the moment of the last charge (µs).

-- The algorithms, by their code. The files loaded after this one add them. An algorithm is a table of functions that get a
-- limit `l`:
--   initial   sets the fields of a limit without a state
--   resolve   sets the fields from the state's entry and brings them up to the moment of the decision, l.now
--   check     decides: sets l.ok, and l.wait or l.retry (µs)
--   charge, refund, release, reset   change the state
--   standing  returns remaining and reset_after (µs)
--   entry     returns the new entry, and for how long it is needed (µs)
--   keep      sets the time to live of own keys
-- l.cost are the permits of the request, l.p the params from the program, l.changed the moment from which these params
-- hold, l.shift how far the clock has stepped back behind the state (µs), l.own the limit's first own key.
-- An algorithm whose state has a fixed format also has `pack` (entry to bytes) and `unpack` (bytes to values). The states
-- of other algorithms are packed by cmsgpack.
local A = {}

-- Returns a table name -> {code, expiry, raw, payload}, and a list of the names in the order of their records. Raises an
-- error if `raw` is not a packed state.
local function records(raw)
  local out, order, pos = {}, {}, 5
  while pos <= #raw do
    local name, code, size, expiry, start = struct.unpack('<I4BI2I4', raw, pos)
    local stop = start + size - 1
    -- Keep a record whose algorithm is not known here: a newer version of the app may have written it.
    if stop > #raw or code < 1 then error('a record is cut off') end
    out[name] = {code = code, expiry = expiry, raw = string.sub(raw, pos, stop), payload = start - pos + 1, name = name}
    order[#order + 1] = name
    pos = stop + 1
  end
  return out, order
end

local function entry_of(record)
  local raw, code, at = record.raw, record.code, record.payload
  local format = A[code].unpack
  if format then return {record.name, code, record.expiry, format(raw, at)} end
  local entry = cmsgpack.unpack(string.sub(raw, at))
  entry[1], entry[2], entry[3] = record.name, code, record.expiry
  return entry
end

local function record_of(entry)
  local code = entry[2]
  local format = A[code].pack
  local body = format and format(entry) or cmsgpack.pack({0, 0, 0, unpack(entry, 4)})
  local head = struct.pack('<I4BI2I4', entry[1], code, #body, entry[3])
  return {code = code, expiry = entry[3], raw = head .. body, payload = #head + 1, name = entry[1]}
end
