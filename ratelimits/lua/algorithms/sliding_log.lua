-- sliding_log (code 8): at most `capacity` permits in any interval of `period`. The times of all charges are stored.
--
-- The newest charges are in a *list* (the Redis key `l.redis_key`). The oldest of them is its first item. An item is
-- "time", or "time:permits" if several permits were taken at one moment. A list needs 11 times less memory than a
-- sorted set. Times are in µs after `l.base`. An item is never earlier than the item before it, because the moment of a
-- decision is never before `last`.
--
-- All older charges are in a *tree*, a hash with the key `l.redis_key .. '${tree}'`. Its fields are "<level>:<number>".
-- Each field is a node:
--   "0:<k>"  block number k, with 64 items. When the list has 128 items, the oldest 64 of them become a new block
--   "1:<j>"  64 blocks, the first of them is number 64 * j
--   "2:<i>"  64 nodes of level 1, the first of them is "1:<64 * i>"
--   "3:0"    the top: all nodes of level 2 that still exist
-- A node is a list of pairs, packed by cmsgpack. A block has a pair for each item: the time, and the number of
-- permits. A higher node has a pair for each node of the next lower level: the time of its first charge, and the sum of
-- its permits. The first time of a node is stored in full, each other time as its difference from the first time.
-- So a decision reads only one node of each level and a few items of the list, even if there are very many charges.
--
-- On a cluster (`l.slots_move`) the hash also has a field with an empty name. Because of this field the hash always
-- exists while the list exists. A cluster needs this: while it moves a slot, a server refuses a script if one of the
-- script's keys does not exist there, because this key may be on the other server.
--
-- "--@params" names the params of the limit ("-": not used here), and "--@record" the fields of its record, each after
-- its type: I7 is an unsigned integer of 7 bytes, and i7 a signed one.
--@params * period - - - - capacity
--@record log I7 last I7 stored_period i7 base I6 in_list I6 in_tree I5 next_block I5 first_block i7 ended_until i7 stored_oldest I6 stored_ended
-- A charge *ends* when a period has passed since it was made. Then its permits are free again. Fields of a limit `l`:
--   base                         a moment (µs since 1970). The times of charges are stored as µs after this moment
--   in_list, in_tree             the permits in the list and in the tree
--   ended_permits, ended_items   the permits and the items in the list that have ended
--   ended_in_tree                the permits in the tree that have ended
--   live_permits                 the permits in the list and in the tree that have not ended
--   next_block, first_block      the number of the next new block, and of the oldest block that exists
--   first_live_block             the number of the oldest block with a charge that has not ended
--   ended_until                  all charges up to this time had ended when the last charge was made, or when the
--                                period was edited. They never count again, even if the period becomes longer
--   cutoff                       all charges up to this time have ended now: `ended_until`, or one period ago if that
--                                is later
--   oldest                       the time of the oldest charge that has not ended; -1: not known
--   newest                       the time of the newest charge; -1: not known
--   is_new                       true if the limit starts without a state. An older list or tree may still be stored
--   is_loaded                    true if it is known which of the keys exist
--   kept_until                   the expiry (seconds) that the Redis keys have before this call
--   creates                      true if a Redis key may be new, so that it has no time to live yet
--   has_lost_tree                true if the tree does not exist any more
-- The record has `oldest` and `ended_in_tree` of the moment `last`, as `stored_oldest` and `stored_ended`. While this
-- oldest charge has not ended, the record is enough to decide, and neither the list nor the tree is read. The server
-- may have evicted the list or the tree. Then the limit has fewer permits in use than the record says, so it is right
-- to admit a request that the record admits. The charge then notices that the list is gone. Before a refusal, the
-- script checks whether both exist.

-- The number of items in a block and of nodes below a node; the level of the top.
local SPREAD, TOP = 64, 3

-- The record says whether the list and the tree have charges. Returns false if one of them has charges but does not
-- exist. (On a cluster the tree always exists while the list exists.)
local function has_keys(redis_key, in_list, in_tree, slots_move)
  if in_list + in_tree == 0 then return true end
  if in_tree == 0 and not slots_move then return call('EXISTS', redis_key) == 1 end
  -- The tree must exist. The list must exist if it has charges, and does not exist if it has none.
  return call('EXISTS', redis_key, redis_key .. '${tree}') == (in_list > 0 and 2 or 1)
end

