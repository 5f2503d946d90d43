-- Opens and seals the batch of usage of one shard. Defines functions only; loaded before the scripts that call them.
--
-- Keys, all made from `prefix` (rl:1:<namespace>:{07}:), all in one slot, none with a time to live. engine/keys.py names
-- them: "${open}" and the like are replaced when the script is loaded.
--   open    hash: the open batch. Identity, written before the first counter:
--             #i incarnation   #s seq   #o opened at (µs)   #r run it was opened under
--             #p cum before it   #f "<incarnation>:<seq>" of the last batch before a new incarnation ("" = none)
--           every other field is a counter (a whole number >= 0).
--   meta    hash: incarnation, seq (of the newest batch ever opened), cum (of all sealed so far), run,
--             sealed_at (µs; what was counted before it is in sealed batches), first_sealed (µs; the first seal),
--             sealed_clock (µs; clock of the process that sealed last)
--   b:<incarnation>:<seq>   hash: a sealed batch, with all fields that `open` had, and
--             #c cum after it   #t sealed at (µs)   #x run it was sealed under
--   sealed  list of "<incarnation>:<seq>", oldest first
-- cum is the sum of all requests and units that the incarnation has counted, modulo 10^15, so that it stays exact in a
-- double. A counter "…|1" adds to both.
--
-- Arguments: prefix, run (see run.lua) and nonce (unique; it becomes the name of a new incarnation) are strings; now is a
-- number, in µs. A deciding script calls batch_open after it has written the first counter of an empty `open`. It calls
-- batch_seal when `open` has 5,000 fields, or when the server's run has changed.

-- Writes the identity of a new `open`. Begins a new incarnation if the run has changed or `meta` is lost.
local function batch_open(prefix, nonce, run, now)
  local was = redis.call('HMGET', prefix .. '${meta}', 'incarnation', 'seq', 'cum', 'run')
  local incarnation, seq, cum, follows = was[1], was[2], was[3], ''
  if not (incarnation and seq and cum and was[4] == run) then
    if incarnation and seq then follows = incarnation .. ':' .. seq end
    incarnation, seq, cum = nonce, '0', '0'
  end
  seq = string.format('%.0f', tonumber(seq) + 1)
  redis.call('HSET', prefix .. '${meta}', 'incarnation', incarnation, 'seq', seq, 'cum', cum, 'run', run)
  redis.call('HSET', prefix .. '${open}', '#i', incarnation, '#s', seq, '#o', string.format('%.0f', now),
    '#r', run, '#p', cum, '#f', follows)
end

-- Seals `open` under the identity that it was opened with. Returns "<incarnation>:<seq>", or false if there is no `open`.
local function batch_seal(prefix, now, run, nonce)
  local open, meta = prefix .. '${open}', prefix .. '${meta}'
  local identity = redis.call('HMGET', open, '#i', '#s', '#p')
  if not identity[1] then
    if redis.call('EXISTS', open) == 0 then return false end
    batch_open(prefix, nonce, run, now)
    identity = redis.call('HMGET', open, '#i', '#s', '#p')
  end
  local cum = tonumber(identity[3])
  local fields = redis.call('HGETALL', open)
  for i = 1, #fields, 2 do
    if string.byte(fields[i]) ~= 35 then
      local count = tonumber(string.sub(fields[i + 1], -15))
      if string.byte(fields[i], -1) == 49 then count = 2 * count end
      cum = (cum + count) % 1e15
    end
  end
  cum = string.format('%.0f', cum)
  redis.call('HSET', open, '#c', cum, '#t', string.format('%.0f', now), '#x', run)
  local id = identity[1] .. ':' .. identity[2]
  -- Never overwrite: if a batch of this name is still there, the server's data was restored to an older state.
  if redis.call('RENAMENX', open, prefix .. '${batch}' .. id) == 0 then
    id = id .. '~' .. nonce
    redis.call('RENAME', open, prefix .. '${batch}' .. id)
  end
  redis.call('RPUSH', prefix .. '${sealed}', id)
  local known = redis.call('HMGET', meta, 'incarnation', 'seq')
  if known[1] == identity[1] and known[2] == identity[2] then redis.call('HSET', meta, 'cum', cum) end
  return id
end
