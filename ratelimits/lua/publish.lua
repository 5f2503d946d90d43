-- Raises a shard's configuration version. KEYS[1] head, "<version> <run>". ARGV[1] version. Returns the version in force.
-- A shard without decisions gets a head too, with an unknown run: otherwise a process that missed the edit would not be
-- told there that its rules are stale.
local head = redis.call('GET', KEYS[1])
local stored, run = string.match(head or '', '^(%d+) (.*)$')
if stored and tonumber(stored) >= tonumber(ARGV[1]) then return tonumber(stored) end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. (run or '?'))
return tonumber(ARGV[1])
