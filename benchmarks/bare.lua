-- The floor: token buckets in packed strings, decided and counted with nothing around them. No algorithm but one, no
-- parameters that change, no refusal's reason, no batches that seal; benchmarks only.
-- KEYS     heads, packed states, and, if anything is counted, the hash it is counted in
-- ARGV[1]  '<BBB' heads, states, limits of each state   ARGV[2]  the head expected
-- ARGV[3]  '<d…' interval (µs) and room (µs) of each limit   ARGV[4]  what is counted, or ''
local call, read = redis.call, struct.unpack
local heads, states, each = read('<BBB', ARGV[1])
local got = call('MGET', unpack(KEYS, 1, heads + states))
for i = 1, heads do
  if got[i] ~= ARGV[2] then
    if got[i] then return {0} end
    call('SET', KEYS[i], ARGV[2])
  end
end
local time = call('TIME')
local now = time[1] * 1e6 + time[2]
local format, fresh = '<' .. string.rep('I7I7', each), string.rep('\0', 14 * each)
local p = {read('<' .. string.rep('d', 2 * states * each), ARGV[3])}
local reply, values, at, least = {1, 1, 0, 0, 0, 0, 0, now}, {}, 1, 1e300
for s = 1, states do
  local v, longest = {read(format, got[heads + s] or fresh)}, 0
  for i = 1, each do
    local left = v[2 * i] - now + v[2 * i - 1]
    left = (left > 0 and left or 0) + p[at]
    if left > p[at + 1] then return {1, 0} end
    local remaining = math.floor((p[at + 1] - left) / p[at])
    if remaining < least then least = remaining end
    v[2 * i - 1], v[2 * i] = now, left
    if left > longest then longest = left end
    reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = 1, remaining, left
    at = at + 2
  end
  values[s] = struct.pack(format, unpack(v, 1, 2 * each))
  call('SET', KEYS[heads + s], values[s], 'PX', 60000 + math.ceil(longest / 1000))
end
if ARGV[4] ~= '' then
  call('HINCRBY', KEYS[#KEYS], 'a|' .. (now - now % 900000000) / 1e6 .. ARGV[4], 1)
end
reply[4] = least
return reply