-- Returns functions for the tree and for charges that have ended. They are needed rarely, so they are defined only when
-- they are needed.
local function log_functions()
  local nodes = {} -- the nodes that were read or written, by field

  -- Returns the time and the permits of an item of the list.
  local function parse_item(text)
    local t = tonumber(text)
    if t then return t, 1 end
    local colon = string.find(text, ':', 1, true)
    return tonumber(string.sub(text, 1, colon - 1)), tonumber(string.sub(text, colon + 1))
  end

  local function format_item(t, count)
    return string.format(count == 1 and '%.0f' or '%.0f:%.0f', t, count)
  end

  -- Returns the name of a node's field.
  local function field(level, number) return string.format('%d:%.0f', level, number) end

  -- Returns a node with all times in full; nil if it does not exist.
  local function load_node(l, level, number)
    local name = field(level, number)
    if nodes[name] then return nodes[name] end
    local packed = redis.call('HGET', l.redis_key .. '${tree}', name)
    if not packed then return nil end
    local node = cmsgpack.unpack(packed)
    for i = 3, #node, 2 do node[i] = node[i] + node[1] end
    nodes[name] = node
    return node
  end

  -- Writes a node. The caller must not use the times of `node` after this, except the first time.
  local function store_node(l, level, number, node)
    local name, first = field(level, number), node[1]
    for i = 3, #node, 2 do node[i] = node[i] - first end
    redis.call('HSET', l.redis_key .. '${tree}', name, cmsgpack.pack(node))
    nodes[name] = nil -- its times are differences now
  end

  -- Returns the number of the first node of the next lower level that belongs to this node.
  local function first_child(l, level, number)
    -- Only the top loses nodes at its beginning: its first child is the node that contains the oldest block.
    if level == TOP then return math.floor(l.first_block / SPREAD ^ (TOP - 1)) end
    return number * SPREAD
  end

  -- Goes down the tree. In each node it takes the last pair whose time is `t` or earlier. Returns the sum of all
  -- permits up to `t`, the number of the block with the last of these permits, and the path. The path has a table for
  -- each level, the top first: its level, number and node, and the index of the pair in the node.
  local function by_time(l, t)
    local sum, number, path = 0, 0, {}
    for level = TOP, 0, -1 do
      local node = load_node(l, level, number)
      -- The node was removed: either all its charges are before `ended_until`, or it has no permits. The node above it
      -- still has its sum.
      if not node then
        local above = path[#path]
        if above then sum = sum + above.node[above.index + 1] end
        return sum, number * SPREAD ^ level, path
      end
      local index = 1
      if node[1] > t then return sum, number * SPREAD ^ level, path end
      while node[index + 2] and node[index + 2] <= t do
        sum, index = sum + node[index + 1], index + 2
      end
      path[#path + 1] = {level = level, number = number, node = node, index = index}
      if level == 0 then return sum + node[index + 1], number, path end
      number = first_child(l, level, number) + (index - 1) / 2
    end
  end

  -- Adds up the permits in the tree, the oldest first. Returns the time of the charge with which they reach `sum`.
  local function by_sum(l, sum)
    local number = 0
    for level = TOP, 0, -1 do
      local node, index = load_node(l, level, number), 1
      while node and node[index] and node[index + 1] < sum do
        sum, index = sum - node[index + 1], index + 2
      end
      if not (node and node[index]) then error('the log of a limit is shorter than its count: reset the key') end
      if level == 0 then return node[index] end
      number = first_child(l, level, number) + (index - 1) / 2
    end
  end

  -- Forgets the tree: all its charges have ended, or the server has evicted it.
  local function forget_tree(l)
    nodes = {}
    l.in_tree, l.ended_in_tree, l.next_block, l.first_block, l.first_live_block = 0, 0, 0, 0, 0
  end

  -- Moves the 64 oldest items of the list into a new block.
  local function make_block(l)
    if l.in_tree > 0 and redis.call('EXISTS', l.redis_key .. '${tree}') == 0 then
      forget_tree(l)
      l.live_permits = l.in_list
    end
    if l.next_block == 0 then l.creates = true end -- the tree may be new, so it has no time to live
    local items = redis.call('LRANGE', l.redis_key, 0, SPREAD - 1)
    redis.call('LTRIM', l.redis_key, SPREAD, -1)
    local block, sum, number = {}, 0, l.next_block
    for i = 1, #items do
      local t, count = parse_item(items[i])
      block[2 * i - 1], block[2 * i], sum = t, count, sum + count
    end
    store_node(l, 0, number, block)
    local is_new = true -- whether the node of the level below is new
    for level = 1, TOP do
      local child = number -- the number of the node of the level below
      number = level == TOP and 0 or math.floor(child / SPREAD)
      local node = load_node(l, level, number)
      local existed = node ~= nil
      node = node or {}
      if is_new then
        local index = child - first_child(l, level, number) -- the position of `child` below this node, from 0
        node[2 * index + 1], node[2 * index + 2] = block[1], sum
      else
        node[#node] = node[#node] + sum
      end
      store_node(l, level, number, node)
      is_new = not existed
    end
    l.next_block, l.in_tree, l.in_list = l.next_block + 1, l.in_tree + sum, l.in_list - sum
  end

  -- Removes at most 32 blocks before the block `first`, and the nodes that have no block any more: at most one of each
  -- level. Does not subtract the removed permits from the sums in other nodes. These permits have ended, so `in_tree`
  -- and `ended_in_tree` both contain them, and the difference of these two is right. When a node of level 2 is removed,
  -- its sum, which is the first sum in the top, is subtracted from both.
  local function remove_blocks(l, first)
    local fields, from = {}, l.first_block
    l.first_block = math.max(from, math.min(first, from + SPREAD / 2))
    for number = from, l.first_block - 1 do fields[#fields + 1] = field(0, number) end
    if #fields == 0 then return end
    local top = load_node(l, TOP, 0)
    for level = 1, TOP - 1 do
      local number = math.floor(from / SPREAD ^ level)
      if math.floor(l.first_block / SPREAD ^ level) > number then
        fields[#fields + 1] = field(level, number)
        if level == TOP - 1 then
          l.in_tree, l.ended_in_tree = l.in_tree - top[2], l.ended_in_tree - top[2]
          table.remove(top, 1)
          table.remove(top, 1)
          store_node(l, TOP, 0, top)
        end
      end
    end
    redis.call('HDEL', l.redis_key .. '${tree}', unpack(fields))
    for _, name in ipairs(fields) do nodes[name] = nil end
  end

  -- Finds out which of the keys exist, and which charges have ended. Does not remove these charges, because a refused
  -- request must change nothing.
  local function load(l)
    l.is_loaded = true
    if not has_keys(l.redis_key, l.in_list, l.in_tree, l.slots_move) then
      if redis.call('EXISTS', l.redis_key) == 0 then l.in_list = 0 end
      if redis.call('EXISTS', l.redis_key .. '${tree}') == 0 then
        forget_tree(l)
        l.has_lost_tree = true
      end
      l.stored_oldest = -1 -- the stored values are not true any more
    end
    l.ended_items, l.ended_permits, l.oldest = 0, 0, -1
    -- Read one item first, because often no charge has ended. Then read 64 at a time.
    local size, more = 1, l.in_list > 0
    while more do
      local items = redis.call('LRANGE', l.redis_key, l.ended_items, l.ended_items + size - 1)
      more = #items == size
      for i = 1, #items do
        local t, count = parse_item(items[i])
        if t > l.cutoff then
          l.oldest, more = t, false
          break
        end
        l.ended_items, l.ended_permits = l.ended_items + 1, l.ended_permits + count
      end
      size = 64
    end
    -- The tree is older than the list. So if an item of the list has ended, all charges of the tree have ended.
    l.ended_in_tree, l.first_live_block = l.in_tree, l.next_block
    if l.ended_items == 0 and l.in_tree > 0 then
      l.ended_in_tree, l.first_live_block = by_time(l, l.cutoff)
      if l.in_tree > l.ended_in_tree then l.oldest = by_sum(l, l.ended_in_tree + 1) end
    end
    l.live_permits = l.in_list - l.ended_permits + l.in_tree - l.ended_in_tree
  end

  -- Adds up the permits that have not ended, the oldest first. Returns the time of the charge with which they reach
  -- `need`.
  local function time_of_permit(l, need)
    if l.in_tree - l.ended_in_tree >= need then return by_sum(l, l.ended_in_tree + need) end
    need = need - (l.in_tree - l.ended_in_tree)
    local position = l.ended_items
    local t
    while need > 0 do
      local items = redis.call('LRANGE', l.redis_key, position, position + 63)
      if #items == 0 then error('the log of a limit is shorter than its count: reset the key') end
      for i = 1, #items do
        local count
        t, count = parse_item(items[i])
        need = need - count
        if need <= 0 then break end
      end
      position = position + #items
    end
    return t
  end

  -- Removes the charges that have ended.
  local function remove_ended(l)
    if l.ended_items > 0 then
      redis.call('LTRIM', l.redis_key, l.ended_items, -1)
      l.in_list, l.ended_items, l.ended_permits = l.in_list - l.ended_permits, 0, 0
    end
    if l.next_block > 0 and l.ended_in_tree == l.in_tree then
      redis.call('UNLINK', l.redis_key .. '${tree}')
      forget_tree(l)
      l.has_lost_tree = true
    end
    remove_blocks(l, l.first_live_block)
  end

  -- Gives back at most `to_refund` permits of the charge that was made at the time `t` and is in the tree. Returns the
  -- number of permits that it gave back.
  local function refund_in_tree(l, t, to_refund)
    local _, _, path = by_time(l, t)
    local last = path[#path]
    if not last or last.level > 0 or last.node[last.index] ~= t then return 0 end
    local amount = math.min(to_refund, last.node[last.index + 1])
    for i = #path, 1, -1 do
      local level, number, node, index = path[i].level, path[i].number, path[i].node, path[i].index
      node[index + 1] = node[index + 1] - amount
      if level == 0 and node[index + 1] == 0 then
        table.remove(node, index)
        table.remove(node, index)
      end
      local sum = 0
      for j = 2, #node, 2 do sum = sum + node[j] end
      -- Do not delete an empty node if blocks that are made later can still belong to it.
      if sum == 0 and level < TOP and (number + 1) * SPREAD ^ level <= l.next_block then
        redis.call('HDEL', l.redis_key .. '${tree}', field(level, number))
        nodes[field(level, number)] = nil
      else
        store_node(l, level, number, node)
      end
    end
    l.in_tree, l.live_permits = l.in_tree - amount, l.live_permits - amount
    return amount
  end

  -- Gives back permits of the charge at `charged_at`. If this moment is not known, gives back the newest permits.
  -- Returns whether it has given back any permits.
  local function refund(l, charged_at)
    -- Do not remove ended charges: they count again if the clock steps back before the next charge.
    local cost = math.min(l.cost, l.live_permits)
    local to_refund = cost
    local charge_time = charged_at > 0 and charged_at - l.base -- false: not known
    local items = l.in_list > l.ended_permits and redis.call('LRANGE', l.redis_key, l.ended_items, -1) or {}
    for i = #items, 1, -1 do
      local t, count = parse_item(items[i])
      if to_refund == 0 or charge_time and t < charge_time then break end
      if not charge_time or t == charge_time then
        local amount, position = math.min(to_refund, count), l.ended_items + i - 1
        if amount < count then
          redis.call('LSET', l.redis_key, position, format_item(t, count - amount))
        else
          -- A list has no command that removes an item by its index. So replace the item by '-', and remove '-'.
          redis.call('LSET', l.redis_key, position, '-')
          redis.call('LREM', l.redis_key, -1, '-')
        end
        to_refund, l.live_permits, l.in_list = to_refund - amount, l.live_permits - amount, l.in_list - amount
      end
    end
    while to_refund > 0 and l.in_tree > l.ended_in_tree do
      local t = charge_time or by_sum(l, l.in_tree)
      local amount = t > l.cutoff and refund_in_tree(l, t, to_refund) or 0
      to_refund = to_refund - amount
      if charge_time or amount == 0 then break end
    end
    return to_refund < cost
  end

  return {
    load = load, remove_ended = remove_ended, make_block = make_block, refund = refund,
    time_of_permit = time_of_permit, by_sum = by_sum, parse_item = parse_item,
  }
end

local log = {}

function log.initial(l)
  l.base, l.is_new, l.is_loaded = at, not l.keys_absent, true
  l.in_list, l.in_tree, l.live_permits, l.ended_items, l.ended_permits, l.ended_in_tree = 0, 0, 0, 0, 0, 0
  l.next_block, l.first_block, l.first_live_block, l.stored_oldest, l.stored_ended = 0, 0, 0, 0, 0
  l.ended_until, l.cutoff, l.oldest, l.newest = -1, -1, -1, -1
end

function log.stored_params(l)
  l.period = l.stored_period
end

function log.resolve(l)
  l.base, l.kept_until, l.newest = l.base - l.shift, l.expiry, -1
  -- If the period was changed: charges that have ended under the old period do not count again under a longer one.
  if l.stored_period ~= l.period then
    local changed = rarely().moment_of_change(l.number, l.last, at) -- see rules.lua
    l.ended_until = math.max(l.ended_until, changed - l.base - l.stored_period)
  end
  l.cutoff = at - l.base - l.period
  if l.cutoff < l.ended_until then l.cutoff = l.ended_until end
  if l.stored_oldest > l.cutoff then
    l.oldest, l.ended_in_tree, l.ended_items, l.ended_permits = l.stored_oldest, l.stored_ended, 0, 0
    l.first_live_block, l.live_permits = l.first_block, l.in_list + l.in_tree - l.ended_in_tree
  else
    log_functions().load(l.self)
  end
end

function log.check(l)
  local need = l.live_permits + l.cost - l.capacity
  if need > 0 and not l.is_loaded then
    if not has_keys(l.redis_key, l.in_list, l.in_tree, l.slots_move) then
      log_functions().load(l.self)
      need = l.live_permits + l.cost - l.capacity
    end
    l.is_loaded = true
  end
  if l.cost > l.capacity then
    l.retry = NEVER
  elseif need <= 0 then
    l.ok = true
  else
    local t = l.oldest
    if need > 1 then
      t = log_functions().time_of_permit(l.self, need)
    end
    l.retry = t + l.base + l.period - at
  end
end

function log.charge(l)
  if l.is_new then call('UNLINK', l.redis_key, l.redis_key .. '${tree}') end
  l.is_new = false
  -- If the oldest charge of the record has ended, charges in the tree may have ended too.
  if l.ended_items > 0 or l.stored_oldest <= l.cutoff then
    log_functions().remove_ended(l.self)
  end
  l.ended_until = l.cutoff
  local t, count = at - l.base, l.cost
  local tail = at == l.last and l.in_list > 0 and call('LINDEX', l.redis_key, -1)
  if tail then
    local newest, permits_there = log_functions().parse_item(tail)
    if newest == t then
      call('RPOP', l.redis_key)
      count = count + permits_there
    end
  end
  -- The time is passed as a number: the server makes a text of it faster than Lua does.
  local items = call('RPUSH', l.redis_key, count == 1 and t or string.format('%.0f:%.0f', t, count))
  l.live_permits, l.in_list, l.newest = l.live_permits + l.cost, l.in_list + l.cost, t
  if items == 1 then
    -- The list is new. If it was evicted, it had other permits before.
    l.in_list, l.live_permits, l.creates = count, count + l.in_tree - l.ended_in_tree, true
  end
  if l.live_permits == count then l.oldest = t end
  if l.slots_move and (items == 1 or l.has_lost_tree) then
    call('HSET', l.redis_key .. '${tree}', '', '')
    l.creates = true -- the key is new, so it has no time to live
  end
  if items >= 2 * SPREAD then
    log_functions().make_block(l.self)
  end
  l.stored_oldest, l.stored_ended = l.oldest, l.ended_in_tree
end

function log.refund(l)
  if not l.is_loaded and not has_keys(l.redis_key, l.in_list, l.in_tree, l.slots_move) then
    log_functions().load(l.self)
  end
  l.undone = log_functions().refund(l.self, charged_at)
  l.stored_oldest, l.newest = -1, -1
end

function log.standing(l)
  if l.newest < 0 and not l.is_loaded and not has_keys(l.redis_key, l.in_list, l.in_tree, l.slots_move) then
    log_functions().load(l.self)
  end
  l.remaining, l.reset = l.capacity - l.live_permits, 0
  if l.remaining < 0 then l.remaining = 0 end
  if l.live_permits > 0 then
    if l.newest < 0 and l.in_list > l.ended_permits then
      local item = call('LINDEX', l.redis_key, -1)
      l.newest = tonumber(item) or log_functions().parse_item(item)
    elseif l.newest < 0 then
      l.newest = log_functions().by_sum(l.self, l.in_tree)
    end
    l.reset = l.newest + l.base + l.period - at
  end
end

function log.store(l)
  if l.is_new then call('UNLINK', l.redis_key, l.redis_key .. '${tree}') end
  l.stored_period, l.life = l.period, l.period
end

function log.keep(l)
  -- The expiry is in whole seconds. So a busy limit sets it once a second.
  if l.expiry ~= l.kept_until or l.creates then
    local ttl = l.expiry * 1000 - (now - now % 1000) / 1000 -- in ms
    call('PEXPIRE', l.redis_key, ttl)
    if l.next_block > 0 or l.slots_move then call('PEXPIRE', l.redis_key .. '${tree}', ttl) end
  end
end

function log.reset(l)
  call('UNLINK', l.redis_key, l.redis_key .. '${tree}')
end
