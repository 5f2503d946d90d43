-- Names the run of the server. A run is the time from a start of the server until it restarts or a replica is
-- promoted. Loaded before batch.lua and pending.lua.

-- Returns the name of the run, "<run_id>:<replication id>". The server makes a new `run_id` whenever its process
-- starts. The replication id is in the name only if the server was a replica and was promoted: such a server perhaps
-- lacks the last writes of the old primary. `master_replid2` has 40 zeros, unless the server was promoted. For other
-- servers the replication id is left out: it can also change when the first replica connects, although no data is lost
-- then.
-- A server that hides `run_id` is named by its replication id, which changes at each start too. If the user may not read
-- INFO, or INFO has neither, nobody can know the run: its name is then "unreadable:".
local function server_run()
  local function section(name)
    local text = redis.pcall('INFO', name)
    return type(text) == 'string' and text or ''
  end
  local function field(text, name) return string.match(text, '\n' .. name .. ':([^\r\n]*)') or '' end
  local replication = section('replication')
  local replication_id = ''
  if string.find(field(replication, 'master_replid2'), '[^0]') then
    replication_id = field(replication, 'master_replid')
  end
  local run_id = field(section('server'), 'run_id')
  if run_id == '' then run_id = field(replication, 'master_replid') end
  if run_id == '' then return 'unreadable:' end
  return run_id .. ':' .. replication_id
end
