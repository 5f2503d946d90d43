-- Finds out whether Redis has lost the state of a lasting limit. Such a state is restored from the ledger.

local data_since = {} -- by the prefix of a shard: the moment (µs) at which the shard's data of this run begins

-- Returns whether the state of a lasting limit must be restored. It must be restored in two cases:
--   1. There is no state, and `needs_state` is true: the rule wants a restore even if Redis has lost nothing.
--   2. Perhaps Redis has lost what the limit has counted in its window. This is so if two things are true. First, the
--      shard's data of this run begins after the start of the window. Second, the limit has no state, or was last
--      charged before the data begins.
-- A shard's data also begins anew when the server's clock has jumped ahead: then Redis has perhaps deleted states whose
-- time to live was not over. This is so if the key `clock` is gone (see seal.lua) since the last seal. The field
-- `jumped` of `meta` is 0 after a seal, and then becomes 1, so that the data begins anew only once.
-- The moment at which the data begins is stored as `data_since` in `meta`. It is the moment of the first decision of a
-- lasting limit in a run, or after all Redis keys were deleted. `last` is the moment of the limit's last charge (nil:
-- there is no state), `start` is the start of the limit's window. `state_key` is the Redis key of the state, which says
-- in which shard the limit is: limits of one call can be in several shards.
local function is_lost(needs_state, last, start, now, state_key)
  local prefix = string.match(state_key, '^.-}:')
  local since = data_since[prefix]
  if not since then
    -- `run` (see heads.lua) is nil if all heads are as expected. Then the run in ARGV[2] is right.
    local meta = prefix .. '${meta}'
    local current_run = run or string.match(ARGV[2], ' (.*)$')
    local stored = redis.call('HMGET', meta, 'data_run', 'data_since', 'jumped')
    local has_jumped = stored[3] == '0' and redis.call('EXISTS', prefix .. 'clock') == 0
    if has_jumped then redis.call('HSET', meta, 'jumped', '1') end
    -- If `data_since` is later than now, the clock has stepped back. Every state would seem to be older than the data,
    -- so let the data begin now.
    if has_jumped or stored[1] ~= current_run or tonumber(stored[2]) > now then
      stored[2] = string.format('%.0f', now)
      redis.call('HSET', meta, 'data_run', current_run, 'data_since', stored[2])
    end
    since = tonumber(stored[2])
    data_since[prefix] = since
  end
  if not last then return needs_state or since > start end
  return since > start and last < since
end
