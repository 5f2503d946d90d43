-- Finishes counting a request that fast.lua has decided. It counts each cost other than 1. If the batch had no counters
-- before this request, it writes the batch's identity. Loaded after fast.lua, batch.lua and usage.lua.
if fast_reply then
  local run, new_counters, full = string.match(ARGV[2], ' (.*)$'), 0, false
  for _, counter in ipairs(fast_new) do
    if counter[2] == 1 then new_counters = new_counters + 1 end
  end
  if new_counters > 0 then full = usage_new(fast_new.open, ARGV[1], run, fast_new.now, new_counters) end
  for _, counter in ipairs(fast_new) do
    if counter[2] ~= 1 then
      full = usage_add(fast_new.open, counter[1], counter[2], 1, ARGV[1], run, fast_new.now) or full
    end
  end
  -- Ignore an error: the request was decided and counted, and the periodic task will seal the batch.
  if full then pcall(batch_seal, string.sub(fast_new.open, 1, -1 - #'${open}'), fast_new.now, run, ARGV[1]) end
  return fast_reply
end
