-- concurrency (code 11): at most `capacity` permits are in use at once. An admitted request gets a lease for its
-- permits. The lease ends when it is released, or when `lease_ttl` has passed. A lease that has ended may still be
-- stored for some time.
--
-- A limit has two Redis keys: `l.redis_key`, and the same name with the ending ${details}.
--   (no ending)  sorted set with a member for each lease. The score is the lease's expiry, in µs after `l.base`. Most
--                leases are *plain*: a plain lease has one permit, and is older than other leases with its name. (So
--                while a lease that is not plain is stored, a request gets no plain lease: that stored lease may have
--                the same name.) The member of a plain lease is "=name". The member of any other lease is
--                "number:permits:name"
--   ${details}   sorted set about the leases that are not plain. All scores are 0, so Redis sorts the members by text.
--                "@name:number:permits" finds the leases with a name.
--                The other members let Redis count the permits that end before a moment, without reading each lease.
--                In the first key, each member stands for one permit of its lease. The other permits of a lease are
--                split into powers of two. For example, a lease of 6 permits has 5 other permits, and 5 = 1 + 4. Each
--                power is a member of the second key: a letter ("A" is 1, "B" is 2, "C" is 4), the expiry (16 digits,
--                with zeros in front), ":", the number of the lease. So the members of one power are sorted by expiry,
--                and Redis can count the members up to an expiry
-- On a cluster (`l.slots_move`) the second key also has an empty member. Because of this member the second key always
-- exists while the first key exists. A cluster needs this: while it moves a slot, a server runs a script only if this
-- server has all keys of the script.
--
-- Two more Redis keys let callers wait for a release. They exist only while callers wait. The script does not declare
-- them, so that it also runs while a cluster moves the slot and these two keys are on another node. Then the callers
-- wait until the first lease expires.
--   ${announced}   string "number terms". The number says how many callers were refused and wait for a release. The
--                terms are "version capacity lease_ttl": the version of the rules ("any" for a limit in code), and two
--                params of the limit. While the rules have this version, a caller can get a lease without asking again.
--                The terms are ASK_AGAIN if the callers have different terms, or if a caller needs more than one permit
--                or is also under another limit
--   ${freed}       list. Callers take elements from it with BLPOP, and the server serves the caller that has waited
--                longest. An element is either the name of a new lease, which then belongs to the caller that takes the
--                element, or "1", which tells this caller to ask again. While the name of a lease is in the list, the
--                lease belongs to nobody. Perhaps no caller will take it. So a request that needs permits may end it
--
-- "--@params" names the params of the limit ("-": not used here), and "--@record" the fields of its record, each after
-- its type: I7 is an unsigned integer of 7 bytes, and i7 a signed one (see engine/assemble/algorithm_files.py).
--@params * lease_ttl - - - - capacity
--@record leases I7 last i7 base I6 stored_permits I6 next_number I6 others I6 powers I7 oldest i7 newest
-- Fields of a limit `l`:
--   base             a moment (µs since 1970). The expiries of leases are stored as µs after this moment
--   stored_permits   permits of all stored leases
--   ended_permits    permits of the stored leases that have ended
--   live_permits     permits of the leases that have not ended
--   next_number      number of the next lease
--   others           the number of stored leases that are not plain
--   powers           the sum of those powers of two that may have members in the second key
--   oldest           the earliest expiry of a stored lease (µs after `base`); too early if that lease was removed
--   newest           the latest expiry of a stored lease; -1: not known
--   is_new           true if the limit starts without a state. Leases of an older state may still be stored
--   kept_until       the expiry (seconds) that the Redis keys have before this call
--   creates          true if a Redis key may be new, so that it has no time to live yet
--   takes_unclaimed  the number of leases in ${freed} that this request ends, to get their permits
-- engine/assemble sets `lease`, the name of the request's lease; `announces`, whether a refused caller waits for a
-- release; and `is_alone`, whether the call has no other limit.

-- Terms that no rule has: "-" is not a version.
local ASK_AGAIN = '- 0 0'

-- Stores in ${announced} that one more caller waits. The caller waits for at most `retry` µs. `terms` are the caller's
-- terms; nil if they are not known.
--@rarely
local function announce(redis_key, retry, terms)
  local key = redis_key .. '${announced}'
  local value = redis.pcall('GET', key)
  if type(value) ~= 'string' then value = '0 ' .. ASK_AGAIN end
  local count, terms_before = string.match(value, '^(%d+) (.*)$')
  if terms == nil then
    terms = terms_before
  elseif count ~= '0' and terms ~= terms_before then
    terms = ASK_AGAIN
  end
  redis.pcall('SET', key, string.format('%.0f %s', count + 1, terms), 'PX', math.ceil(retry / 1000))
