-- fixed_window (5) and calendar_window (6): the state is a window and the number of permits spent in it.
-- Entry: name, algorithm, expiry, last, start, length, count.
-- Params of fixed_window: period; 1 if the first request opens the window. Params of calendar_window: starts of the
-- previous period, the current one and the next two. The sixth param of both is the capacity.
do
  local WINDOW = '<i7i7I7I6' -- fast.lua has this format too

  local window = {}

  function window.pack(entry) return struct.pack(WINDOW, unpack(entry, 4, 7)) end

  function window.unpack(raw, at) return struct.unpack(WINDOW, raw, at) end

  -- Returns start and length of the window that contains the moment t. Returns nothing if t is outside of the calendar's
  -- params.
  local function around(l, t)
    local p = l.p
    if l.code == 5 then return t - t % p[1], p[1] end
    for i = 1, 3 do
      if t >= p[i] and t < p[i + 1] then return p[i], p[i + 1] - p[i] end
    end
  end

  function window.initial(l)
    l.count = 0
    if l.code == 5 and l.p[2] == 1 then
      l.start, l.length = l.now, 0
    else
      l.start, l.length = around(l, l.now)
      if not l.start then l.stale = true end
    end
  end

  -- Returns whether a window with this start and length is one of the rule's windows.
  local function aligned(l, start, length)
    local p = l.p
    if l.code == 5 then return length == p[1] and start % length == 0 end
    for i = 1, 3 do
      if p[i] == start then return p[i + 1] - start == length end
    end
  end

  function window.use_stored_params(l) l.keeps_window = l.shift == 0 end

  function window.resolve(l, e)
    local start, length, period = e[5], e[6], l.p[1]
    l.count = e[7]
    if l.keeps_window then
      -- Keep the stored window as it is.
    elseif l.code == 5 and l.p[2] == 1 then
      start = start - l.shift
      if length ~= period and length > 0 then
        -- The rule's period has changed. An open window keeps its count. If it would have ended under the new period, it
        -- starts again at the moment of the change.
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
    local capacity = l.p[6]
    if l.cost > capacity then
      l.retry = NEVER
    elseif l.count + l.cost <= capacity then
      l.ok = true
    else
      l.retry = l.start + l.length - l.now
    end
  end

  function window.charge(l)
    if l.length == 0 then l.start, l.length = l.now, l.p[1] end
    l.count = math.min(l.count + l.cost, 140737488355328) -- the maximum of its six bytes
  end

  function window.refund(l)
    -- Give nothing back if the charge was in an earlier window.
    if l.count == 0 or l.charged_at > 0 and l.charged_at < l.start then return false end
    l.count = math.max(l.count - l.cost, 0)
    return true
  end

  function window.standing(l)
    return math.max(l.p[6] - l.count, 0), l.count > 0 and l.start + l.length - l.now or 0
  end

  function window.entry(l, last)
    -- Store no window if it is empty and not opened by a request: the rule may change to windows that the first request
    -- opens.
    if l.count == 0 and l.code == 5 and l.p[2] == 0 then return {l.name, l.code, 0, last, last, 0, 0}, 0 end
    return {l.name, l.code, 0, last, l.start, l.length, l.count}, l.start + l.length - l.now
  end

  A[5], A[6] = window, window
end
