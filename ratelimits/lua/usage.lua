-- Counting in the open batch of a shard, in the call that decides. Behind batch.lua.

-- To be called for so many counters that are new: the first of a batch bring the batch's identity. True when it is full.
local function usage_new(open, nonce, run, now, count)
  local fields = redis.call('HLEN', open)
  if fields == count then batch_open(string.sub(open, 1, -1 - #'${open}'), nonce, run, now) end
  return fields >= 5000
end

-- So many requests of so many units each, or, with 0 requests, units alone. Requests of 1 unit are one counter ("1"), all
-- others two ("n" requests, "u" units). True when the batch is full: whoever counts seals it, once all is counted.
local function usage_add(open, field, cost, requests, nonce, run, now)
  local full = false
  local function add(name, count)
    if count > 0 and redis.call('HINCRBY', open, name, count) == count then
      full = usage_new(open, nonce, run, now, 1) or full
    end
  end
  if cost == 1 and requests > 0 then
    add(field .. '|1', requests)
  else
    add(field .. '|n', requests)
    add(field .. '|u', cost * math.max(requests, 1))
  end
  return full
end
