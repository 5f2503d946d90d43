-- The usual case, decided without any of the functions that the files behind this one define: buckets and windows whose
-- states are there, in the program's order, under the same parameters, by a clock that went on, and all of which admit.
-- For anything else it answers nothing, having changed nothing, and decide.lua decides. Behind batch.lua and usage.lua.
--
-- ARGV[7]    doubles. For each state the number of its limits and the bytes that their records take; then for each limit
--            its number, name, algorithm, slot of its cost, and
--              level, whole interval   q, room                       (room: time of the capacity)
--              level, with a fraction  q, n, r, room, part of it
--              window                  start and end (a calendar's; a fixed window's length and 0), capacity
-- The last ARGV is the format of ARGV[7], those before it the formats of the states.

-- Whether `count` intervals of q + r/n fit into whole + part/n.
local function spans(count, q, r, n, whole, part)
  local more = count * r
  local rest = more % n
  whole = whole - count * q - (more - rest) / n
  return whole > 0 or (whole == 0 and rest <= part)
end

local function usual()
  local call, read = redis.call, struct.unpack
  local op, flags, heads, meters, now, _, _, _, states = read('<BBBBddddB', ARGV[3])
  local got = call('MGET', unpack(KEYS, 1, heads + states))
  for i = 1, heads do
    if got[i] ~= ARGV[6] then return end
  end
  if now < 0 then
    local time = call('TIME')
    now = time[1] * 1e6 + time[2]
  end
  local bin, period = 0, 0
  if meters > 0 then
    local b1, b2, b3 = read('<ddd', ARGV[8])
    if now < b1 or now >= b3 then return end
    bin, period = (now - now % 900000000) / 1e6, (now < b2 and b1 or b2) / 1e6
  end
  local program, formats = {read(ARGV[#ARGV], ARGV[7])}, #ARGV - 1 - states
  local reply, values, at, least, longest = {1, 1, 0, 0, 0, 0, 0, now, bin, period}, {}, 1, 1e300, 0
  for i = 1, states do
    local raw, bytes, last = got[heads + i], program[at + 1], at + 2
    if not raw or #raw < bytes then return end
    local v, o = {read(ARGV[formats + i], raw)}, 2
    local latest, life = v[1], 60000000
    at = at + 2
    for _ = 1, program[last - 2] do
      local number, name, code = program[at], program[at + 1], program[at + 2]
      local cost, elapsed, left, reset = read('<d', ARGV[5], program[at + 3] * 8 - 7), now - v[o + 4], 0, 0
      if v[o] ~= name or v[o + 1] ~= code or elapsed < 0 or cost == 0 then return end
      local size, q = v[o + 2], program[at + 4]
      if code > 3 then
        local start, length, total = v[o + 5], v[o + 6], v[o + 7] + cost
        if code == 5 then
          if size ~= 27 or length ~= q or start % q ~= 0 then return end
        elseif size ~= 27 or start ~= q or start + length ~= program[at + 5] then
          return
        end
        left, reset = program[at + 6] - total, start + length - now
        if left < 0 or reset <= 0 then return end
        v[o + 7] = total
        at = at + 7
      elseif size == 21 then
        local T = v[o + 6] - elapsed
        T = (T > 0 and T or 0) + cost * q
        left, reset = program[at + 5] - T, T
        if left < 0 or v[o + 5] ~= q then return end
        left = (left - left % q) / q
        v[o + 6] = T
        at = at + 6
      else
        local n, r, T, g, more = program[at + 5], program[at + 6], v[o + 8] - elapsed, v[o + 9], cost * program[at + 6]
        if size ~= 33 or v[o + 5] ~= q or v[o + 6] ~= r or v[o + 7] ~= n or more > 4503599627370496 then return end
        if T < 0 then T, g = 0, 0 end
        g = g + more % n
        T = T + cost * q + (more - more % n) / n
        if g >= n then T, g = T + 1, g - n end
        local whole, part = program[at + 7] - T, program[at + 8] - g
        if part < 0 then whole, part = whole - 1, part + n end
        if whole < 0 then return end
        -- A guess in doubles, put right exactly.
        left = math.floor((whole + part / n) / (q + r / n))
        if (left + 1) * r > 4503599627370496 then return end
        if spans(left + 1, q, r, n, whole, part) then
          left = left + 1
        elseif not spans(left, q, r, n, whole, part) then
          left = left - 1
        end
        reset = g > 0 and T + 1 or T
        v[o + 8], v[o + 9] = T, g
        at = at + 9
      end
      local place = 8 + 3 * number
      reply[place], reply[place + 1], reply[place + 2] = 1, left, reset
      if left < least or (left == least and number < reply[3]) then least, reply[3] = left, number end
      if reset > longest then longest = reset end
      life = reset > 60000000 and reset or 60000000
      v[o + 3] = math.ceil((now + life) / 1e6) + 1
      if v[o + 3] > latest then latest = v[o + 3] end
      v[o + 4] = now
      o = o + (code > 3 and 8 or size == 21 and 7 or 10)
    end
    v[1] = latest
    values[i] = struct.pack(ARGV[formats + i], unpack(v, 1, o - 1)) .. string.sub(raw, bytes + 1)
  end

  local milliseconds = flags % 2 == 0 and now / 1000
  for i = 1, states do
    if milliseconds then
      call('SET', KEYS[heads + i], values[i], 'PX', math.floor(read('<I4', values[i]) * 1000 - milliseconds))
    else
      call('SET', KEYS[heads + i], values[i])
    end
  end
  if meters > 0 then
    local open, prefix, full = KEYS[heads + states + 1], nil, false
    for i = 1, meters do
      local field = 'a|' .. bin .. '|' .. period .. '|' .. ARGV[7 + 2 * i] .. '|' .. ARGV[8 + 2 * i] .. '|' .. ARGV[1]
      prefix = prefix or string.sub(open, 1, -5)
      full = usage_add(open, field, read('<d', ARGV[5], i * 8 - 7), 1, prefix, ARGV[2], ARGV[6], now) or full
    end
    if full then batch_seal(prefix, now, string.match(ARGV[6], ' (.*)$'), ARGV[2]) end
  end
  reply[4], reply[6] = least, longest
  return reply
end

if ARGV[7] ~= '' then
  local reply = usual()
  if reply then return reply end
end
