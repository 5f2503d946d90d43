-- The bare script of the benchmarks. It decides token buckets and counts the request with as little work as possible.
-- It has only one algorithm, rules cannot be edited, a refusal has no reason, and batches are not sealed.
-- KEYS     heads (see lua/decide.lua), packed states and, if requests are counted, the hash of the open batch
-- ARGV[1]  '<BBB' numbers of heads, of states, and of limits in each state   ARGV[2]  the expected head
-- ARGV[3]  '<d…' for each limit: the µs that a request adds to the level of the bucket, and the highest level in µs
-- ARGV[4]  the end of the counter's name, which follows "a|" and the bin; or '' if requests are not counted
-- ARGV[5]  the struct format of a state   ARGV[6]  the struct format of ARGV[3]
-- Returns  {0}: a head is not the expected head. {1, 0}: the request is refused. If the request is admitted:
--          {1, 1, 0, the fewest permits left of all limits, 0, 0, 0, now (µs)}. Then for each limit the permits left,
--          and the level in µs
local call, read, write = redis.call, struct.unpack, struct.pack
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
local numbers = {read(ARGV[6], ARGV[3])}
local reply, position, least = {1, 1, 0, 0, 0, 0, 0, now}, 1, 1e300
for s = 1, states do
  -- For each limit: the moment of the last request, and the level at this moment. The level falls by 1 µs each µs.
  local state, longest = {read(ARGV[5], got[heads + s] or string.rep('\0', 14 * each))}, 0
  for i = 1, 2 * each, 2 do
    local interval, highest = numbers[position], numbers[position + 1]
    local level = state[i] + state[i + 1] - now
    level = (level > 0 and level or 0) + interval
    if level > highest then return {1, 0} end
    local room = highest - level
    local remaining = (room - room % interval) / interval
    if remaining < least then least = remaining end
    state[i], state[i + 1] = now, level
    if level > longest then longest = level end
    reply[8 + position], reply[9 + position] = remaining, level
    position = position + 2
  end
  call('SET', KEYS[heads + s], write(ARGV[5], unpack(state, 1, 2 * each)), 'PX', 60000 + math.ceil(longest / 1000))
end
if ARGV[4] ~= '' then
  call('HINCRBY', KEYS[#KEYS], 'a|' .. (now - now % 900000000) / 1e6 .. ARGV[4], 1)
end
reply[4] = least
return reply
