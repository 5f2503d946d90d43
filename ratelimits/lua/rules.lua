-- Functions that read the rule of a limit: the end of ARGV[4] has '<dc22' (30 bytes) for each limit.

-- Returns the moment from which the limit's params hold: at the earliest the last charge, at the latest the decision.
--@rarely
local function moment_of_change(number, last, at)
  local holds_from = struct.unpack('<d', ARGV[4], rules_at + 30 * number)
  if holds_from == 0 or holds_from > at then return at end
  return holds_from > last and holds_from or last
end
