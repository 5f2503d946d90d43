-- Counts usage in the open batch of a shard, in the call that decides. Loaded after batch.lua.

-- Call this after `count` new counters were written. If they are the batch's first counters, it writes the batch's
-- identity.
-- Returns true if the batch is full.
local function usage_new(open, nonce, run, now, count)
  local fields = redis.call('HLEN', open)
  if fields == count then batch_open(string.sub(open, 1, -1 - #'${open}'), nonce, run, now) end
  return fields >= 5000
end

-- Counts a number of requests (`requests`) of `cost` units each. If `requests` is 0, counts only `cost` units. Requests of
-- 1 unit have one counter ("|1"). Other requests have two: "|n" for the requests and "|u" for the units. Returns true if
-- the batch is full: seal it after everything is counted.
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
