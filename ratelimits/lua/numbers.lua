-- Functions for exact arithmetic, which the algorithms' files use.
-- Lua 5.1 has no integers, only doubles. A double holds every integer up to 2^53 exactly, so all numbers here are
-- whole. A number with a fraction is written as two whole numbers, a *pair over n*: the pair (whole, part) means
-- whole + part/n.
-- In the algorithms' files too, 9007199254740992 is 2^53, and 4503599627370496 is 2^52 (142 years, if it is in µs).

-- Returns floor(a*b/n) and a*b mod n, for whole 0 <= a, b < 2^53, 0 < n < 2^53 and a quotient below 2^53.
local function muldiv(a, b, n)
  local product = a * b
  if product < 9007199254740992 then
    local rest = product % n
    return (product - rest) / n, rest
  end
  -- The product is too large for a double, so multiply by one bit of b at a time, from the highest bit down. Every
  -- step is exact.
  local a_rest = a % n
  local a_quotient = (a - a_rest) / n
  local quotient, rest, bit = 0, 0, 4503599627370496
  while bit >= 1 do
    quotient, rest = quotient * 2, rest * 2
    if rest >= n then quotient, rest = quotient + 1, rest - n end
    if b >= bit then
      b = b - bit
      quotient = quotient + a_quotient
      -- Compare without a sum: rest + a_rest could be above 2^53.
      if rest >= n - a_rest then quotient, rest = quotient + 1, rest - (n - a_rest) else rest = rest + a_rest end
    end
    bit = bit / 2
  end
  return quotient, rest
end

-- Returns how many intervals fit into a time. An interval is the pair (q, r) over n. The time is the pair (whole, part)
-- over n*m (m is usually 1; it is larger if the fraction needs a larger denominator). Returns 0 if `whole` is negative.
-- Estimates the number with doubles, then corrects it exactly.
local function intervals(whole, part, q, r, n, m)
  if whole < 0 then return 0 end
  if r == 0 then return (whole - whole % q) / q end
  local count = math.floor((whole + part / (n * m)) / (q + r / n))
  if count >= 4503599627370496 then return count end -- too large to correct
  for _ = 1, 8 do -- the estimate is wrong by a few intervals at most
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
  error('the numbers of a state do not fit together: reset the key')
end

-- Returns functions for exact numbers above 2^53. (A function with the line "--@rarely" is defined only when it is
-- called.)
--@rarely
local function exact_numbers()
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
    if not (x >= 0 and x < 1e300) then error('the numbers of a state do not fit together: reset the key') end
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

  -- Multiplies whole + part/base by a/b. Returns three numbers: the product, as a pair over n*m, and m. Chooses m so
  -- that the product is exact and n*m is below 2^52. If there is no such m, then m is 1, and the product is rounded
  -- down.
  -- If a or b is 2^53 or more after both are divided by their greatest common divisor, the calculation uses doubles and
  -- is only as exact as they are.
  local function scale(whole, part, base, a, b, n)
    local common = gcd(a, b)
    a, b = a / common, b / common
    if a >= 9007199254740992 or b >= 9007199254740992 then
      whole = (whole + part / base) * (a / b)
      part = (whole - math.floor(whole)) * base
      whole, a, b = math.floor(whole), 1, 1
    end
    local out, remainder = muldiv(whole, a, b)
    -- The rest of the result, remainder/b + part*a/(base*b), is not in `out` yet.
    local function reduce(x, y)
      common = gcd(x, y)
      return x / common, y / common
    end
    -- Divide numerators and denominators by their common divisors, so that the products below stay small.
    local upper, lower = a, b
    part, base = reduce(part, base)
    upper, base = reduce(upper, base)
    part, lower = reduce(part, lower)
    remainder, b = reduce(remainder, b)
    -- The inexact value with the denominator 1 is used if the exact numbers are too large.
    local top, bottom = remainder / b + part / base * upper / lower, 1
    if base * lower < 9007199254740992 then
      local more, rest = muldiv(part, upper, base * lower)
      common = gcd(b, base * lower)
      if b / common * base * lower < 9007199254740992 then
        bottom = b / common * base * lower
        top = remainder * (bottom / b) + rest * (b / common)
        out = out + more
      end
    end
    -- The rest is top/bottom now. Add its whole part to the result.
    local fraction = top % bottom
    out, top = out + (top - fraction) / bottom, fraction
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
  return {big = big, times = times, plus = plus, at_most = at_most, gcd = gcd, scale = scale}
end
