-- Call this function after `count` new counters were written. If they are the first counters of the batch, it writes
-- the identity of the batch. If the batch is full, it seals the batch. The server does nothing else while it seals, so a
-- batch is full at a size that is sealed in about a millisecond. Loaded after batch.lua.
local function usage_new(open, nonce, run, now, count)
  local fields, prefix = redis.call('HLEN', open), string.sub(open, 1, -1 - #'${open}')
  if fields == count then batch_open(prefix, nonce, run, now) end
  -- Ignore an error of sealing: the requests were decided and counted, and the periodic task will seal the batch.
  if fields >= 1000 then pcall(batch_seal, prefix, nonce, run, now) end
end
