-- Names the run of the server: one life of the server, until it restarts or a replica is promoted. Loaded before batch.lua
-- and pending.lua.

-- Returns "<run_id>:<replication id>". run_id names the server's process. The replication id is added only if the server
-- was a replica and was promoted, which `master_replid2` shows: writes of the old primary may be missing then. It is left
-- out for other servers, because the id also changes when a first replica is attached, and then no data is lost.
local function server_run()
  local function field(text, name) return string.match(text, '\n' .. name .. ':([^\r\n]*)') or '' end
  local replication = redis.call('INFO', 'replication')
  local history = ''
  if string.find(field(replication, 'master_replid2'), '[^0]') then history = field(replication, 'master_replid') end
  return field(redis.call('INFO', 'server'), 'run_id') .. ':' .. history
end
