-- Seals the open batch of one shard, if it has one. Loaded after batch.lua.
-- KEYS[1] the shard's `meta` key; the others (open, b:…, sealed; see batch.lua) share its prefix.
-- ARGV[1] nonce, unique: names a new incarnation if one begins   ARGV[2] now (µs) for tests; '': the server's TIME
-- ARGV[3] the caller's clock (µs) when it called; '' or absent: unknown
-- Returns {time µs, run, id of the batch sealed now or '', number of batches that wait in `sealed`}; the time as a string.
-- INFO is called inside the script, so that time, run and seal are those of one server at one moment.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if ARGV[2] ~= '' then now = tonumber(ARGV[2]) end
local run = server_run()
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
local id = batch_seal(prefix, now, run, ARGV[1]) or ''
-- Tells the drain of a wipe that left no other trace. A first seal that is later than this one was at a wrong time.
local first = redis.call('HMGET', KEYS[1], 'sealed_at', 'first_sealed')
if not first[1] then redis.call('HSET', KEYS[1], 'first_sealed', string.format('%.0f', now)) end
if tonumber(first[2] or 0) > now then redis.call('HSET', KEYS[1], 'first_sealed', 0) end
redis.call('HSET', KEYS[1], 'sealed_at', string.format('%.0f', now), 'sealed_clock', ARGV[3] or '')
return {string.format('%.0f', now), run, id, redis.call('LLEN', prefix .. '${sealed}')}
