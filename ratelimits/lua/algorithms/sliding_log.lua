-- sliding_log (8): at most capacity in any interval of `period`. The times of all charges are stored.
-- own      list of the newest times, oldest first. An item is "t", or "t:count" for several permits at one moment. Times
--          are in µs after the entry's base. They never go back, since the moment of a decision is never before `last`. (A
--          list takes 11 times less memory than a sorted set.)
-- own:b    hash: all older times, as a tree. When the list reaches 128 items, the oldest 64 move into a new block. Block k
--          is the field "0:k". Node "1:j" has the 64 blocks from number 64j on. Node "2:i" has the 64 nodes "1:…" from 64i
--          on. The top node "3:0" has all nodes "2:…" that still exist.
--          Each field is a flat array of pairs, one for each part: first time and sum of permits (in a block: time and
--          count). The first time is absolute, the others are differences from it. A part whose sum is 0 may be missing.
--          So a decision reads only four nodes and a few items of the list, even if the log is long.
--          A field with an empty name keeps the hash alive as long as the list: while a slot of a cluster moves, a node
--          runs a script only if it has all keys of the script.
-- Entry: name, algorithm, expiry, last, period, base, total (permits in the list), old (permits in the tree), number of
-- blocks ever made, first block that exists, `since` (charges up to this time have ended, even if the period becomes
-- longer).
-- Params: period, -, -, -, -, capacity.
-- Limit (l): live are the permits that count now. ended and gone are the items and the permits in the list that have ended.
-- over are the permits in the tree that have ended; keep_from is the first block that still counts.
do
  local log = {}
  local SPREAD, TOP = 64, 3

  local function parse(item)
    local colon = string.find(item, ':', 1, true)
    if colon then return tonumber(string.sub(item, 1, colon - 1)), tonumber(string.sub(item, colon + 1)) end
    return tonumber(item), 1
  end

  local function item(t, count)
    return count == 1 and int(t) or int(t) .. ':' .. int(count)
  end

  local function load(l, level, number)
    local packed = redis.call('HGET', l.own .. '${tree}', level .. ':' .. int(number))
    if not packed then return nil end
    local node = cmsgpack.unpack(packed)
    for i = 3, #node, 2 do node[i] = node[i] + node[1] end
    return node
  end

  local function store(l, level, number, node)
    local first = node[1]
    for i = 3, #node, 2 do node[i] = node[i] - first end
    redis.call('HSET', l.own .. '${tree}', level .. ':' .. int(number), cmsgpack.pack(node))
    for i = 3, #node, 2 do node[i] = node[i] + first end
  end

  -- Returns the number of the first part of a node.
  local function parts_from(l, level, number)
    if level == TOP then return math.floor(l.first / SPREAD ^ (TOP - 1)) end
    return number * SPREAD
  end

  -- Goes down the tree to the last part that begins at `t` or before. Returns the sum of all permits up to `t`, the number
  -- of the block with the last of them, and the path: a {level, number, node, index} for each level, from the top to the
  -- block.
  local function by_time(l, t)
    local sum, number, way = 0, 0, {}
    for level = TOP, 0, -1 do
      local node = load(l, level, number)
      -- The node does not exist: it was dropped because all of it is before `since`, or its sum is 0.
      if not node then
        local last = way[#way]
        if last then sum = sum + last[3][last[4] + 1] end
        return sum, number * SPREAD ^ level, way
      end
      local at = 1
      if node[1] > t then return sum, number * SPREAD ^ level, way end
      while node[at + 2] and node[at + 2] <= t do
        sum, at = sum + node[at + 1], at + 2
      end
      way[#way + 1] = {level, number, node, at}
      if level == 0 then return sum + node[at + 1], number, way end
      number = parts_from(l, level, number) + (at - 1) / 2
    end
  end

  -- Returns the time of the charge with which the permits in the tree, from its beginning, reach `sum`.
  local function by_sum(l, sum)
    local number = 0
    for level = TOP, 0, -1 do
      local node, at = load(l, level, number), 1
      while node and node[at] and node[at + 1] < sum do
        sum, at = sum - node[at + 1], at + 2
      end
      if not (node and node[at]) then error('the log of a limit is shorter than its count: reset the key') end
      if level == 0 then return node[at] end
      number = parts_from(l, level, number) + (at - 1) / 2
    end
  end

  -- Moves the oldest times of the list into a block.
  local function seal(l)
    local items = redis.call('LRANGE', l.own, 0, SPREAD - 1)
    redis.call('LTRIM', l.own, SPREAD, -1)
    local block, sum, number = {}, 0, l.blocks
    for i = 1, #items do
      local t, count = parse(items[i])
      block[2 * i - 1], block[2 * i], sum = t, count, sum + count
    end
    store(l, 0, number, block)
    local new = true
    for level = 1, TOP do
      local index = new and number - parts_from(l, level, math.floor(number / SPREAD))
      number = level == TOP and 0 or math.floor(number / SPREAD)
      local node = load(l, level, number)
      local there = node ~= nil
      node = node or {}
      if new then
        node[2 * index + 1], node[2 * index + 2] = block[1], sum
      else
        node[#node] = node[#node] + sum
      end
      store(l, level, number, node)
      new = not there
    end
    l.blocks, l.old, l.total = l.blocks + 1, l.old + sum, l.total - sum
  end

  -- Removes some of the blocks before `first`, and nodes whose blocks were all removed. Does not change the sums in other
  -- nodes: `old` and `over` both contain the ended permits, so their difference is right.
  local function drop(l, first)
    local fields, from = {}, l.first
    l.first = math.max(from, math.min(first, from + SPREAD / 2))
    for number = from, l.first - 1 do fields[#fields + 1] = '0:' .. int(number) end
    if #fields == 0 then return end
    local top = load(l, TOP, 0)
    for level = 1, TOP - 1 do
      local number = math.floor(from / SPREAD ^ level)
      if math.floor(l.first / SPREAD ^ level) > number then
        fields[#fields + 1] = level .. ':' .. int(number)
        if level == TOP - 1 then
          l.old, l.over = l.old - top[2], l.over - top[2]
          table.remove(top, 1)
          table.remove(top, 1)
          store(l, TOP, 0, top)
        end
      end
    end
    redis.call('HDEL', l.own .. '${tree}', unpack(fields))
  end

  function log.initial(l)
    l.base, l.total, l.live, l.ended, l.gone, l.fresh = l.now, 0, 0, 0, 0, true
    l.old, l.blocks, l.first, l.since, l.over, l.keep_from = 0, 0, 0, -1, 0, 0
  end

  function log.use_stored_params(l, e) l.p[1] = e[5] end

  -- Counts the charges that have ended. Does not remove them, because a refusal or a peek changes nothing.
  function log.resolve(l, e)
    l.base, l.total, l.old = e[6] - l.shift, e[7], e[8] or 0
    l.blocks, l.first, l.since = e[9] or 0, e[10] or 0, e[11] or -1
    -- Charges that have ended under the old period do not count again under a longer one.
    if e[5] ~= l.p[1] then l.since = math.max(l.since, l.changed - l.base - e[5]) end
    l.cutoff = math.max(l.since, l.now - l.base - l.p[1])
    -- The server may have evicted the list or the tree.
    if l.old > 0 and redis.call('EXISTS', l.own .. '${tree}') == 0 then l.old, l.blocks, l.first = 0, 0, 0 end
    -- In the list: count the times, and the permits, that have ended.
    l.ended, l.gone = 0, 0
    local size, more = 1, l.total > 0
    while more do
      local items = redis.call('LRANGE', l.own, l.ended, l.ended + size - 1)
      if #items == 0 and l.ended == 0 then l.total = 0 end
      more = #items == size
      for i = 1, #items do
        local t, count = parse(items[i])
        if t > l.cutoff then more = false break end
        l.ended, l.gone = l.ended + 1, l.gone + count
      end
      size = 64
    end
    -- In the tree: if an item of the list has ended, the whole tree has ended. Otherwise the charges up to the cutoff have.
    l.over, l.keep_from = l.old, l.blocks
    if l.ended == 0 and l.old > 0 then l.over, l.keep_from = by_time(l, l.cutoff) end
    l.live = l.total - l.gone + l.old - l.over
  end

  function log.check(l)
    local capacity = l.p[6]
    if l.cost > capacity then l.retry = NEVER return end
    local need = l.live + l.cost - capacity
    if need <= 0 then l.ok = true return end
    local t
    if l.old - l.over >= need then
      t = by_sum(l, l.over + need)
    else
      need = need - (l.old - l.over)
      local at = l.ended
      while need > 0 do
        local items = redis.call('LRANGE', l.own, at, at + 63)
        if #items == 0 then error('the log of a limit is shorter than its count: reset the key') end
        for i = 1, #items do
          local count
          t, count = parse(items[i])
          need = need - count
          if need <= 0 then break end
        end
        at = at + #items
      end
    end
    l.retry = t + l.base + l.p[1] - l.now
  end

  local function forget(l) redis.call('UNLINK', l.own, l.own .. '${tree}') end

  local function keep_tree(l) redis.call('HSET', l.own .. '${tree}', '', '') end

  local function trim(l)
    if l.fresh then forget(l) l.fresh = false end
    if l.ended > 0 then
      redis.call('LTRIM', l.own, l.ended, -1)
      l.total, l.ended, l.gone = l.total - l.gone, 0, 0
    end
    if l.blocks > 0 and l.over == l.old then
      redis.call('UNLINK', l.own .. '${tree}')
      keep_tree(l)
      l.old, l.over, l.blocks, l.first, l.keep_from = 0, 0, 0, 0, 0
    end
    drop(l, l.keep_from)
    l.since = math.max(l.since, l.now - l.base - l.p[1])
  end

  function log.charge(l)
    trim(l)
    local t, count = l.now - l.base, l.cost
    if l.now == l.last and l.total > 0 then
      local tail, many = parse(redis.call('LINDEX', l.own, -1))
      if tail == t then
        redis.call('RPOP', l.own)
        count = count + many
      end
    end
    l.live, l.total = l.live + l.cost, l.total + l.cost
    local size = redis.call('RPUSH', l.own, item(t, count))
    if size == 1 then keep_tree(l) end
    if size >= 2 * SPREAD then seal(l) end
  end

  -- Gives back up to `left` permits of the charge at `t` in the tree. Returns how many.
  local function give_back(l, t, left)
    local _, _, way = by_time(l, t)
    local last = way[#way]
    if not last or last[1] > 0 or last[3][last[4]] ~= t then return 0 end
    local given = math.min(left, last[3][last[4] + 1])
    for i = #way, 1, -1 do
      local level, number, node, at = unpack(way[i])
      node[at + 1] = node[at + 1] - given
      if level == 0 and node[at + 1] == 0 then
        table.remove(node, at)
        table.remove(node, at)
      end
      local sum = 0
      for j = 2, #node, 2 do sum = sum + node[j] end
      -- Keep an empty node if blocks can still be added to it.
      if sum == 0 and level < TOP and (number + 1) * SPREAD ^ level <= l.blocks then
        redis.call('HDEL', l.own .. '${tree}', level .. ':' .. int(number))
      else
        store(l, level, number, node)
      end
    end
    l.old, l.live = l.old - given, l.live - given
    return given
  end

  function log.refund(l)
    -- Do not remove ended charges: they count again if the clock steps back before the next charge.
    local cost = math.min(l.cost, l.live)
    local left, wanted = cost, l.charged_at > 0 and l.charged_at - l.base
    local items = l.total > l.gone and redis.call('LRANGE', l.own, l.ended, -1) or {}
    for i = #items, 1, -1 do
      local t, count = parse(items[i])
      if left == 0 or wanted and t < wanted then break end
      if not wanted or t == wanted then
        local given, at = math.min(left, count), l.ended + i - 1
        if given < count then
          redis.call('LSET', l.own, at, item(t, count - given))
        else
          redis.call('LSET', l.own, at, '-')
          redis.call('LREM', l.own, -1, '-')
        end
        left, l.live, l.total = left - given, l.live - given, l.total - given
      end
    end
    while left > 0 and l.old > l.over do
      local t = wanted or by_sum(l, l.old)
      local given = t > l.cutoff and give_back(l, t, left) or 0
      left = left - given
      if wanted or given == 0 then break end
    end
    return left < cost
  end

  function log.standing(l)
    local reset = 0
    if l.live > 0 then
      local newest
      if l.total > l.gone then newest = parse(redis.call('LINDEX', l.own, -1)) else newest = by_sum(l, l.old) end
      reset = newest + l.base + l.p[1] - l.now
    end
    return math.max(l.p[6] - l.live, 0), reset
  end

  function log.entry(l, last)
    if l.fresh then trim(l) end
    local entry = {l.name, l.code, 0, last, l.p[1], l.base, l.total, l.old, l.blocks, l.first, l.since}
    return entry, l.p[1] + math.max(l.now - last, 0)
  end

  function log.keep(l, ttl)
    for _, key in ipairs({l.own, l.own .. '${tree}'}) do
      if ttl then redis.call('PEXPIRE', key, ttl) else redis.call('PERSIST', key) end
    end
  end

  log.reset = forget

  A[8] = log
end
