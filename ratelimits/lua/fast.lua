-- The fast path: a quicker way to decide the most frequent requests. It is loaded before all other files.
-- The fast path decides only if all of this is true:
--   each limit is a bucket or a window, and admits the request
--   each limit has a state, with the parameters of its rule
--   the clock has not stepped back
-- Otherwise the fast path changes nothing and returns nothing. Then decide.lua decides.
-- Keep this file short: every definition in it takes time at each request.
--
-- decide.lua describes KEYS and ARGV[1] to ARGV[4]. algorithms/level.lua explains the letters q, r, n, T and g.
-- ARGV[5]   '' if the fast path must not be used. Otherwise a list of numbers (doubles). For each packed state:
--             the number of the request's limits that are in this state
--             the size (bytes) of a state that contains only these limits
--             for each of these limits: name, algorithm, payload size (bytes of its record after the header), number of
--               the limit, slot of its cost, then the numbers of its rule, which depend on the payload size:
--               21  bucket             q, room, 1              (`room` is the time that `capacity` permits take)
--               33  bucket with n > 1  q, room, n, r, part, 0  (here this time is room + part/n)
--               27  window             start, end, capacity    (of a calendar window)
--                                      length, 0, capacity     (of a fixed window)
-- The last arguments are struct formats: of ARGV[5], of each packed state, and of the reply.
--
-- Returns the reply, and a list of the counters that counted.lua must still handle (nil if there are none).
local function fast_path()
  local call, read, write = redis.call, struct.unpack, struct.pack
  local _, flags, head_count, meter_count, state_count, now, _, _, _, valid_from, valid_until, first_cost, costs_at =
    read('<BBBBBddddddd', ARGV[3])
  costs_at = costs_at - 8
  local stored = call('MGET', unpack(KEYS, 1, head_count + state_count))
  for i = 1, head_count do
    if stored[i] ~= ARGV[2] then return end
  end
  if now < 0 then
    local time = call('TIME')
    now = time[1] * 1e6 + time[2]
  end
  if now < valid_from or now >= valid_until then return end
  local formats_at = #ARGV - state_count - 1
  -- `numbers` are the numbers of ARGV[5], `at` is the position in them.
  local numbers, at, expiries = {read(ARGV[formats_at], ARGV[5])}, 1, {0, 0, 0}
  local binding, least_remaining, longest_reset, reply_size = 0, 1e300, 0, 9
  local reply = {1, 1, 0, 0, 0, 0, 0, now, now, 0, 0, 0, 0, 0, 0, 0, 0, 0}
  for s = 1, state_count do
    -- `values` are the values of the state: first its expiry, then all values of the records of these limits.
    local raw, limit_count, bytes, values, records = stored[head_count + s], numbers[at], numbers[at + 1]
    if not raw then return end
    at = at + 2
    if #raw >= bytes then
      values = {read(ARGV[formats_at + s], raw)}
      local i, j = at, 2
      for _ = 1, limit_count do
        local size = numbers[i + 2]
        if values[j] ~= numbers[i] or values[j + 1] ~= numbers[i + 1] or values[j + 2] ~= size then
          values = nil
          break
        end
        if size == 21 then i, j = i + 8, j + 7 elseif size == 27 then i, j = i + 8, j + 8 else i, j = i + 11, j + 10 end
      end
    end
    if not values then
      -- The state does not begin with the records of these limits: find each record. Note where it is in `records`.
      local starts, pos, i = {}, 5, at
      local formats = {[21] = '<I4BI2I4I7I7I7', [27] = '<I4BI2I4i7i7I7I6', [33] = '<I4BI2I4I7I7I4I4I7I4'}
      while pos + 10 <= #raw do
        local name, _, size = read('<I4BI2', raw, pos)
        starts[name], pos = pos, pos + 11 + size
      end
      if pos ~= #raw + 1 then return end
      values, records = {(read('<I4', raw))}, {}
      for k = 1, limit_count do
        local size, pos = numbers[i + 2], starts[numbers[i]]
        if not pos then return end
        local _, code, stored_size = read('<I4BI2', raw, pos)
        if code ~= numbers[i + 1] or stored_size ~= size then return end
        local record = {read(formats[size], raw, pos)}
        for j = 1, #record - 1 do values[#values + 1] = record[j] end
        records[k], i = {pos, size, formats[size]}, i + (size == 33 and 11 or 8)
      end
    end
    -- `j` is the position in `values` at which the record of a limit begins.
    local latest_expiry, j = values[1], 2
    for _ = 1, limit_count do
      local size, number, cost = numbers[at + 2], numbers[at + 3], first_cost
      local remaining, reset
      if numbers[at + 4] > 1 then cost = read('<d', ARGV[3], costs_at + numbers[at + 4] * 8 - 8) end
      if cost == 0 then return end
      local expiry_at = j + 3
      if size == 27 then
        local start_or_length, stop, capacity = numbers[at + 5], numbers[at + 6], numbers[at + 7]
        local last, start, length, count = values[j + 4], values[j + 5], values[j + 6], values[j + 7] + cost
        if now < last then return end
        if stop == 0 then -- a fixed window, without an end in its rule
          if length ~= start_or_length or start % length ~= 0 then return end
        elseif start ~= start_or_length or start + length ~= stop then
          return
        end
        remaining, reset = capacity - count, start + length - now
        if remaining < 0 or reset <= 0 then return end
        values[j + 4], values[j + 7] = now, count
        at, j = at + 8, j + 8
      elseif size == 21 then
        local q, room, last, T = numbers[at + 5], numbers[at + 6], values[j + 4], values[j + 6]
        if values[j + 5] ~= q or now < last then return end
        T = T + last - now
        T = (T > 0 and T or 0) + cost * q
        remaining, reset = room - T, T
        if remaining < 0 then return end
        remaining = (remaining - remaining % q) / q
        values[j + 4], values[j + 6] = now, T
        at, j = at + 8, j + 7
      else
        local q, room, n, r, part = numbers[at + 5], numbers[at + 6], numbers[at + 7], numbers[at + 8], numbers[at + 9]
        local last, T, g = values[j + 4], values[j + 8], values[j + 9]
        local more = cost * r
        if values[j + 5] ~= q or values[j + 6] ~= r or values[j + 7] ~= n then return end
        if now < last or more > 4503599627370496 then return end -- 2^52
        T = T + last - now
        if T < 0 then T, g = 0, 0 end
        g = g + more % n
        T = T + cost * q + (more - more % n) / n
        if g >= n then T, g = T + 1, g - n end
        -- From here on, room + part/n is the part of the room that is still free.
        room, part = room - T, part - g
        if part < 0 then room, part = room - 1, part + n end
        if room < 0 then return end
        -- Find how many intervals of q + r/n fit into room + part/n. A division of doubles gives this number, or a
        -- number that differs by one. So begin with the result of the division + 1. While it is too high, subtract one.
        remaining = math.floor((room + part / n) / (q + r / n)) + 1
        if remaining * r > 4503599627370496 then return end
        for _ = 1, 2 do
          local rest = remaining * r % n
          local spare = room - remaining * q - (remaining * r - rest) / n
          if spare > 0 or (spare == 0 and rest <= part) then break end
          remaining = remaining - 1
        end
        reset = g > 0 and T + 1 or T
        values[j + 4], values[j + 8], values[j + 9] = now, T, g
        at, j = at + 11, j + 10
      end
      if remaining < least_remaining or (remaining == least_remaining and number < binding) then
        least_remaining, binding = remaining, number
      end
      if reset > longest_reset then longest_reset = reset end
      local expiry = now + (reset > 60000000 and reset or 60000000)
      local rest = expiry % 1e6
      expiry = (expiry - rest) / 1e6 + (rest > 0 and 2 or 1)
      if expiry > 4294967295 then expiry = 4294967295 end
      values[expiry_at] = expiry
      if expiry > latest_expiry then latest_expiry = expiry end
      local reply_at = 7 + 3 * number
      reply_size = reply_size + 3
      reply[reply_at], reply[reply_at + 1], reply[reply_at + 2] = 1, remaining, reset
    end
    values[1], expiries[s] = latest_expiry, latest_expiry
    if records then
      j, raw = 2, write('<I4', latest_expiry) .. string.sub(raw, 5)
      for k = 1, limit_count do
        local pos, size, format = unpack(records[k])
        local after = j + (size == 21 and 7 or size == 27 and 8 or 10)
        local record = write(format, unpack(values, j, after - 1))
        raw, j = string.sub(raw, 1, pos - 1) .. record .. string.sub(raw, pos + 11 + size), after
      end
      stored[head_count + s] = raw
    elseif #raw == bytes then
      stored[head_count + s] = write(ARGV[formats_at + s], unpack(values))
    else
      stored[head_count + s] = write(ARGV[formats_at + s], unpack(values)) .. string.sub(raw, bytes + 1)
    end
  end

  for s = 1, state_count do
    if flags % 2 == 0 then
      local ttl = expiries[s] * 1000 - (now - now % 1000) / 1000
      call('SET', KEYS[head_count + s], stored[head_count + s], 'PX', ttl)
    else
      call('SET', KEYS[head_count + s], stored[head_count + s])
    end
  end
  -- Count a cost of 1 here. Leave other costs to counted.lua. A counter with a cost of 1 is in `counters` only if it is
  -- new: then counted.lua checks if the batch is new too.
  local open, counters = KEYS[head_count + state_count + 1]
  for i = 1, meter_count do
    local cost = i == 1 and first_cost or read('<d', ARGV[3], costs_at + i * 8 - 8)
    if cost ~= 1 or call('HINCRBY', open, ARGV[5 + i] .. '|1', 1) == 1 then
      counters = counters or {open = open, now = now}
      counters[#counters + 1] = {name = ARGV[5 + i], cost = cost}
    end
  end
  reply[3], reply[4], reply[6] = binding, least_remaining, longest_reset
  return write(ARGV[#ARGV], unpack(reply, 1, reply_size)), counters
end

local fast_reply, fast_counters
if ARGV[5] ~= '' then
  fast_reply, fast_counters = fast_path()
  if fast_reply and not fast_counters then return fast_reply end
end
