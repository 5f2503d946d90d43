-- The fast path: a quicker way to decide the most frequent case. It is loaded before everything else.
-- It decides only if all limits are buckets and windows that admit the request, their states exist and have the same
-- parameters as the rules, and the clock has not stepped back. Otherwise it changes nothing and returns nothing, and
-- decide.lua decides. Keep this file short: every definition in it takes time at each request.
--
-- KEYS and ARGV[1] to ARGV[4] are described in decide.lua; the letters q, r, n, T and g in algorithms/level.lua.
-- ARGV[5]   '' if the fast path must not be tried. Otherwise doubles. For each packed state: the number of its limits, and
--           the size of the state (bytes) up to the end of their records, if these records come first. Then for each limit:
--           name, algorithm, size of its record, number of the limit, slot of its cost, and
--             level    q, room and n; if n > 1 then also r, the part of room, 0   (room: the time that capacity takes)
--             window   start and end for a calendar, length and 0 for a fixed window; capacity
-- last of ARGV   the struct formats of ARGV[5], of each packed state, and of the reply
--
-- Returns the reply, and the new counters, which counted.lua handles.
local function fast_path()
  local call, read, write = redis.call, struct.unpack, struct.pack
  local _, flags, heads, meters, states, now, _, _, _, from, til, first, costs = read('<BBBBBddddddd', ARGV[3])
  costs = costs - 8
  local got = call('MGET', unpack(KEYS, 1, heads + states))
  for i = 1, heads do
    if got[i] ~= ARGV[2] then return end
  end
  if now < 0 then
    local time = call('TIME')
    now = time[1] * 1e6 + time[2]
  end
  if now < from or now >= til then return end
  local formats = #ARGV - states - 1
  local p, at, ends = {read(ARGV[formats], ARGV[5])}, 1, {0, 0, 0}
  local binding, least, longest, total = 0, 1e300, 0, 9
  local reply = {1, 1, 0, 0, 0, 0, 0, now, now, 0, 0, 0, 0, 0, 0, 0, 0, 0}
  for s = 1, states do
    local raw, count, bytes, v, positions = got[heads + s], p[at], p[at + 1]
    if not raw then return end
    at = at + 2
    if #raw >= bytes then
      v = {read(ARGV[formats + s], raw)}
      local i, j = at, 2
      for _ = 1, count do
        local size = p[i + 2]
        if v[j] ~= p[i] or v[j + 1] ~= p[i + 1] or v[j + 2] ~= size then
          v = nil
          break
        end
        if size == 21 then i, j = i + 8, j + 7 elseif size == 27 then i, j = i + 8, j + 8 else i, j = i + 11, j + 10 end
      end
    end
    if not v then
      -- The records of these limits do not come first in the state: find each of them, and list their values in `v`.
      local starts_of, pos, i, formats = {}, 5, at, {[21] = '<I4BI2I4I7I7I7', [27] = '<I4BI2I4i7i7I7I6', [33] = '<I4BI2I4I7I7I4I4I7I4'}
      while pos + 10 <= #raw do
        local name, _, size = read('<I4BI2', raw, pos)
        starts_of[name], pos = pos, pos + 11 + size
      end
      if pos ~= #raw + 1 then return end
      v, positions = {(read('<I4', raw))}, {}
      for k = 1, count do
        local size, pos = p[i + 2], starts_of[p[i]]
        if not pos then return end
        local _, code, has = read('<I4BI2', raw, pos)
        if code ~= p[i + 1] or has ~= size then return end
        local record = {read(formats[size], raw, pos)}
        for j = 1, #record - 1 do v[#v + 1] = record[j] end
        positions[k], i = {pos, size, formats[size]}, i + (size == 33 and 11 or 8)
      end
    end
    local latest, j = v[1], 2
    for _ = 1, count do
      local size, number, c, q, room, n = p[at + 2], p[at + 3], first, p[at + 5], p[at + 6], p[at + 7]
      local left, reset
      if p[at + 4] > 1 then c = read('<d', ARGV[3], costs + p[at + 4] * 8 - 8) end
      if c == 0 then return end
      local expires = j + 3
      if size == 27 then
        local last, start, length, sum = v[j + 4], v[j + 5], v[j + 6], v[j + 7] + c
        if now < last then return end
        if room == 0 then
          if length ~= q or start % q ~= 0 then return end
        elseif start ~= q or start + length ~= room then
          return
        end
        left, reset = n - sum, start + length - now
        if left < 0 or reset <= 0 then return end
        v[j + 4], v[j + 7] = now, sum
        at, j = at + 8, j + 8
      elseif size == 21 then
        local last, T = v[j + 4], v[j + 6]
        if v[j + 5] ~= q or now < last then return end
        T = T + last - now
        T = (T > 0 and T or 0) + c * q
        left, reset = room - T, T
        if left < 0 then return end
        left = (left - left % q) / q
        v[j + 4], v[j + 6] = now, T
        at, j = at + 8, j + 7
      else
        local r, part, last, T, g = p[at + 8], p[at + 9], v[j + 4], v[j + 8], v[j + 9]
        local more = c * r
        if v[j + 5] ~= q or v[j + 6] ~= r or v[j + 7] ~= n or now < last or more > 4503599627370496 then return end
        T = T + last - now
        if T < 0 then T, g = 0, 0 end
        g = g + more % n
        T = T + c * q + (more - more % n) / n
        if g >= n then T, g = T + 1, g - n end
        room, part = room - T, part - g
        if part < 0 then room, part = room - 1, part + n end
        if room < 0 then return end
        -- How many intervals of q + r/n fit into room + part/n: guess in doubles (at most one off), then correct exactly.
        left = math.floor((room + part / n) / (q + r / n)) + 1
        if left * r > 4503599627370496 then return end
        for _ = 1, 2 do
          local rest = left * r % n
          local spare = room - left * q - (left * r - rest) / n
          if spare > 0 or (spare == 0 and rest <= part) then break end
          left = left - 1
        end
        reset = g > 0 and T + 1 or T
        v[j + 4], v[j + 8], v[j + 9] = now, T, g
        at, j = at + 11, j + 10
      end
      if left < least or (left == least and number < binding) then least, binding = left, number end
      if reset > longest then longest = reset end
      local expiry = now + (reset > 60000000 and reset or 60000000)
      local rest = expiry % 1e6
      expiry = (expiry - rest) / 1e6 + (rest > 0 and 2 or 1)
      if expiry > 4294967295 then expiry = 4294967295 end
      v[expires] = expiry
      if expiry > latest then latest = expiry end
      number, total = 7 + 3 * number, total + 3
      reply[number], reply[number + 1], reply[number + 2] = 1, left, reset
    end
    v[1], ends[s] = latest, latest
    if positions then
      j, raw = 2, write('<I4', latest) .. string.sub(raw, 5)
      for k = 1, count do
        local pos, size, format = unpack(positions[k])
        local after = j + (size == 21 and 7 or size == 27 and 8 or 10)
        local record = write(format, unpack(v, j, after - 1))
        raw, j = string.sub(raw, 1, pos - 1) .. record .. string.sub(raw, pos + 11 + size), after
      end
      got[heads + s] = raw
    elseif #raw == bytes then
      got[heads + s] = write(ARGV[formats + s], unpack(v))
    else
      got[heads + s] = write(ARGV[formats + s], unpack(v)) .. string.sub(raw, bytes + 1)
    end
  end

  for s = 1, states do
    if flags % 2 == 0 then
      call('SET', KEYS[heads + s], got[heads + s], 'PX', ends[s] * 1000 - (now - now % 1000) / 1000)
    else
      call('SET', KEYS[heads + s], got[heads + s])
    end
  end
  local new
  for i = 1, meters do
    local c = i == 1 and first or read('<d', ARGV[3], costs + i * 8 - 8)
    if c ~= 1 or call('HINCRBY', KEYS[heads + states + 1], ARGV[5 + i] .. '|1', 1) == 1 then
      new = new or {open = KEYS[heads + states + 1], now = now}
      new[#new + 1] = {ARGV[5 + i], c}
    end
  end
  reply[3], reply[4], reply[6] = binding, least, longest
  return write(ARGV[#ARGV], unpack(reply, 1, total)), new
end

local fast_reply, fast_new
if ARGV[5] ~= '' then
  fast_reply, fast_new = fast_path()
  if fast_reply and not fast_new then return fast_reply end
end
