-- The usual case, decided without any of the functions that the files behind this one define: buckets and windows whose
-- states are there, in the program's order, under the same parameters, by a clock that went on, and all of which admit.
-- For anything else it answers nothing, having changed nothing, and decide.lua decides. Behind batch.lua and usage.lua.
--
-- ARGV[5]  '' if it is not to be tried; else for each packed state '<BI2' its limits and the bytes that their records
--          take, and then for each of these limits '<BI4BBddd' number, name, algorithm, slot of its cost, and
--            level    q, room and n; with n > 1 '<ddd' r, the part of room, 0 behind      (room: time of the capacity)
--            window   start and end (a calendar's; a fixed window's length and 0), capacity

-- Whether `count` intervals of q + r/n fit into whole + part/n.
local function spans(count, q, r, n, whole, part)
  local more = count * r
  local rest = more % n
  whole = whole - count * q - (more - rest) / n
  return whole > 0 or (whole == 0 and rest <= part)
end

local function usual()
  local call, read, write, program = redis.call, struct.unpack, struct.pack, ARGV[5]
  local _, flags, heads, meters, states, now, _, _, _, from, til, costs = read('<BBBBBdddddd', ARGV[3])
  local got = call('MGET', unpack(KEYS, 1, heads + states))
  for i = 1, heads do
    if got[i] ~= ARGV[2] then return end
  end
  if now < 0 then
    local time = call('TIME')
    now = time[1] * 1e6 + time[2]
  end
  if now < from or now >= til then return end
  local pos, binding, least, longest, standings = 1, 0, 1e300, 0, {}
  for i = 1, states do
    local raw, limits, bytes = got[heads + i]
    limits, bytes, pos = read('<BI2', program, pos)
    if not raw or #raw < bytes then return end
    local latest, out, at = read('<I4', raw), '', 5
    for _ = 1, limits do
      local number, name, code, slot, q, room, n, cost, left, reset
      number, name, code, slot, q, room, n, pos = read('<BI4BBddd', program, pos)
      cost = read('<d', ARGV[3], costs + slot * 8 - 8)
      local found, kind, size, _, body = read('<I4BI2I4', raw, at)
      if found ~= name or kind ~= code or cost == 0 then return end
      if code > 3 then
        local last, start, length, total = read('<i7i7I7I6', raw, body)
        if size ~= 27 or now < last then return end
        if code == 5 then
          if length ~= q or start % q ~= 0 then return end
        elseif start ~= q or start + length ~= room then
          return
        end
        total = total + cost
        left, reset = n - total, start + length - now
        if left < 0 or reset <= 0 then return end
        body = write('<i7i7I7I6', now, start, length, total)
      elseif n == 1 then
        local last, was, T = read('<I7I7I7', raw, body)
        if size ~= 21 or was ~= q or now < last then return end
        T = T + last - now
        T = (T > 0 and T or 0) + cost * q
        left, reset = room - T, T
        if left < 0 then return end
        left = (left - left % q) / q
        body = write('<I7I7I7', now, q, T)
      else
        local r, part, more
        r, part, more, pos = read('<ddd', program, pos)
        local last, was, wasr, wasn, T, g = read('<I7I7I4I4I7I4', raw, body)
        more = cost * r
        if size ~= 33 or was ~= q or wasr ~= r or wasn ~= n or now < last or more > 4503599627370496 then return end
        T = T + last - now
        if T < 0 then T, g = 0, 0 end
        g = g + more % n
        T = T + cost * q + (more - more % n) / n
        if g >= n then T, g = T + 1, g - n end
        room, part = room - T, part - g
        if part < 0 then room, part = room - 1, part + n end
        if room < 0 then return end
        -- A guess in doubles, put right exactly.
        left = math.floor((room + part / n) / (q + r / n))
        if (left + 1) * r > 4503599627370496 then return end
        if spans(left + 1, q, r, n, room, part) then
          left = left + 1
        elseif not spans(left, q, r, n, room, part) then
          left = left - 1
        end
        reset = g > 0 and T + 1 or T
        body = write('<I7I7I4I4I7I4', now, q, r, n, T, g)
      end
      if left < least or (left == least and number < binding) then least, binding = left, number end
      if reset > longest then longest = reset end
      local expiry = math.min(math.ceil((now + (reset > 60000000 and reset or 60000000)) / 1e6) + 1, 4294967295)
      if expiry > latest then latest = expiry end
      out = out .. write('<I4BI2I4', name, code, size, expiry) .. body
      at = at + 11 + size
      standings[number] = write('<i8i8i8', 1, left, reset)
    end
    got[i] = write('<I4', latest) .. out .. string.sub(raw, at)
    got[-i] = latest
  end

  for i = 1, states do
    if flags % 2 == 0 then
      call('SET', KEYS[heads + i], got[i], 'PX', got[-i] * 1000 - math.floor(now / 1000))
    else
      call('SET', KEYS[heads + i], got[i])
    end
  end
  local full = false
  for i = 1, meters do
    local cost, open = read('<d', ARGV[3], costs + i * 8 - 8), KEYS[heads + states + 1]
    if cost ~= 1 then
      full = usage_add(open, ARGV[5 + i], cost, 1, ARGV[1], string.match(ARGV[2], ' (.*)$'), now) or full
    elseif call('HINCRBY', open, ARGV[5 + i] .. '|1', 1) == 1 then
      full = usage_new(open, ARGV[1], string.match(ARGV[2], ' (.*)$'), now) or full
    end
  end
  if full then
    batch_seal(string.sub(KEYS[heads + states + 1], 1, -5), now, string.match(ARGV[2], ' (.*)$'), ARGV[1])
  end
  return write('<i8i8i8i8i8i8i8i8i8', 1, 1, binding, least, 0, longest, 0, now, now) .. table.concat(standings)
end

if ARGV[5] ~= '' then
  local reply = usual()
  if reply then return reply end
end
