-- Counting in the open batch of a shard, in the call that decides. Behind batch.lua.
-- open: key of the batch; field: a usage counter's name without its last part; so many requests of so many units each,
-- or, with 0 requests, units alone. Requests of 1 unit are one counter ("1"), all others two ("n" requests, "u" units).
-- True when the batch is full: whoever counts seals it, once the request is counted whole.
local function usage_add(open, field, cost, requests, prefix, nonce, head, now)
  local before, sealed = 0, false
  local function add(name, count)
    if redis.call('HINCRBY', open, name, count) == count then
      before = redis.call('HLEN', open)
      if before == 1 then batch_open(prefix, nonce, string.match(head, ' (.*)$'), now) end
      sealed = sealed or before >= 5000
    end
  end
  if cost == 1 and requests > 0 then
    add(field .. '|1', requests)
  else
    if requests > 0 then add(field .. '|n', requests) end
    if cost > 0 then add(field .. '|u', cost * math.max(requests, 1)) end
  end
  return sealed
end
