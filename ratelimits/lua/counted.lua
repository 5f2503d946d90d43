-- Finishes the counting of a request that fast.lua has decided. fast.lua itself counts a cost of 1. This file counts
-- every other cost. If the request's counters are the first ones in the batch, this file also writes the fields of the
-- batch's identity (see batch.lua). Loaded after fast.lua, batch.lua and usage.lua. engine/scripts.py replaces
-- ${open} with the end of the Redis key of an open batch.
if fast_reply then
  local open, now = fast_counters.open, fast_counters.now
  local run, new_counters, full = string.match(ARGV[2], ' (.*)$'), 0, false
  for _, counter in ipairs(fast_counters) do
    -- fast.lua has already counted a cost of 1. It lists such a counter only if the counter is new.
    if counter.cost == 1 then new_counters = new_counters + 1 end
  end
  if new_counters > 0 then full = usage_new(open, ARGV[1], run, now, new_counters) end
  for _, counter in ipairs(fast_counters) do
    if counter.cost ~= 1 then full = usage_add(open, counter.name, counter.cost, 1, ARGV[1], run, now) or full end
  end
  -- Ignore an error: the request was decided and counted, and the periodic task will seal the batch.
  if full then pcall(batch_seal, string.sub(open, 1, -1 - #'${open}'), now, run, ARGV[1]) end
  return fast_reply
end