end

-- Removes all leases, also those that belong to nobody.
--@rarely
local function remove_all(redis_key)
  local details, freed = redis_key .. '${details}', redis_key .. '${freed}'
  -- While a cluster moves the slot, the list of freed leases may be on another node. Then the command fails.
  if type(redis.pcall('UNLINK', redis_key, details, freed)) ~= 'number' then call('UNLINK', redis_key, details) end
end

-- Returns whether ${freed} has at least `need` leases, and the first `need` of them have not ended. These leases belong
-- to nobody.
local function has_unclaimed(redis_key, need, base)
  local size = redis.pcall('LLEN', redis_key .. '${freed}')
  if type(size) ~= 'number' or size < need then return false end
  for _, name in ipairs(redis.call('LRANGE', redis_key .. '${freed}', 0, need - 1)) do
    local expiry = tonumber(redis.call('ZSCORE', redis_key, '=' .. name) or -1)
    if expiry <= at - base then return false end
  end
  return true
end

-- Returns functions for leases that have ended or were released, and for leases of several permits. They are needed
-- less often, so they are defined only when they are needed.
local function lease_functions()
  -- Maximum number of ended leases that one charge removes.
  local MAX_REMOVED = 4

  -- Returns the number of permits of the lease with this member in the first key.
  local function permits_of(member)
    return tonumber(string.match(member, '^%d+:(%d+):') or 1)
  end

  -- Splits `number` into powers of two, and calls `act` with the letter and the value of each power.
  local function for_each_power(number, act)
    local letter, power = 65, 1 -- 65 is the byte of "A"
    while number > 0 do
      if number % 2 == 1 then act(string.char(letter), power) end
      number, letter, power = (number - number % 2) / 2, letter + 1, power * 2
    end
  end

  -- Returns the number of permits of all stored leases whose expiry is `t` or earlier.
  local function permits_ending_by(l, t)
    local count = redis.call('ZCOUNT', l.redis_key, '-inf', t)
    for_each_power(l.powers, function(letter, power)
      -- ';' is the next character after ':'. So `last` comes after all members with the expiry `t`.
      local last = letter .. string.format('%016.0f', t) .. ';'
      count = count + power * redis.call('ZLEXCOUNT', l.redis_key .. '${details}', '[' .. letter, '(' .. last)
    end)
    return count
  end

  -- Counts the permits of the leases that have ended.
  local function find_ended(l)
    l.ended_permits = permits_ending_by(l, at - l.base)
    -- A lease that was removed may have been the oldest one. Then `oldest` is too early, so read it again.
    if l.ended_permits == 0 then
      l.oldest = tonumber(redis.call('ZRANGE', l.redis_key, 0, 0, 'WITHSCORES')[2])
    end
  end

  -- Returns the first moment (µs after `base`) at which `need` more permits have ended.
  local function moment_with_permits(l, need)
    -- Find the first lease at whose expiry enough permits have ended. The leases are sorted by expiry. The rank of this
    -- lease is between `first` and `last`. Each lease has at least one permit, so the rank is below the number of
    -- permits.
    need = need + l.ended_permits
    local size = redis.call('ZCARD', l.redis_key)
    local first, last = 0, math.min(need, size) - 1
    local function expiry(rank)
      return tonumber(redis.call('ZRANGE', l.redis_key, rank, rank, 'WITHSCORES')[2])
    end
    if last < 0 or permits_ending_by(l, expiry(last)) < need then
      error('the leases of a limit are fewer than its count: reset the key')
    end
    -- Without powers of two each lease has one permit, so the rank is known.
    if l.powers == 0 then first = last end
    local function narrow(rank)
      if permits_ending_by(l, expiry(rank)) < need then first = rank + 1 else last = rank end
    end
    -- If large and small leases are mixed evenly, the rank of this lease is close to `likely`. So first look 64 ranks
    -- before and after `likely`: this saves about ten steps of the loop below, which halves the range in each step.
    local likely = math.floor(need / l.stored_permits * size)
    for _, rank in ipairs({likely - 64, likely + 64}) do
      if first <= rank and rank < last then narrow(rank) end
    end
    while first < last do narrow(math.floor((first + last) / 2)) end
    return expiry(last)
  end

  -- Calls `act` with each member that a lease has in the second key, and with the member's power of two.
  local function for_each_member(number, count, expiry, act)
    for_each_power(count - 1, function(letter, power)
      act(letter .. string.format('%016.0f', expiry) .. ':' .. number, power)
    end)
  end

  -- Removes one lease.
  local function remove_lease(l, member, expiry)
    local number, count, name = string.match(member, '^(%d+):(%d+):(.*)$')
    redis.call('ZREM', l.redis_key, member)
    if number then
      l.others = l.others - 1
      redis.call('ZREM', l.redis_key .. '${details}', '@' .. name .. ':' .. number .. ':' .. count)
      for_each_member(number, tonumber(count), expiry, function(other_member)
        redis.call('ZREM', l.redis_key .. '${details}', other_member)
      end)
    end
    if l.others == 0 then l.powers = 0 end
    l.stored_permits = l.stored_permits - permits_of(member)
    if expiry >= l.newest then l.newest = -1 end
  end

  -- Removes some of the ended leases. A charge removes more leases than it adds, so the number of ended leases does not
  -- grow without limit.
  local function remove_ended(l)
    local ended = redis.call('ZRANGEBYSCORE', l.redis_key, '-inf', at - l.base, 'WITHSCORES', 'LIMIT', 0, MAX_REMOVED)
    for i = 1, #ended, 2 do
      l.ended_permits = l.ended_permits - permits_of(ended[i])
      remove_lease(l, ended[i], tonumber(ended[i + 1]))
    end
    local oldest = redis.call('ZRANGE', l.redis_key, 0, 0, 'WITHSCORES')[2]
    if oldest then l.oldest = tonumber(oldest) end
  end

  -- Adds a lease with this member and this number of permits to the first key.
  local function add_member(l, member, count, expiry)
    if l.stored_permits == 0 then
      if l.slots_move then redis.call('ZADD', l.redis_key .. '${details}', 0, '') end
      l.oldest, l.newest, l.creates = expiry, expiry, true -- the keys are new, so they have no time to live
    end
    if expiry < l.oldest then l.oldest = expiry end
    if l.newest >= 0 and expiry > l.newest then l.newest = expiry end
    redis.call('ZADD', l.redis_key, expiry, member)
    l.stored_permits, l.live_permits = l.stored_permits + count, l.live_permits + count
  end

  -- Adds a lease that is not plain.
  local function add_lease(l, name, count, expiry)
    local number = string.format('%.0f', l.next_number)
    local label = string.format('%s:%.0f', number, count)
    add_member(l, label .. ':' .. name, count, expiry)
    redis.call('ZADD', l.redis_key .. '${details}', 0, '@' .. name .. ':' .. label)
    for_each_member(number, count, expiry, function(other_member, power)
      redis.call('ZADD', l.redis_key .. '${details}', 0, other_member)
      if l.powers % (2 * power) < power then l.powers = l.powers + power end -- `powers` did not contain this power
    end)
    if l.others == 0 then l.creates = true end -- the second key may be new, so it has no time to live
    l.next_number, l.others = l.next_number + 1, l.others + 1
  end

  -- Gives at most `count` returned permits to waiting callers, at most one to each caller. If the rules still have the
  -- version of the callers' terms, a caller gets a lease. Otherwise it gets "1", and asks again. `head` is the head of
  -- a shard: it begins with the version of the rules in force.
  local function give_to_callers(l, count, head)
    local key, freed = l.redis_key .. '${announced}', l.redis_key .. '${freed}'
    local value = redis.pcall('GET', key)
    if type(value) ~= 'string' then return end
    local waiting, version, capacity, lease_ttl = string.match(value, '^(%d+) (%S+) (%d+) (%d+)$')
    waiting, capacity, lease_ttl = tonumber(waiting), tonumber(capacity), tonumber(lease_ttl)
    local given, gives_leases = 0, version == 'any' or version == string.match(head or '', '^%d+')
    while given < count and given < waiting and (not gives_leases or l.live_permits < capacity) do
      -- No other lease has this name, because no two leases get the same number at the same moment.
      local name = gives_leases and string.format('%.0f~%.0f', at, l.next_number) or '1'
      local size = redis.pcall('RPUSH', freed, name)
      if type(size) ~= 'number' then break end
      given = given + 1
      if gives_leases then
        add_member(l, '=' .. name, 1, at + lease_ttl - l.base)
        l.next_number = l.next_number + 1
      else
        lease_ttl = l.lease_ttl -- ASK_AGAIN has no `lease_ttl`
      end
      -- With its first element the list gets an expiry, so that it expires before any lease in it ends.
      if size == 1 then redis.pcall('PEXPIRE', freed, math.max(math.floor(lease_ttl / 1000), 1)) end
    end
    if given > 0 then
      local left = string.format('%.0f%s', waiting - given, string.match(value, ' .*'))
      redis.pcall('SET', key, left, 'KEEPTTL')
    end
  end

  -- Ends the first `count` leases in ${freed}. The callers for whom these leases were made may still wait. So this
  -- function announces these callers again.
  local function take_unclaimed(l, count)
    local freed = l.redis_key .. '${freed}'
    for _, name in ipairs(redis.call('LRANGE', freed, 0, count - 1)) do
      remove_lease(l, '=' .. name, tonumber(redis.call('ZSCORE', l.redis_key, '=' .. name)))
      rarely().announce(l.redis_key, l.lease_ttl)
    end
    redis.call('LTRIM', freed, count, -1)
  end

  -- Returns two lists: the leases with the request's name that have not ended, the oldest first, and their expiries.
  local function leases_of_name(l, lease)
    local out, expiries, numbers = {}, {}, {}
    local function add(member, number)
      local expiry = tonumber(redis.call('ZSCORE', l.redis_key, member) or -1)
      if expiry <= at - l.base then return end
      local index = #out + 1
      while index > 1 and numbers[index - 1] > number do index = index - 1 end
      table.insert(out, index, member)
      table.insert(expiries, index, expiry)
      table.insert(numbers, index, number)
    end
    add('=' .. lease, 0) -- a plain lease is older than others with its name
    if l.others == 0 then return out, expiries end
    -- ';' is the next character after ':'. So the range has all members that begin with "@name:".
    local first, last = '[@' .. lease .. ':', '(@' .. lease .. ';'
    for _, member in ipairs(redis.call('ZRANGE', l.redis_key .. '${details}', first, last, 'BYLEX')) do
      local name, number, count = string.match(member, '^@(.*):(%d+):(%d+)$')
      if name == lease then add(number .. ':' .. count .. ':' .. name, tonumber(number)) end
    end
    return out, expiries
  end

  -- Ends all leases with the request's name that have not ended. Does not remove leases that have ended: they count
  -- again if the clock steps back before the next charge. Returns whether it has ended a lease.
  local function release(l, lease, head)
    local members, expiries = leases_of_name(l, lease)
    local before = l.live_permits
    for i = 1, #members do
      l.live_permits = l.live_permits - permits_of(members[i])
      remove_lease(l, members[i], expiries[i])
    end
    if #members > 0 then give_to_callers(l, before - l.live_permits, head) end
    return #members > 0
  end

  -- Gives back permits of the leases with the request's name, the newest lease first. Returns whether it has given back
  -- any permits.
  local function refund(l, lease, head)
    local to_refund = l.cost
    local members, expiries = leases_of_name(l, lease)
    for i = #members, 1, -1 do
      local count = permits_of(members[i])
      if to_refund > 0 then
        remove_lease(l, members[i], expiries[i])
        l.live_permits = l.live_permits - count
        if count > to_refund then add_lease(l, lease, count - to_refund, expiries[i]) end
        to_refund = math.max(to_refund - count, 0)
      end
    end
    if to_refund < l.cost then give_to_callers(l, l.cost - to_refund, head) end
    return to_refund < l.cost
  end

  return {
    find_ended = find_ended, moment_with_permits = moment_with_permits, remove_ended = remove_ended,
    add_lease = add_lease, take_unclaimed = take_unclaimed, release = release, refund = refund,
  }
