-- sliding_window (code 7): a window of N buckets, as in LeapArray of Alibaba's Sentinel. A bucket has the permits that
-- were spent in a time of the length `width` (µs). The bucket for the time t has the index floor(t / width). When a new
-- bucket begins, the oldest bucket leaves the window. The newest bucket is not over yet, so the N buckets cover less
-- than N * width µs. The rest of this time lies in bucket N+1, which has just left the window. If `weighted` is 1, the
-- permits of bucket N+1 are counted in proportion to this part of it. If `weighted` is 0, bucket N+1 is not counted.
-- "--@params" names the params of the limit ("-": not used here), and "--@record" the fields of its record, each after
-- its type: I7 is an unsigned integer of 7 bytes, and c# is a text of any length.
--@params * width buckets weighted - - capacity
--@record counts I7 last I7 stored_width I7 stored_newest I8 stored_sum c# stored_counts
-- The record has the moment of the last charge, the width, and the index of the newest bucket at that moment. Then it
-- has the sum of N buckets, and the counts of N+1 buckets, the newest first, six bytes each. With the sum, a decision
-- need not add up the counts until a new bucket begins.
-- `counts` are the counts at the present moment, in the form of `stored_counts`. `newest` is the index of the newest
-- bucket, and `sum` is the number of permits in the N buckets that are fully inside.

-- Returns the count of a bucket; 1 is the newest. (The parentheses drop the second result of `unpack`, a position.)
local function count_at(counts, number) return (struct.unpack('<I6', counts, 6 * number - 5)) end

-- Returns the counts with the count of one bucket replaced. A count is cut to 2^47, so that it fits into six bytes.
local function with_count(counts, number, count)
  local bytes = struct.pack('<I6', count < 140737488355328 and count or 140737488355328)
  return string.sub(counts, 1, 6 * number - 6) .. bytes .. string.sub(counts, 6 * number + 1)
end

-- Returns the sum of the first `number` counts.
local function sum_of(counts, number)
  local sum = 0
  for i = 1, number do sum = sum + struct.unpack('<I6', counts, 6 * i - 5) end
  return sum
end

