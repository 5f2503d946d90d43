-- Functions that open and seal the batches of usage of one shard. Loaded before the scripts that call these functions.
--
-- Usage is counted in the shard's open batch. To seal a batch is to rename it, so that nothing is counted in it any
-- more. Each batch has a number, `seq`. In each run of the server (see run.lua) the numbers begin again at 1.
-- A series of numbers that begins at 1 is an *incarnation*.
-- `cum` is the sum of all requests and units that were counted in the incarnation, modulo 10^15 (so that it stays
-- exact in a double). A counter whose name ends with "|1" counts requests of one unit each. Each of them adds 2 to
-- `cum`: one for the request and one for the unit. `requests` is the sum of the requests alone, modulo 10^15 too.
--
-- The Redis keys of a shard begin with `prefix` (rl:1:<namespace>:{07}:). So they are in one slot. The following Redis
-- keys have no time to live, if nothing else is said. engine/keys.py names them. engine/assemble/scripts.py replaces "${open}" and the other
-- placeholders in the Lua files.
--   open    hash: the open batch. The fields of its identity are written together with the first counter:
--             #i incarnation   #s seq   #o time of opening (µs)   #r run of the server   #p `cum` before this batch
--             #q `requests` before this batch
--             #f "<incarnation>:<seq>" of the last batch before this incarnation; "" if there was no batch
--           Every other field is a counter (a whole number >= 0).
--   meta    hash with these fields:
--             incarnation, seq   the incarnation and the number of the newest batch that was opened
--             cum, requests      `cum` and `requests` after the newest sealed batch of this incarnation
--             run                the run of the server in which this incarnation began
--             sealed_at          moment (µs): all usage from before this moment is in sealed batches
--             first_sealed       moment (µs) of the first seal
--             sealed_clock       moment (µs) of the last seal, by the clock of the process that sealed
--             jumped             moment (µs) of the last seal before the server's clock jumped ahead, until a gap is
--                                declared; else 0, or 1 after such a jump until the next seal (see seal.lua)
--             evicted, expired   how many keys the server had evicted and let expire in its run, at the last seal; '' if
--                                this is not known (see seal.lua)
--             data_run, data_since   a run of the server, and a moment (µs): as far as is known, Redis still has
--                                everything that was counted in this run since this moment (see lasting.lua)
--   clock   string: it exists while the server's clock runs as it should (see seal.lua). It has a time to live
--   b:<incarnation>:<seq>   hash: a sealed batch. It has all fields of `open`, and
--             #c `cum` after this batch   #t time of sealing (µs)   #x run of the server when it sealed the batch
--   sealed  list of "<incarnation>:<seq>" of sealed batches, the oldest first
--
-- Arguments of the functions: `prefix`, `run` (see run.lua) and `nonce` are strings. `nonce` is a unique name, which a
-- new incarnation gets. `now` is a number (µs).
-- A script calls batch_open after it has written the first counter of an empty `open`. It calls batch_seal when `open`
-- has 1,000 fields, or when the server's run has changed. A periodic task also seals the open batch (seal.lua).

-- Writes the identity of a new open batch. Begins a new incarnation if the run has changed or `meta` is lost.
local function batch_open(prefix, nonce, run, now)
  local stored = redis.call('HMGET', prefix .. '${meta}', 'incarnation', 'seq', 'cum', 'run', 'requests')
  local incarnation, seq, cum, requests, last_before = stored[1], stored[2], stored[3], stored[5], ''
  if not (incarnation and seq and cum and requests and stored[4] == run) then
    if incarnation and seq then last_before = incarnation .. ':' .. seq end
    incarnation, seq, cum, requests = nonce, '0', '0', '0'
  end
  seq = string.format('%.0f', tonumber(seq) + 1)
  redis.call('HSET', prefix .. '${meta}', 'incarnation', incarnation, 'seq', seq, 'cum', cum, 'run', run,
    'requests', requests)
  redis.call('HSET', prefix .. '${open}', '#i', incarnation, '#s', seq, '#o', string.format('%.0f', now),
    '#r', run, '#p', cum, '#q', requests, '#f', last_before)
end

-- Seals the open batch, which keeps its identity. Returns the id of the batch, "<incarnation>:<seq>"; false if there is
-- no open batch.
local function batch_seal(prefix, nonce, run, now)
  local open, meta = prefix .. '${open}', prefix .. '${meta}'
  local identity = redis.call('HMGET', open, '#i', '#s', '#p', '#q')
  if not identity[1] then
    if redis.call('EXISTS', open) == 0 then return false end
    -- `open` has counters, but no identity. Write one, so that no counter is lost.
    batch_open(prefix, nonce, run, now)
    identity = redis.call('HMGET', open, '#i', '#s', '#p', '#q')
  end
  local cum, requests = tonumber(identity[3]), tonumber(identity[4]) or 0
  local fields, byte = redis.call('HGETALL', open), string.byte
  for i = 1, #fields, 2 do
    local name, count = fields[i], fields[i + 1]
    if byte(name) ~= 35 then -- the name does not begin with '#'
      if #count > 15 then count = string.sub(count, -15) end -- modulo 10^15
      count = tonumber(count)
      local ending = byte(name, -1)
      if ending ~= 117 then requests = (requests + count) % 1e15 end -- the name does not end with 'u'
      if ending == 49 then count = 2 * count end -- the name ends with '1'
      cum = (cum + count) % 1e15
    end
  end
  cum = string.format('%.0f', cum)
  redis.call('HSET', open, '#c', cum, '#t', string.format('%.0f', now), '#x', run)
  local id = identity[1] .. ':' .. identity[2]
  -- Never overwrite a batch. If this name exists already, the server's data was restored from an older copy. Then the
  -- nonce makes the id unique.
  if redis.call('RENAMENX', open, prefix .. '${batch}' .. id) == 0 then
    id = id .. '~' .. nonce
    redis.call('RENAME', open, prefix .. '${batch}' .. id)
  end
  redis.call('RPUSH', prefix .. '${sealed}', id)
  -- If `meta` was lost or replaced since the batch was opened, its fields are not about this batch: leave `cum` alone.
  local newest = redis.call('HMGET', meta, 'incarnation', 'seq')
  if newest[1] == identity[1] and newest[2] == identity[2] then
    redis.call('HSET', meta, 'cum', cum, 'requests', string.format('%.0f', requests))
  end
  return id
end
