-- Seals the open batch of one shard, if it has one. Loaded after batch.lua.
-- KEYS[1] the shard's `meta` key. The shard's other keys (see batch.lua) have the same prefix
-- ARGV[1] nonce, unique: the name of a new incarnation if one begins   ARGV[2] now (µs) for tests; '': the server's TIME
-- ARGV[3] the caller's clock (µs); '' or absent: unknown
-- Returns {time (µs, as a string), run, id of the batch sealed now or '', number of batches in `sealed`}
-- The script itself asks for the run, so that time, run and seal are from one server at one moment.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if ARGV[2] ~= '' then now = tonumber(ARGV[2]) end
local run = server_run()
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
local id = batch_seal(prefix, now, run, ARGV[1]) or ''
-- first_sealed tells the drain (usage/drain.py) if the server has lost all data, even if nothing else shows it. If the
-- noted first seal is later than this one, the clock was wrong: note 0.
local first = redis.call('HMGET', KEYS[1], 'sealed_at', 'first_sealed')
if not first[1] then redis.call('HSET', KEYS[1], 'first_sealed', string.format('%.0f', now)) end
if tonumber(first[2] or 0) > now then redis.call('HSET', KEYS[1], 'first_sealed', 0) end
redis.call('HSET', KEYS[1], 'sealed_at', string.format('%.0f', now), 'sealed_clock', ARGV[3] or '')
return {string.format('%.0f', now), run, id, redis.call('LLEN', prefix .. '${sealed}')}
