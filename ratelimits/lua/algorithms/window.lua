-- fixed_window (code 5) and calendar_window (code 6): the state is a window and the number of permits spent in this
-- window. A length of 0 means that no window is open: the next charge opens one.
-- "--@params" names the params of an algorithm ("-": not used here), and "--@record" the fields of the record, each
-- after its type: I7 is an unsigned integer of 7 bytes, and i7 a signed one.
--@params fixed_window period first_hit - - - capacity
--@params calendar_window start_1 start_2 start_3 start_4 - capacity
--@record window i7 last i7 stored_start I7 stored_length I6 stored_count
-- Params of fixed_window: period; 1 if the first request opens the window, otherwise 0; capacity.
-- Params of calendar_window: starts of four periods (the previous, the current and the next two); capacity.
-- `l.keeps_window` is true if the stored window is used as it is. This is so if a receipt is settled (decide.lua calls
-- `stored_params` only then) and the clock has not stepped back.
-- `l.start` becomes nil if the stored window is of no use any more.
local window = {}

function window.stored_params(l)
  l.keeps_window = l.shift == 0
end

function window.resolve(l)
  l.start, l.length, l.count = l.stored_start, l.stored_length, l.stored_count
  if l.keeps_window then
    -- Keep the stored window as it is.
  elseif l.code == 5 then
    if l.first_hit == 1 then
      l.start = l.start - l.shift
      if l.length ~= l.period and l.length > 0 then
        -- The rule's period has changed. An open window keeps its count and gets the new period. If the new period,
        -- counted from the old start, ends before the change, the window starts at the moment of the change.
        local changed = rarely().moment_of_change(l.number, l.last, at)
        if changed >= l.start + l.length or l.count == 0 then
          l.length = 0 -- the window had ended before the change, or has no permits: no window is open
        else
          if changed >= l.start + l.period then l.start = changed end
          l.length = l.period
        end
      end
    elseif l.shift > 0 then
      l.start, l.length = at - at % l.period, l.period
    elseif l.length ~= l.period or l.start % l.length ~= 0 then
      -- The rule's period has changed. Or `first_hit` has changed: a first request opened the stored window, so its
      -- start is not a multiple of its length.
      local changed = rarely().moment_of_change(l.number, l.last, at)
      if changed < l.start + l.length then
        l.start, l.length = changed - changed % l.period, l.period
      else
        l.start = nil
      end
    end
  elseif l.shift > 0 or not (l.start == l.start_2 and l.length == l.start_3 - l.start_2) then
    -- The stored window is not the current period. Take the period that contains `moment`, which is
    --   the present moment if the clock has stepped back;
    --   otherwise the start of the stored window, if this window is the previous or the next period;
    --   otherwise the moment at which the rule was changed;
    --   nil if the stored window had ended before this change.
    local moment = at
    if l.shift == 0 then
      moment = rarely().moment_of_change(l.number, l.last, at)
      if l.start == l.start_1 and l.length == l.start_2 - l.start_1
        or l.start == l.start_3 and l.length == l.start_4 - l.start_3 then
        moment = l.start
      elseif moment >= l.start + l.length then
        moment = nil
      end
    end
    l.start = nil
    if moment and moment >= l.start_1 and moment < l.start_4 then
      l.start, l.length = l.start_1, l.start_2 - l.start_1
      if moment >= l.start_2 then l.start, l.length = l.start_2, l.start_3 - l.start_2 end
      if moment >= l.start_3 then l.start, l.length = l.start_3, l.start_4 - l.start_3 end
    end
  end
  l.starts_anew = not l.start or at >= l.start + l.length
end

function window.initial(l)
  l.count = 0
  if l.code == 6 then
    l.start, l.length = l.start_1, l.start_2 - l.start_1
    if at >= l.start_2 then l.start, l.length = l.start_2, l.start_3 - l.start_2 end
    if at >= l.start_3 then l.start, l.length = l.start_3, l.start_4 - l.start_3 end
    l.stale = at < l.start_1 or at >= l.start_4
  elseif l.first_hit == 1 then
    l.start, l.length = at, 0
  else
    l.start, l.length = at - at % l.period, l.period
  end
end

function window.check(l)
  if l.cost > l.capacity then
    l.retry = NEVER
  elseif l.count + l.cost <= l.capacity then
    l.ok = true
  else
    l.retry = l.start + l.length - at
  end
end

function window.charge(l)
  if l.length == 0 then l.start, l.length = at, l.period end
  l.count = l.count + l.cost
  if l.count > 140737488355328 then l.count = 140737488355328 end -- 2^47, which fits into six bytes
end

function window.refund(l)
  -- Give nothing back if the charge was in an earlier window.
  if l.count > 0 and not (charged_at > 0 and charged_at < l.start) then
    l.undone = true
    l.count = math.max(l.count - l.cost, 0)
  end
end

-- Raises the count of the window to `cost` permits, if the count is lower.
function window.restore(l)
  l.count = math.max(l.count, l.cost)
end

function window.standing(l)
  l.remaining, l.reset = l.capacity - l.count, 0
  if l.remaining < 0 then l.remaining = 0 end
  if l.count > 0 then l.reset = l.start + l.length - at end
end

function window.store(l)
  l.stored_start, l.stored_length, l.stored_count = l.start, l.length, l.count
  -- Store an empty window as one that is not open (length 0). If `first_hit` is changed to 1 later, the next request
  -- must open the window.
  if l.count == 0 and l.code == 5 and l.first_hit == 0 then l.stored_start, l.stored_length = l.last, 0 end
  l.life = l.stored_start + l.stored_length - at
end
