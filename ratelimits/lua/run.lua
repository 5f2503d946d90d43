-- Names the run of the server. Loaded before batch.lua and pending.lua.

-- Returns "<run_id>:<replication id>": the server's process, and its history as a primary. The second part is empty if the
-- server never was a replica: attaching its first replica changes the replication id, but loses nothing. After a promotion
-- `master_replid2` names the history before it, of which something may be missing.
local function server_run()
  local function field(text, name) return string.match(text, '\n' .. name .. ':([^\r\n]*)') or '' end
  local replication = redis.call('INFO', 'replication')
  local history = ''
  if string.find(field(replication, 'master_replid2'), '[^0]') then history = field(replication, 'master_replid') end
  return field(redis.call('INFO', 'server'), 'run_id') .. ':' .. history
end