-- Returns the counts after `steps` new buckets have begun.
local function slide(counts, steps)
  if steps <= 0 then return counts end
  local zeros = math.min(6 * steps, #counts)
  return string.rep('\0', zeros) .. string.sub(counts, 1, #counts - zeros)
end

-- Returns the counts for buckets of another width, or for more or fewer buckets. Adds each old count to the new bucket
-- that contains the start of the old bucket. If this new bucket is outside of the window, adds the count to the oldest
-- bucket inside.
--@rarely
local function rebucket(counts, old_newest, old_width, newest, width, buckets, weighted)
  local moved, packed = {}, {}
  for i = 1, buckets + 1 do moved[i] = 0 end
  -- If `weighted` is 0, bucket N+1 is not counted, so leave it out.
  for i = 1, #counts / 6 - (weighted == 1 and 0 or 1) do
    local position = newest - math.floor((old_newest - i + 1) * old_width / width) + 1
    position = math.max(1, math.min(position, buckets))
    moved[position] = moved[position] + count_at(counts, i)
  end
  for i = 1, buckets + 1 do packed[i] = struct.pack('<I6', math.min(moved[i], 140737488355328)) end
  return table.concat(packed)
end

-- Returns the share of the bucket that is partly inside, rounded up.
local function leaving_share(counts, width, buckets, at)
  local leaving = count_at(counts, buckets + 1)
  if leaving == 0 then return 0 end
  local whole, part = muldiv(leaving, width - at % width, width)
  return whole + (part > 0 and 1 or 0)
end

-- Returns the first moment at which at most `room` permits of earlier requests still count. Then the cost of this
-- request fits. `ahead` is the number of buckets by which the window has moved at this moment. `inside` is then the sum
-- of the buckets that are fully inside, and `leaving` is the count of the bucket that is partly inside.
local function moment_with_room(counts, sum, room, newest, width, buckets, weighted)
  local inside = sum
  for ahead = 0, buckets + 1 do
    if ahead > 0 and ahead <= buckets then inside = inside - count_at(counts, buckets - ahead + 1) end
    local leaving = weighted == 1 and ahead <= buckets and count_at(counts, buckets + 1 - ahead) or 0
    if inside <= room then
      local offset = 0
      if inside + leaving > room then
        -- leaving - (room - inside) of the `leaving` permits must have left: the same share of the bucket's time must
        -- have passed.
        local whole, part = muldiv(width, leaving - (room - inside), leaving)
        offset = part > 0 and whole + 1 or whole
      end
      return (newest + ahead) * width + offset
    end
  end
  error('the numbers of a state do not fit together: reset the key')
end

local sliding = {}

function sliding.initial(l)
  l.counts, l.newest, l.sum = string.rep('\0', 6 * l.buckets + 6), math.floor(at / l.width), 0
  l.stored_counts, l.stored_newest, l.stored_sum = l.counts, l.newest, 0
end

function sliding.stored_params(l)
  l.width, l.buckets = l.stored_width, #l.stored_counts / 6 - 1
end

function sliding.resolve(l)
  -- If the clock has stepped back, the newest bucket becomes the bucket of the present moment.
  if l.shift > 0 then l.stored_newest = math.floor(at / l.stored_width) end
  if l.stored_width ~= l.width or #l.stored_counts ~= 6 * l.buckets + 6 then
    local changed = rarely().moment_of_change(l.number, l.last, at)
    local old_newest, newest = math.floor(changed / l.stored_width), math.floor(changed / l.width)
    l.stored_counts = slide(l.stored_counts, old_newest - l.stored_newest)
    l.stored_counts = rarely().rebucket(l.stored_counts, old_newest, l.stored_width, newest, l.width, l.buckets, l.weighted)
    l.stored_newest, l.stored_sum = newest, sum_of(l.stored_counts, l.buckets)
  end
  l.newest = (at - at % l.width) / l.width
  if l.newest <= l.stored_newest then
    l.newest, l.counts, l.sum = l.stored_newest, l.stored_counts, l.stored_sum
  else
    l.counts = slide(l.stored_counts, l.newest - l.stored_newest)
    l.sum = sum_of(l.counts, l.buckets)
  end
end

function sliding.check(l)
  if l.cost > l.capacity then
    l.retry = NEVER
  else
    local spent = l.sum
    if l.weighted == 1 then spent = spent + leaving_share(l.counts, l.width, l.buckets, at) end
    if spent + l.cost <= l.capacity then
      l.ok = true
    else
      local room = l.capacity - l.cost
      l.retry = moment_with_room(l.counts, l.sum, room, l.newest, l.width, l.buckets, l.weighted) - at
    end
  end
end

function sliding.charge(l)
  local before = count_at(l.counts, 1)
  l.counts = with_count(l.counts, 1, before + l.cost)
  l.sum = l.sum + count_at(l.counts, 1) - before
end

function sliding.refund(l)
  local to_refund, counted_buckets = l.cost, l.buckets + l.weighted
  local first, last = 1, counted_buckets
  -- Take the permits out of the bucket of the charge, if this bucket is still counted. If the moment of the charge is
  -- not known, take them out of all buckets, the newest first.
  if charged_at > 0 then
    first = l.newest - math.floor(charged_at / l.width) + 1
    last = math.min(first, counted_buckets)
  end
  for i = math.max(first, 1), last do
    local count, stored_position = count_at(l.counts, i), i - (l.newest - l.stored_newest)
    local amount = math.min(to_refund, count)
    l.counts, to_refund = with_count(l.counts, i, count - amount), to_refund - amount
    if i <= l.buckets then l.sum = l.sum - amount end
    -- Also change the counts that will be stored. A refund does not store the buckets that have begun since the last
    -- charge. Otherwise old buckets would be lost, but they must count again if the clock steps back.
    if stored_position > 0 then
      if stored_position <= l.buckets then l.stored_sum = l.stored_sum - amount end
      l.stored_counts = with_count(l.stored_counts, stored_position, count_at(l.stored_counts, stored_position) - amount)
    end
  end
  l.undone = to_refund < l.cost
end

function sliding.standing(l)
  local spent = l.sum
  if l.weighted == 1 then spent = spent + leaving_share(l.counts, l.width, l.buckets, at) end
  l.remaining, l.reset = l.capacity - spent, 0
  if l.remaining < 0 then l.remaining = 0 end
  -- The first byte that is not 0 is in the newest bucket that is not empty.
  local byte = string.find(l.counts, '[^%z]')
  if byte then
    local number = (byte - 1 - (byte - 1) % 6) / 6 + 1
    if number <= l.buckets + l.weighted then
      l.reset = (l.newest - number + 1 + l.buckets + l.weighted) * l.width - at
    end
  end
end

function sliding.store(l)
  -- A charge has set `last` to `at`. Then the present counts are stored. A refund has changed the stored counts itself.
  if l.last == at then l.stored_counts, l.stored_newest, l.stored_sum = l.counts, l.newest, l.sum end
  l.stored_width, l.life = l.width, (l.buckets + 1) * l.width
end
