-- sliding_window (7): a window of N buckets, as in LeapArray of Alibaba's Sentinel. A bucket has the permits that were
-- spent in a time of the length `width` (µs). The bucket for the time t has the index floor(t / width). When a new
-- bucket begins, the oldest bucket leaves the window. The bucket before the window, number N+1, is partly outside and
-- partly inside. If `weighted` is 1, its share that is inside is counted. Otherwise this bucket is not counted.
-- Entry: name, algorithm, expiry, last, width, index of the newest bucket, counts of N+1 buckets, the newest first.
-- Params: width, N, weighted (1 or 0), -, -, capacity.
-- Fields of a limit `l`: `counts` and `newest` are the counts now and the index of the newest bucket. `stored_counts`
-- and `stored_newest` are the same at the time of the last charge.
do
  local sliding = {}

  function sliding.initial(l)
    local counts = {}
    for i = 1, l.params[2] + 1 do counts[i] = 0 end
    l.counts, l.newest = counts, math.floor(l.now / l.params[1])
    l.stored_counts, l.stored_newest = counts, l.newest
  end

  -- Returns the counts after the newest bucket has changed from the index `from` to the index `newest`.
  local function slide(counts, from, newest, size)
    if newest <= from then return counts end
    local moved = {}
    for i = 1, size do moved[i] = counts[i - (newest - from)] or 0 end
    return moved
  end

  function sliding.use_stored_params(l, entry) l.params[1], l.params[2] = entry[5], #entry[7] - 1 end

  function sliding.resolve(l, entry)
    local width, all_buckets = l.params[1], l.params[2] + 1
    local counts, newest = entry[7], entry[6]
    if l.shift > 0 then newest = math.floor(l.now / entry[5]) end
    if entry[5] ~= width or #counts ~= all_buckets then
      -- The width or the number of buckets has changed. Add each old count to the new bucket that contains the start
      -- of the old bucket. If this new bucket is outside of the window, add the count to the oldest bucket inside.
      local old_newest = math.floor(l.changed / entry[5])
      counts = slide(counts, newest, old_newest, #counts)
      local moved, new_newest = {}, math.floor(l.changed / width)
      for i = 1, all_buckets do moved[i] = 0 end
      for i = 1, #counts - (l.params[3] == 1 and 0 or 1) do
        local position = new_newest - math.floor((old_newest - i + 1) * entry[5] / width) + 1
        position = math.max(1, math.min(position, all_buckets - 1))
        moved[position] = moved[position] + counts[i]
      end
      counts, newest = moved, new_newest
    end
    l.stored_counts, l.stored_newest = counts, newest
    l.newest = math.max(newest, math.floor(l.now / width))
    l.counts = slide(counts, newest, l.newest, all_buckets)
  end

  -- Returns the number of permits in the window. The share of the bucket that is partly inside is rounded up.
  local function spent(l)
    local sum, counts, bucket_count = 0, l.counts, l.params[2]
    for i = 1, bucket_count do sum = sum + counts[i] end
    local leaving = counts[bucket_count + 1]
    if l.params[3] == 1 and leaving > 0 then
      local whole, part = muldiv(leaving, l.params[1] - l.now % l.params[1], l.params[1])
      return sum + whole + (part > 0 and 1 or 0)
    end
    return sum
  end

  function sliding.check(l)
    local width, bucket_count, weighted, capacity = l.params[1], l.params[2], l.params[3], l.params[6]
    if l.cost > capacity then l.retry = NEVER return end
    if spent(l) + l.cost <= capacity then l.ok = true return end
    local counts, room = l.counts, capacity - l.cost
    local inside = 0
    for i = 1, bucket_count do inside = inside + counts[i] end
    -- Find the first moment at which the cost fits. `ahead` is the number of buckets by which the window will have
    -- moved. Then `inside` is the sum of the buckets that are fully inside, and `leaving` is the count of the bucket
    -- that is partly inside.
    for ahead = 0, bucket_count + 1 do
      if ahead > 0 then inside = inside - (counts[bucket_count - ahead + 1] or 0) end
      local leaving = weighted == 1 and counts[bucket_count + 1 - ahead] or 0
      if inside <= room then
        local offset = 0
        if inside + leaving > room then
          local whole, part = muldiv(width, leaving - (room - inside), leaving)
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
    local left, counts, counted = l.cost, l.counts, l.params[2] + l.params[3]
    local first, last = 1, counted
    if l.charged_at > 0 then
      first = l.newest - math.floor(l.charged_at / l.params[1]) + 1
      last = math.min(first, counted)
    end
    for i = math.max(first, 1), last do
      local amount, stored_position = math.min(left, counts[i]), i - (l.newest - l.stored_newest)
      counts[i], left = counts[i] - amount, left - amount
      -- Also change the counts that will be stored. Their buckets are still those of the last charge, because the
      -- clock may step back before the next charge.
      if l.stored_counts ~= counts and stored_position > 0 then
        l.stored_counts[stored_position] = l.stored_counts[stored_position] - amount
      end
    end
    return left < l.cost
  end

  function sliding.standing(l)
    local bucket_count = l.params[2]
    local reset = 0
    for i = 1, bucket_count + l.params[3] do
      if l.counts[i] > 0 then
        reset = (l.newest - i + 1 + bucket_count + l.params[3]) * l.params[1] - l.now
        break
      end
    end
    return math.max(l.params[6] - spent(l), 0), reset
  end

  function sliding.entry(l, last)
    if last == l.now then l.stored_counts, l.stored_newest = l.counts, l.newest end
    return {l.name, l.code, 0, last, l.params[1], l.stored_newest, l.stored_counts}, (l.params[2] + 1) * l.params[1]
  end

  ALGORITHMS[7] = sliding
end
