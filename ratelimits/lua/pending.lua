-- Returns the ids of the sealed batches of one shard that the drain has not deleted yet, and fields of the shard's
-- `meta`. Both are read at the same moment.
-- KEYS[1] the shard's `meta` key   ARGV[1] maximum number of ids of batches to return
-- Returns {run, moment before which the server started, now, incarnation, seq, sealed_at, number of these batches,
--          at most ARGV[1] of their ids (the oldest first), sealed_clock, first_sealed, 1 if a batch is open; else 0}
-- batch.lua explains the fields of `meta`. A field that does not exist is ''. Times are in µs.
-- All usage before `sealed_at` is in these batches or in the ledger.
local function field(text, name) return string.match(text, name .. ':([^\r\n]*)') or '' end
local server, time = redis.pcall('INFO', 'server'), redis.call('TIME')
if type(server) ~= 'string' then server = '' end -- the user may not read INFO: then the uptime is not known
local run = server_run()
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
-- The server calculates its uptime from two moments in whole seconds, so the uptime can be one second too long.
local uptime = math.max((tonumber(field(server, 'uptime_in_seconds')) or 0) - 1, 0)
local started_by = now - uptime * 1000000
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
local sealed = prefix .. '${sealed}'
local meta = redis.call('HMGET', KEYS[1], 'incarnation', 'seq', 'sealed_at', 'sealed_clock', 'first_sealed')
-- While the slot moves to another node of a cluster, EXISTS fails for a key that is on the other node. Then assume
-- that a batch is open there.
local open = redis.pcall('EXISTS', prefix .. '${open}')
if type(open) ~= 'number' then open = 1 end
return {run, string.format('%.0f', started_by), string.format('%.0f', now), meta[1] or '', meta[2] or '',
  meta[3] or '', redis.call('LLEN', sealed), redis.call('LRANGE', sealed, 0, ARGV[1] - 1), meta[4] or '', meta[5] or '',
  open}
