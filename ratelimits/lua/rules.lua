-- Functions that read the rule of a limit: the end of ARGV[4] has '<dI4I4' for each limit.

-- Returns the moment from which the limit's params hold: at the earliest the last charge, at the latest the decision.
--@rarely
local function moment_of_change(number, last, at)
  local holds_from = struct.unpack('<d', ARGV[4], rules_at + 16 * number)
  if holds_from == 0 or holds_from > at then return at end
  return holds_from > last and holds_from or last
end

-- Returns the name of a counter of another kind, for the rule of the limit at the position `number`. The kind is 'd'
-- for denied requests, and 's' for requests that a shadow rule would have refused. `counter` is the name of the counter
-- of admitted requests.
local function counter_of_rule(kind, counter, number)
  local _, rule, version = struct.unpack('<dI4I4', ARGV[4], rules_at + 16 * number)
  local where, who = string.match(counter, '^a(|%d+|%d+|[^|]*|)%d+|%d+(|.*)$')
  return kind .. where .. rule .. '|' .. version .. who -- both numbers are below 2^32, so no digit is lost
end
