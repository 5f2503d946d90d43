-- Lists the sealed batches of one shard that wait to be written to the ledger, and the state of the shard at one moment.
-- KEYS[1] the shard's `meta` key   ARGV[1] maximum number of ids
-- Returns {run, latest possible start of the server µs, time µs, incarnation or '', seq or '', sealed_at µs or '',
--          number of waiting batches, their ids (oldest first), clock of the process that sealed last (µs) or '',
--          time of the first seal (µs) or '', 0 if no batch is open, otherwise 1}
-- Usage that was counted before sealed_at is in these batches or already in the ledger.
local function field(text, name) return string.match(text, name .. ':([^\r\n]*)') or '' end
local server, time = redis.call('INFO', 'server'), redis.call('TIME')
local run = server_run()
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
-- The uptime is the difference of two whole seconds, so it may be one second too long.
local up = math.max((tonumber(field(server, 'uptime_in_seconds')) or 0) - 1, 0)
local since = now - up * 1000000
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
local sealed = prefix .. '${sealed}'
local known = redis.call('HMGET', KEYS[1], 'incarnation', 'seq', 'sealed_at', 'sealed_clock', 'first_sealed')
-- While the slot moves to another node, EXISTS fails for a key that is not on this node. Then assume an open batch there.
local open = redis.pcall('EXISTS', prefix .. '${open}')
if type(open) ~= 'number' then open = 1 end
return {run, string.format('%.0f', since), string.format('%.0f', now), known[1] or '', known[2] or '',
  known[3] or '', redis.call('LLEN', sealed), redis.call('LRANGE', sealed, 0, ARGV[1] - 1), known[4] or '', known[5] or '',
  open}
