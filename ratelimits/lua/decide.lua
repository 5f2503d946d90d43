-- Decides all limits of one request in one atomic step. If an enforced limit refuses the request, no limit is charged.
-- Otherwise each limit that admits the request is charged. Counts the decision in the open batch of usage.
--
-- This file is a template. engine/assemble makes a script from it, for one shape of calls. It also makes the scripts of
-- other operations from this file, such as a refund or a reset (see Op in engine/call.py). A line that begins with
-- "--:" is a directive:
--   --: if NAME … --: else … --: end    keeps the lines if NAME holds for the shape (see `flags` in
--                                       engine/assemble/shape.py). "if not NAME" keeps them if NAME does not hold. The
--                                       name of an operation, such as `try`, holds for calls with this operation
--   --: for limit … --: end             repeats the lines for each limit. A field `l.x` becomes a local variable.
--                                       A function takes the limit as a table, `l.self`: before such a call the script
--                                       copies the variables into the table, and after it reads them back
--   --: do SECTION                      inserts lines. If the file of the limit's algorithm has a function with the
--                                       name SECTION, the lines are its body. Otherwise engine/assemble makes the
--                                       lines: see `section` in engine/assemble/script_text.py
-- `${name}` stands for a text that engine/assemble makes. `rarely()` returns the functions that are marked "--@rarely".
-- Most calls do not need these functions, so `rarely()` defines them only when it is called.
-- Sections of an algorithm: `initial` makes the fields of a limit without a state. `resolve` brings a state to the
-- moment of the decision (`at`). `stored_params` replaces the params by the params that the state contains. `check`
-- decides. `charge`, `refund`, `release`, `restore` and `reset` change the state. `standing` sets `remaining` and
-- `reset`. `store` sets `life` and the fields of the record. `keep` sets the expiry of own keys.
-- The general script (engine/assemble/general.py) has a loop instead of repeated lines. There `l` is the limit's table.
--
-- A shard's `head` is a string with two values from the last use of the shard: the version of the rules, and the run of
-- the server.
-- The state of a limit is stored as a record in a packed state, or in the own keys of the limit. A packed state is a
-- string that several limits of a key share. An own key is a Redis key that belongs to one limit alone.
-- A lasting limit is a limit whose count is restored from the ledger if Redis has lost its state.
--
-- Fields of a limit `l` that this file and the algorithms' files share. Times are in µs, except `expiry`:
--   last         moment of the last charge; nil if there is no state
--   shift        how far the times of the state move back: more than 0 only if the clock has stepped back by more than
--                CLOCK_BACK
--   starts_anew  true if the stored state is of no use any more: then the limit starts like a new one
--   stale        true if `at` is in none of the calendar periods that the params name
--   ok, wait, retry   whether the limit admits the request; how long the request waits; retry_after of a refusal
--   undone       true if a refund or release has changed the state
--   written      true if the state must be written. Then `last` becomes the moment of the decision
--   must_keep    true if the state must be written, but `last` stays as it is
--   has_record   true if the packed state has a record with the limit's name
--   removed      true if this record must be removed
--   life         how long the state is needed after the decision
--   expiry       the moment until which Redis keeps the state, in seconds
--   keys_absent  true if it is known that none of the limit's own keys exists
--   slots_move   true if the server is a cluster, whose slots may move to other nodes
--   lost         true if the state of a lasting limit must be restored from the ledger
--
-- KEYS     1. the heads of all shards of this request, the account's shard first
--          2. the packed states
--          3. the open batch of the account's shard, if there are meters
--          4. the sorted set of used receipts, if the call settles or refunds one
--          5. the first own key of each limit that has own keys
--          6. the further own keys
-- ARGV[1]  nonce: unique for each call
-- ARGV[2]  the head that the caller expects, "<version of the rules> <run>"
-- ARGV[3]  request, '<d…': now (µs; -1: use the server's clock); timeout (µs; -1: accept any wait); start and end of
--          the span for which ARGV is valid (µs); the moment at which the receipt was charged (µs; 0: no receipt);
--          the receipt's time to live (ms); `marks`; the costs.
--          `marks` is the sum of two numbers: 1 if the call must be answered as stale when a head has newer rules, and
--          2 if the caller has not yet decided these limits in this run. If 2 is in the sum, the script also checks
--          whether lasting limits that have a state have lost counts: after a restart, the state can be an old one.
--          The costs of the meters come first, then the costs of limits that are not the cost of a meter. If a receipt
--          is settled, each cost is the true cost minus the charged cost, so it can be negative. (To refund a receipt
--          is to settle it at 0)
-- ARGV[4]  program: for each limit the header that its record usually has (see records.lua), its longest wait (µs) if
--          it has one, and its params. Then 30 bytes for each limit: the moment from which the params hold (a double,
--          µs; 0: now), and the text "rule|version", filled up with zero bytes
-- ARGV[5…] for each meter the name of the counter of an admitted request,
--          "a|bin|meter|rule|version|account|key". Then the name that all leases of the request get, if it is
--          not the nonce. Then the nonce of the receipt that is used, if there is one. For the general script, the layout
--          of the call comes before these arguments
--
-- Returns  int64s '<i8…'. All times are in µs. The first number says which reply it is:
--          1   decided. Then: allowed, binding limit (0: none), remaining, retry_after (-1: never), reset_after, wait,
--              the moment of the decision, now. Then for each limit: ok, remaining, reset_after
--          0   nothing was decided: the caller's rules are too old. Then: the newest version
--          -2  nothing was decided: ARGV is not valid now. Then: now
--          -3  nothing was decided: Redis may have lost the state of a lasting limit. Restore it first. Then: now
--          2   nothing was done: the receipt was used before, or its time to live has passed. Then: 0
local call, read_struct, write_struct = redis.call, struct.unpack, struct.pack
local NEVER, ANY, CLOCK_BACK, FOREVER = -1, -1, 60000000, 34560000000000 -- a minute and 400 days, in µs
--: do preamble
-- ${costs} begins with a comma.
local now, timeout, valid_from, valid_until, charged_at, ttl, marks${costs} = read_struct('${request}', ARGV[3])
local by_server = now < 0 -- whether the server's clock gives the moment
if by_server then
  local time = call('TIME')
  now = time[1] * 1e6 + time[2]
end
if now < valid_from or now >= valid_until then return write_struct('<i8i8', -2, now) end
--: if full
-- The server's memory is perhaps full. After this write, which needs no memory, it refuses no other: see full.lua.
call('PERSIST', KEYS[1])
--: end
--: do limits
--: if stored
local got = call('MGET', ${mget}) -- the heads of the shards, then the packed states
--: end

-- 1. Compare the heads of all shards with the expected head. Read all of them before anything is written: if a shard
-- has newer rules, nothing may change.
--: if heads
if ${heads_differ} then
  local newer = rarely().update_heads(got, now, marks % 2 == 1)
  if newer then return write_struct('<i8i8', 0, newer) end
end
--: end

-- 2. Read the states. `at` is the moment of the decision, the same for all limits. Usually it is `now`. If the clock
-- has stepped back by at most CLOCK_BACK, `at` is the latest moment in the states.
at = now -- the preamble declares the variable `at`
--: do states
--: for limit
if l.last and l.last > at and l.last <= now + CLOCK_BACK then at = l.last end
--: end
--: for limit
--: do start
l.shift = 0
if l.last then
  -- If `last` is later than `at`, the clock has stepped back by more than CLOCK_BACK. Then move the times of the state
  -- back by the difference.
  if l.last > at then l.shift, l.last = l.last - at, at end
--: if settle
--: do stored_params
--: end
--: do resolve
else
--: do initial
end
--: do after_resolve
--: do lost
--: end

--: if receipt
-- 3. Refuse to use a receipt twice. A sorted set has the nonces of used receipts, each with the moment at which the time
-- of the receipt is over. Its member '' has the latest such moment of all nonces that were removed: no receipt whose
-- time is over by then is used any more. So it does not matter how the clock jumps. (Redis would delete keys with a time
-- to live when the clock jumps ahead, and the clock can be put back afterwards.)
local used, over_at = ${receipt_key}, charged_at + ttl * 1000
local forgotten = tonumber(call('ZSCORE', used, '') or -1)
if now > over_at or over_at <= forgotten
  or call('ZADD', used, 'NX', string.format('%.0f', over_at), ARGV[#ARGV]) == 0 then
  return write_struct('<i8i8', 2, 0)
end
-- Each use adds one nonce and removes at most two. While the clock is ahead, few nonces are removed too early.
local oldest, before = call('ZRANGE', used, 0, 2, 'WITHSCORES'), forgotten
for i = 1, #oldest, 2 do
  local nonce, moment = oldest[i], tonumber(oldest[i + 1])
  if nonce ~= '' and moment < now then
    call('ZREM', used, nonce)
    forgotten = moment
  end
end
if forgotten > before then call('ZADD', used, string.format('%.0f', forgotten), '') end
--: end

-- 4. Decide.
-- `never` is true if an enforced limit would refuse this request for ever, for example because its cost is above the
-- capacity.
local allowed, never, binding, retry, wait = true, false, 0, 0, 0
--: for limit
l.ok = true
--: if decides
if l.cost > 0 then
  l.ok = false
--: do check
--: if limit enforced
  if l.ok then
    if l.wait and l.wait > wait then wait = l.wait end
  else
    allowed = false
    if l.retry == NEVER then
      if not never then never, binding = true, l.number end
    elseif not never and l.retry > retry then
      retry, binding = l.retry, l.number
    end
  end
--: end
end
--: end
--: end
if never then retry = NEVER end

-- 5. Charge the limits.
--: for limit
--: if try
if l.cost > 0 then
  if allowed and l.ok then
--: do charge
    l.written = true
  elseif not l.last then
    -- A limit begins at its first request, even if this request is refused: from this moment on, a bucket without
    -- permits fills. If this limit or an enforced one refuses the request for ever, nothing is stored.
    l.written = not never and l.retry ~= NEVER
  else
    l.must_keep = l.shift > 0
  end
end
--: end
--: if create
if not l.last then l.written = true else l.must_keep = l.shift > 0 end
--: end
--: if change
if l.last then l.written = true end
--: end
--: if refund
if l.last then
  if l.cost > 0 then
--: do refund
  end
  l.must_keep = l.undone or l.shift > 0
end
--: end
--: if release
if l.last then
--: do release
  l.must_keep = l.undone or l.shift > 0
end
--: end
--: if settle
if l.has_record and not l.last then
  -- The record is of another algorithm, so it gives no state. Do nothing: this algorithm never charged the request.
elseif l.cost > 0 then
--: do charge
  l.written = true
elseif l.cost < 0 and l.last then
  l.cost = -l.cost
--: if whole
--: do release_or_refund
--: else
--: do refund
--: end
  l.must_keep = l.undone or l.shift > 0
end
--: end
--: if restore
if l.lost then
--: do restore
  l.written = true
end
--: end
--: if reset
if l.has_record then
--: do reset
  l.removed = true
end
--: do renew
--: end
--: do standing
--: if stores
if l.written then l.last = at end
if l.written or l.must_keep then
--: do store
  l.written = true
  -- Round up to whole seconds, and add one second. The largest number in four bytes is 4294967295.
  local needed_until = at + (l.life > CLOCK_BACK and l.life or CLOCK_BACK)
  needed_until = (needed_until - needed_until % 1e6) / 1e6 + (needed_until % 1e6 > 0 and 2 or 1)
  l.expiry = needed_until < 4294967295 and needed_until or 4294967295
--: if not virtual
--: do keep
--: end
end
--: end
--: end
--: if not peek
--: do write_states
--: end

--: if counts
-- 6. Count usage, once for each meter.
--: do count
--: end

-- 7. Reply.
local remaining, reset = -1, 0 -- -1: no enforced limit has been seen yet
--: for limit
--: if limit enforced
if remaining < 0 or l.remaining < remaining then
  remaining = l.remaining
  if allowed then binding = l.number end
end
if l.reset > reset then reset = l.reset end
--: end
--: end
if remaining < 0 then remaining = 0 end
--: do reply
