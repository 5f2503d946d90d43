-- sliding_window (7): a window of N buckets. With time it moves on by one bucket (like LeapArray of Alibaba's Sentinel).
-- Entry: name, algorithm, expiry, last, width (µs), newest index, counts of N+1 buckets, the newest first. Bucket N+1 is
-- partly outside of the window. Only `weighted` counts it, by the share that is still inside.
-- Params: width, N, weighted, -, -, capacity. The bucket at the time t has the index floor(t / width).
do
  local sliding = {}

  function sliding.initial(l)
    local counts = {}
    for i = 1, l.p[2] + 1 do counts[i] = 0 end
    l.counts, l.newest = counts, math.floor(l.now / l.p[1])
    l.stored, l.from = counts, l.newest
  end

  -- Returns the counts after the window has moved on from bucket `from` to bucket `newest`.
  local function slide(counts, from, newest, size)
    if newest <= from then return counts end
    local out = {}
    for i = 1, size do out[i] = counts[i - (newest - from)] or 0 end
    return out
  end

  function sliding.use_stored_params(l, e) l.p[1], l.p[2] = e[5], #e[7] - 1 end

  function sliding.resolve(l, e)
    local width, size = l.p[1], l.p[2] + 1
    local counts, newest = e[7], e[6]
    if l.shift > 0 then newest = math.floor(l.now / e[5]) end
    if e[5] ~= width or #counts ~= size then
      -- The buckets have another size now. Move each count to the new bucket in which its old bucket began. If that one is
      -- outside of the window, move the count to the oldest bucket.
      local at = math.floor(l.changed / e[5])
      counts = slide(counts, newest, at, #counts)
      local moved, latest = {}, math.floor(l.changed / width)
      for i = 1, size do moved[i] = 0 end
      for i = 1, #counts - (l.p[3] == 1 and 0 or 1) do
        local index = latest - math.floor((at - i + 1) * e[5] / width) + 1
        index = math.max(1, math.min(index, size - 1))
        moved[index] = moved[index] + counts[i]
      end
      counts, newest = moved, latest
    end
    l.stored, l.from = counts, newest
    l.newest = math.max(newest, math.floor(l.now / width))
    l.counts = slide(counts, newest, l.newest, size)
  end

  -- Returns the permits that count now. The share of the last bucket is rounded up.
  local function spent(l)
    local sum, counts, size = 0, l.counts, l.p[2]
    for i = 1, size do sum = sum + counts[i] end
    local leaving = counts[size + 1]
    if l.p[3] == 1 and leaving > 0 then
      local whole, part = muldiv(leaving, l.p[1] - l.now % l.p[1], l.p[1])
      return sum + whole + (part > 0 and 1 or 0)
    end
    return sum
  end

  function sliding.check(l)
    local width, size, weighted, capacity = l.p[1], l.p[2], l.p[3], l.p[6]
    if l.cost > capacity then l.retry = NEVER return end
    if spent(l) + l.cost <= capacity then l.ok = true return end
    local counts, room = l.counts, capacity - l.cost
    local full = 0
    for i = 1, size do full = full + counts[i] end
    -- Look at each position that the window will have: `full` is the sum of the buckets inside, `leaving` of the one
    -- partly inside.
    for ahead = 0, size + 1 do
      if ahead > 0 then full = full - (counts[size - ahead + 1] or 0) end
      local leaving = weighted == 1 and counts[size + 1 - ahead] or 0
      if full <= room then
        local offset = 0
        if full + leaving > room then
          local whole, part = muldiv(width, leaving - (room - full), leaving)
          offset = part > 0 and whole + 1 or whole
        end
        l.retry = (l.newest + ahead) * width + offset - l.now
        return
      end
    end
  end

  function sliding.charge(l)
    l.counts[1] = l.counts[1] + l.cost
  end

  function sliding.refund(l)
    local left, counts, size = l.cost, l.counts, l.p[2] + l.p[3]
    local first, last = 1, size
    if l.charged_at > 0 then
      first = l.newest - math.floor(l.charged_at / l.p[1]) + 1
      last = math.min(first, size)
    end
    for i = math.max(first, 1), last do
      local given, index = math.min(left, counts[i]), i - (l.newest - l.from)
      counts[i], left = counts[i] - given, left - given
      -- Change the stored counts too. They move on only with the next charge, since the clock may step back before.
      if l.stored ~= counts and index > 0 then l.stored[index] = l.stored[index] - given end
    end
    return left < l.cost
  end

  function sliding.standing(l)
    local size = l.p[2]
    local reset = 0
    for i = 1, size + l.p[3] do
      if l.counts[i] > 0 then
        reset = (l.newest - i + 1 + size + l.p[3]) * l.p[1] - l.now
        break
      end
    end
    return math.max(l.p[6] - spent(l), 0), reset
  end

  function sliding.entry(l, last)
    if last == l.now then l.stored, l.from = l.counts, l.newest end
    return {l.name, l.code, 0, last, l.p[1], l.from, l.stored}, (l.p[2] + 1) * l.p[1]
  end

  A[7] = sliding
end