end

local leases = {}

function leases.initial(l)
  l.base, l.next_number, l.powers, l.is_new, l.oldest, l.newest = at, 1, 0, not l.keys_absent, 0, -1
  l.stored_permits, l.live_permits, l.ended_permits, l.others = 0, 0, 0, 0
end

function leases.resolve(l)
  l.base, l.ended_permits, l.kept_until = l.base - l.shift, 0, l.expiry
  if l.stored_permits > 0 then
    -- The server may have evicted the sorted set of the leases.
    if call('EXISTS', l.redis_key) == 0 then
      l.starts_anew = true
    elseif l.oldest <= at - l.base then
      lease_functions().find_ended(l.self)
    end
  end
  l.live_permits = l.stored_permits - l.ended_permits
end

function leases.check(l)
  local need = l.live_permits + l.cost - l.capacity
  if l.cost > l.capacity then
    l.retry = NEVER
  elseif need <= 0 then
    l.ok = true
  elseif has_unclaimed(l.redis_key, need, l.base) then
    l.ok, l.takes_unclaimed, l.live_permits = true, need, l.live_permits - need
  else
    local expiry
    if l.others == 0 and l.ended_permits == 0 then
      -- Each lease has one permit.
      expiry = tonumber(call('ZRANGE', l.redis_key, need - 1, need - 1, 'WITHSCORES')[2])
    end
    if not expiry then
      expiry = lease_functions().moment_with_permits(l.self, need)
    end
    l.retry = expiry + l.base - at
    if l.announces then
      local terms = ASK_AGAIN
      if l.is_alone and l.cost == 1 then
        -- `marks` is odd if the call must be stale when there are newer rules: only for limits that come from rules.
        local version = marks % 2 == 1 and string.match(ARGV[2], '^%d+') or 'any'
        terms = string.format('%s %.0f %.0f', version, l.capacity, l.lease_ttl)
      end
      rarely().announce(l.redis_key, l.retry, terms)
    end
  end
