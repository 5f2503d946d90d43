-- fixed_window (5) and calendar_window (6): the state is a window and the number of permits spent in this window.
-- Entry: name, algorithm, expiry, last, start, length, count of permits.
-- Params of fixed_window: period; 1 if the first request opens the window, otherwise 0; three zeros; capacity.
-- Params of calendar_window: starts of four periods (the previous, the current and the next two); 0; capacity.
do
  local WINDOW = '<i7i7I7I6' -- the format of the payload; fast.lua also contains it

  local window = {}

  function window.pack(entry) return struct.pack(WINDOW, unpack(entry, 4, 7)) end

  function window.unpack(raw, at) return struct.unpack(WINDOW, raw, at) end

  -- Returns start and length of the window that contains the moment `t`. Returns nothing if `t` is not in one of the
  -- three periods of the params.
  local function around(l, t)
    local params = l.params
    if l.code == 5 then return t - t % params[1], params[1] end
    for i = 1, 3 do
      if t >= params[i] and t < params[i + 1] then return params[i], params[i + 1] - params[i] end
    end
  end

  function window.initial(l)
    l.count = 0
    if l.code == 5 and l.params[2] == 1 then
      l.start, l.length = l.now, 0
    else
      l.start, l.length = around(l, l.now)
      if not l.start then l.stale = true end
    end
  end

  -- Returns whether the rule has a window with this start and length.
  local function aligned(l, start, length)
    local params = l.params
    if l.code == 5 then return length == params[1] and start % length == 0 end
    for i = 1, 3 do
      if params[i] == start then return params[i + 1] - start == length end
    end
  end

  function window.use_stored_params(l) l.keeps_window = l.shift == 0 end

  function window.resolve(l, entry)
    local start, length, period = entry[5], entry[6], l.params[1]
    l.count = entry[7]
    if l.keeps_window then
      -- Keep the stored window as it is.
    elseif l.code == 5 and l.params[2] == 1 then
      start = start - l.shift
      if length ~= period and length > 0 then
        -- The rule's period has changed. An open window keeps its count and gets the new period. If the window would
        -- then have ended before the change, it starts at the moment of the change.
        if l.changed >= start + length or l.count == 0 then length = 0 end
        if length > 0 and l.changed >= start + period then start = l.changed end
        length = length > 0 and period or 0
      end
    elseif l.shift > 0 then
      start, length = around(l, l.now)
    elseif not aligned(l, start, length) then
      if l.changed < start + length then start, length = around(l, l.changed) else start = nil end
    end
    if not start or l.now >= start + length then return window.initial(l) end
    l.start, l.length = start, length
  end

  function window.check(l)
    local capacity = l.params[6]
    if l.cost > capacity then
      l.retry = NEVER
    elseif l.count + l.cost <= capacity then
      l.ok = true
    else
      l.retry = l.start + l.length - l.now
    end
  end

  function window.charge(l)
    if l.length == 0 then l.start, l.length = l.now, l.params[1] end
    l.count = math.min(l.count + l.cost, 140737488355328) -- 2^47, which fits into the six bytes of the payload
  end

  function window.refund(l)
    -- Give nothing back if the charge was in an earlier window.
    if l.count == 0 or l.charged_at > 0 and l.charged_at < l.start then return false end
    l.count = math.max(l.count - l.cost, 0)
    return true
  end

  -- Lets the window have counted at least `cost` permits.
  function window.restore(l) l.count = math.max(l.count, l.cost) end

  function window.standing(l)
    return math.max(l.params[6] - l.count, 0), l.count > 0 and l.start + l.length - l.now or 0
  end

  function window.entry(l, last)
    -- Do not store an empty window that no request has opened: the rule may change to windows that the first request
    -- opens.
    if l.count == 0 and l.code == 5 and l.params[2] == 0 then return {l.name, l.code, 0, last, last, 0, 0}, 0 end
    return {l.name, l.code, 0, last, l.start, l.length, l.count}, l.start + l.length - l.now
  end

  ALGORITHMS[5], ALGORITHMS[6] = window, window
end
