-- Seals the open batch of one shard, if it has one. Loaded after full.lua, run.lua and batch.lua.
-- KEYS[1] the shard's `meta` key. The shard's other keys (see batch.lua) have the same prefix
-- ARGV[1] nonce: a unique name. A new incarnation gets this name   ARGV[2] now (µs) for tests; '': the server's TIME
-- ARGV[3] now (µs) by the caller's clock; '' or absent: unknown
-- ARGV[4] time to live (ms) of the key `clock`; absent: do not use this key
-- Returns {moment of the seal (µs, as a string), run, id of the sealed batch or '', number of batches in `sealed`, moment
-- (µs, as a string) since which the server's clock has jumped ahead, or '0', moment of the first seal (µs, as a string)
-- after the server last lost its data, or '0' if it is not known, 1 if the key `clock` was perhaps evicted; else 0}
-- The caller does not send the run. This script asks the server, so that run and moment are those of the seal.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if ARGV[2] ~= '' then now = tonumber(ARGV[2]) end
local run = server_run()
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
local id = batch_seal(prefix, ARGV[1], run, now) or ''
-- If the server has lost all its data, the next seal writes a new `first_sealed`, which is later than the lost value.
-- So the drain (usage/ledger/drain.py) notices the loss, even if nothing else shows it.
-- If `first_sealed` is later than now, the clock was wrong. Then store 0, which never means a loss.
-- The first seal writes `sealed_at` and `first_sealed` together, so one test is enough.
local sealed_at, first_sealed, sealed_clock, jumped, evicted_before, expired_before =
  unpack(redis.call('HMGET', KEYS[1], 'sealed_at', 'first_sealed', 'sealed_clock', 'jumped', 'evicted', 'expired'))
if not sealed_at then
  first_sealed = string.format('%.0f', now)
  redis.call('HSET', KEYS[1], 'first_sealed', first_sealed)
elseif tonumber(first_sealed or 0) > now then
  first_sealed = '0'
  redis.call('HSET', KEYS[1], 'first_sealed', first_sealed)
end
redis.call('HSET', KEYS[1], 'sealed_at', string.format('%.0f', now), 'sealed_clock', ARGV[3] or '')
-- Each seal renews the time to live of the key `clock`. If the key is gone although, by the caller's clock, less than half
-- of this time has passed since the last seal, it was evicted or deleted, or the server's clock has jumped ahead, perhaps
-- only for a moment. A jump is concluded only if the server's own counts allow it: since the last seal it has let keys
-- expire, and has evicted none. (If the user may not read INFO, no count is known, and a jump is possible.) Then the
-- caller declares a gap from the last seal until now, and sets the field `jumped` to 0. The data of lasting limits begins
-- anew in any case (see lasting.lua, which sets `jumped` to 1 if it has noticed first that the key is gone).
local was_evicted = 0
if ARGV[4] then
  local passed = tonumber(ARGV[3]) - (tonumber(sealed_clock or '') or 0)
  local is_gone = jumped == '1'
  if jumped == '0' and redis.call('EXISTS', prefix .. 'clock') == 0 then
    is_gone = true
    if redis.call('HEXISTS', KEYS[1], 'data_since') == 1 then
      redis.call('HSET', KEYS[1], 'data_since', string.format('%.0f', now))
    end
  end
  -- Read the counts after EXISTS: it lets a key expire whose time is over.
  local stats = redis.pcall('INFO', 'stats')
  if type(stats) ~= 'string' then stats = '' end
  local evicted = string.match(stats, '\nevicted_keys:(%d+)') or ''
  local expired = string.match(stats, '\nexpired_keys:(%d+)') or ''
  if is_gone then
    jumped = '0'
    if passed >= 0 and passed < ARGV[4] * 500 then
      if evicted ~= '' and evicted ~= evicted_before then
        was_evicted = 1
      elseif expired == '' or expired ~= expired_before then
        jumped = sealed_at
      end
    end
  end
  redis.call('HSET', KEYS[1], 'jumped', jumped or '0', 'evicted', evicted, 'expired', expired)
  redis.call('SET', prefix .. 'clock', '1', 'PX', ARGV[4])
end
return {string.format('%.0f', now), run, id, redis.call('LLEN', prefix .. '${sealed}'), jumped or '0',
  first_sealed or '0', was_evicted}
