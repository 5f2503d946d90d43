-- Counts requests in the open batch of a shard.

-- Counts `requests` requests with `cost` units each. If `requests` is 0, counts only `cost` units. Requests with 1
-- unit have one counter, with the ending "|1". Other requests have two counters: "|n" for the number of requests, and
-- "|u" for the number of units. `counter` is the name without the ending. Returns how many of these counters are new.
-- If any is new, the caller must call usage_new after it has counted everything.
local function usage_add(open, counter, cost, requests)
  if cost == 1 and requests > 0 then
    return redis.call('HINCRBY', open, counter .. '|1', requests) == requests and 1 or 0
  end
  local new = 0
  if requests > 0 and redis.call('HINCRBY', open, counter .. '|n', requests) == requests then new = 1 end
  local units = cost * math.max(requests, 1)
  if units > 0 and redis.call('HINCRBY', open, counter .. '|u', units) == units then new = new + 1 end
  return new
end