end

function leases.charge(l)
  if l.takes_unclaimed then
    lease_functions().take_unclaimed(l.self, l.takes_unclaimed)
  end
  -- If no lease is in use, remove everything at once. A limit without a state must not count old leases.
  if l.is_new or l.live_permits == 0 and l.stored_permits > 0 then
    rarely().remove_all(l.redis_key)
    l.stored_permits, l.ended_permits, l.others, l.powers, l.is_new = 0, 0, 0, 0, false
  end
  if l.ended_permits > 0 then
    lease_functions().remove_ended(l.self)
  end
  local expiry, is_plain = at + l.lease_ttl - l.base, l.cost == 1 and l.others == 0
  -- `expiry` is passed as a number: the server makes a text of it faster than Lua does. No digit is lost.
  if is_plain and call('ZADD', l.redis_key, 'NX', expiry, '=' .. l.lease) == 1 then
    if l.stored_permits == 0 then
      if l.slots_move then call('ZADD', l.redis_key .. '${details}', 0, '') end
      l.oldest, l.newest, l.creates = expiry, expiry, true -- the keys are new, so they have no time to live
    end
    if expiry < l.oldest then l.oldest = expiry end
    if l.newest >= 0 and expiry > l.newest then l.newest = expiry end
    l.stored_permits, l.live_permits = l.stored_permits + 1, l.live_permits + 1
  else
    lease_functions().add_lease(l.self, l.lease, l.cost, expiry)
  end
