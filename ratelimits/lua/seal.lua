-- Seals the open batch of one shard, if it has one. Loaded after full.lua, run.lua and batch.lua.
-- KEYS[1] the shard's `meta` key. The shard's other keys (see batch.lua) have the same prefix
-- ARGV[1] nonce: a unique name. A new incarnation gets this name   ARGV[2] now (µs) for tests; '': the server's TIME
-- ARGV[3] now (µs) by the caller's clock; '' or absent: unknown
-- Returns {moment of the seal (µs, as a string), run, id of the sealed batch or '', number of batches in `sealed`}
-- The caller does not send the run. This script asks the server, so that run and moment are those of the seal.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if ARGV[2] ~= '' then now = tonumber(ARGV[2]) end
local run = server_run()
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
local id = batch_seal(prefix, ARGV[1], run, now) or ''
-- If the server has lost all its data, the next seal writes a new `first_sealed`, which is later than the lost value.
-- So the drain (usage/drain.py) notices the loss, even if nothing else shows it.
-- If `first_sealed` is later than now, the clock was wrong. Then store 0, which never means a loss.
-- The first seal writes `sealed_at` and `first_sealed` together, so one test is enough.
local sealed_at, first_sealed = unpack(redis.call('HMGET', KEYS[1], 'sealed_at', 'first_sealed'))
if not sealed_at then redis.call('HSET', KEYS[1], 'first_sealed', string.format('%.0f', now)) end
if tonumber(first_sealed or 0) > now then redis.call('HSET', KEYS[1], 'first_sealed', 0) end
redis.call('HSET', KEYS[1], 'sealed_at', string.format('%.0f', now), 'sealed_clock', ARGV[3] or '')
return {string.format('%.0f', now), run, id, redis.call('LLEN', prefix .. '${sealed}')}
