-- Which run of the server this is. Loaded before batch.lua and pending.lua.

-- Returns "<run_id>:<replication id>": the process, and which of its histories as a primary. The second part is empty for
-- a server that never was a replica: attaching its first replica gives it another replication id, and loses nothing.
-- After a promotion `master_replid2` names the history before, of which something may be missing.
local function server_run()
  local function field(text, name) return string.match(text, '\n' .. name .. ':([^\r\n]*)') or '' end
  local replication = redis.call('INFO', 'replication')
  local history = ''
  if string.find(field(replication, 'master_replid2'), '[^0]') then history = field(replication, 'master_replid') end
  return field(redis.call('INFO', 'server'), 'run_id') .. ':' .. history
end
