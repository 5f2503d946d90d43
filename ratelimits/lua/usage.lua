-- Counting in the open batch of a shard, in the call that decides. Behind batch.lua.
-- open: KEYS of the batch; field: a usage counter's name without its last part; cost: units; requests: 1, or 0 to count
-- units alone. A cost of 1 is one counter ("1"), any other two ("n" requests, "u" units).
local function usage_add(open, field, cost, requests, prefix, nonce, head, now)
  local before, sealed = 0, false
  local function add(name, count)
    if redis.call('HINCRBY', open, name, count) == count then
      before = redis.call('HLEN', open)
      if before == 1 then batch_open(prefix, nonce, string.match(head, ' (.*)$'), now) end
      sealed = sealed or before >= 5000
    end
  end
  if cost == 1 and requests == 1 then
    add(field .. '|1', 1)
  else
    if requests > 0 then add(field .. '|n', requests) end
    if cost > 0 then add(field .. '|u', cost) end
  end
  -- True when the batch is full; whoever counts seals it once the request is counted whole.
  return sealed
end
