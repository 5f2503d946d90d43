-- Functions that count usage in the open batch of a shard. Loaded after batch.lua.

-- Call this after `count` new counters were written. If they are the first counters of the batch, writes the identity
-- of the batch. Returns whether the batch is full.
local function usage_new(open, nonce, run, now, count)
  local fields = redis.call('HLEN', open)
  if fields == count then batch_open(string.sub(open, 1, -1 - #'${open}'), nonce, run, now) end
  return fields >= 5000
end

-- Counts `requests` requests with `cost` units each. If `requests` is 0, counts only `cost` units. Requests with 1
-- unit have one counter, with the ending "|1". Other requests have two counters: "|n" for the number of requests, and
-- "|u" for the number of units. `counter` is the name without the ending. Returns whether the batch is full. If so,
-- seal it after everything is counted.
local function usage_add(open, counter, cost, requests, nonce, run, now)
  local full = false
  local function add(name, amount)
    if amount > 0 and redis.call('HINCRBY', open, name, amount) == amount then
      full = usage_new(open, nonce, run, now, 1) or full
    end
  end
  if cost == 1 and requests > 0 then
    add(counter .. '|1', requests)
  else
    add(counter .. '|n', requests)
    add(counter .. '|u', cost * math.max(requests, 1))
  end
  return full
end