end

-- got[1] is the head of a shard, as it was before this call.
function leases.refund(l)
  l.undone = lease_functions().refund(l.self, l.lease, got[1])
end

function leases.release(l)
  l.undone = lease_functions().release(l.self, l.lease, got[1])
end

function leases.standing(l)
  l.remaining, l.reset = l.capacity - l.live_permits, 0
  if l.remaining < 0 then l.remaining = 0 end
  if l.stored_permits > 0 and l.newest < 0 then
    l.newest = tonumber(call('ZREVRANGE', l.redis_key, 0, 0, 'WITHSCORES')[2])
  end
  if l.live_permits > 0 then l.reset = l.newest + l.base - at end
end

function leases.store(l)
  if l.is_new then rarely().remove_all(l.redis_key) end
  -- `standing` has read `newest` before, if there are leases.
  l.life = l.stored_permits > 0 and l.newest + l.base - at or 0
end

function leases.keep(l)
  -- The expiry is in whole seconds. So a busy limit sets it once a second.
  if l.expiry ~= l.kept_until or l.creates then
    local ttl = l.expiry * 1000 - (now - now % 1000) / 1000 -- in ms
    call('PEXPIRE', l.redis_key, ttl)
    if l.others > 0 or l.slots_move then call('PEXPIRE', l.redis_key .. '${details}', ttl) end
  end
end

function leases.reset(l)
  rarely().remove_all(l.redis_key)
end
