-- Raises a shard's version of the rules. If the shard already has this version or a newer one, changes nothing.
-- Returns the version in force. Loaded after full.lua.
-- KEYS[1] the shard's head, "<version> <run of the server>"   ARGV[1] version
-- If a shard has no head, writes a head with an unknown run ("?"). So decide.lua compares the versions at the next
-- request, and answers "stale" if the caller has older rules.
local head = redis.call('GET', KEYS[1])
local stored, run = string.match(head or '', '^(%d+) (.*)$')
if stored and tonumber(stored) >= tonumber(ARGV[1]) then return tonumber(stored) end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. (run or '?'))
return tonumber(ARGV[1])
