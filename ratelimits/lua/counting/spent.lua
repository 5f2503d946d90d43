-- Counts requests that spent prefetched permits, and records a new prefetch. Loaded after full.lua, run.lua, batch.lua,
-- shard_run.lua, usage.lua and usage_new.lua.
--
-- A process spends the permits of a prefetch only after the prefetch is recorded here. The record says how many
-- requests can spend the permits, and how many of these requests are already counted. So nothing is counted twice if a
-- command is sent again or arrives late. If a process is killed, its records remain. Then some requests are perhaps not
-- counted, and the drain records a gap for them.
--
-- KEYS[1]  head of the shard     KEYS[2]  the shard's open batch
-- KEYS[3]  hash of the shard's prefetches: name -> record. engine/counting.py describes the record
-- ARGV[1]  the server's run (see run.lua) at the moment when the caller connected   ARGV[2]  nonce
-- ARGV[3]  name of the new prefetch; "" if there is none   ARGV[4]  the record of the new prefetch
-- ARGV[5…] three arguments for each earlier prefetch: its name, the number of requests that have spent its permits,
--          "1" if no more requests will spend its permits; otherwise "0"
-- Returns a number for each earlier prefetch: 1 if it has a record. 0 if it has no record: then this call has counted
-- none of its requests.
local time = redis.call('TIME')
local now = time[1] * 1e6 + time[2]
local _, run = shard_run(KEYS[1], KEYS[2], ARGV[1], ARGV[2], now)
local found, new = {}, 0 -- `new` is the number of counters that the open batch did not have
for i = 5, #ARGV, 3 do
  local name, spent = ARGV[i], tonumber(ARGV[i + 1])
  -- `constant` has the two numbers that never change: " <requests> <until>".
  local counted, constant, counters = string.match(redis.call('HGET', KEYS[3], name) or '', '^(%d+)( %d+ %d+)(.*)$')
  found[#found + 1] = counted and 1 or 0
  if counted then
    local requests = spent - counted
    if requests > 0 then
      for counter, cost in string.gmatch(counters, ' (%S+) (%d+)') do
        new = new + usage_add(KEYS[2], counter, tonumber(cost), requests)
      end
    end
    if ARGV[i + 2] == '1' then
      redis.call('HDEL', KEYS[3], name)
    elseif requests > 0 then
      redis.call('HSET', KEYS[3], name, ARGV[i + 1] .. constant .. counters)
    end
  end
end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[3], ARGV[3], ARGV[4]) end
if new > 0 then usage_new(KEYS[2], ARGV[2], run, now, new) end
return found
