-- Counts requests that decide.lua did not count in this shard. A process has refused these requests from its memory, or
-- another shard has refused them, or they were admitted and a shadow rule in another shard would have refused them.
-- Loaded after full.lua, run.lua, batch.lua, shard_run.lua, usage.lua and usage_new.lua.
-- KEYS[1]  head of the shard, "<version of the rules> <run of the server>"     KEYS[2]  the shard's open batch
-- ARGV[1]  run of the server when the caller connected   ARGV[2]  nonce
-- ARGV[3]  the kind of the counters: "d" for denied requests, "s" for admitted requests that a shadow rule would have
--          refused
-- ARGV[4…] three arguments for each counter: its name without "kind|bin|" and without the ending (see
--          usage.lua), the units of one request, the number of requests
-- Returns the version of the rules in force. A process that refuses all requests from its memory asks for no decisions.
-- By this version it notices an edit.
local time = redis.call('TIME')
local now = time[1] * 1e6 + time[2]
local version, run = shard_run(KEYS[1], KEYS[2], ARGV[1], ARGV[2], now)
-- A bin has 900000000 µs.
local name_start = ARGV[3] .. '|' .. (now - now % 900000000) / 1e6 .. '|'
local new = 0
for i = 4, #ARGV, 3 do
  new = new + usage_add(KEYS[2], name_start .. ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]))
end
if new > 0 then usage_new(KEYS[2], ARGV[2], run, now, new) end
return tonumber(version)
