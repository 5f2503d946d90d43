-- Compares the run in the head of a shard with the run of the server. Loaded after run.lua and batch.lua.

-- Returns the version of the rules in the head, and the run of the server. If the run has changed, seals the open batch
-- and stores the new run. A head is "<version of the rules> <run>". A missing head is read as "0 ?". No run has the
-- name "?", so a missing head counts as a changed run. `run` is the run in which the caller connected.
local function shard_run(head, open, run, nonce, now)
  local version, stored_run = string.match(redis.call('GET', head) or '0 ?', '^(%d+) (.*)$')
  -- If the runs differ, ask the server: its run can have changed since the caller connected.
  if stored_run ~= run then run = server_run() end
  if stored_run ~= run then
    local prefix = string.sub(open, 1, -1 - #'${open}')
    batch_seal(prefix, nonce, run, now)
    redis.call('SET', head, version .. ' ' .. run)
  end
  return version, run
end
