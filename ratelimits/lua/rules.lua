-- Reads the rule of a limit. The end of ARGV[4] has '<dc22' (30 bytes) for each limit; engine/assemble sets `rules_at`.

-- Returns the moment from which the params of limit `number` hold. The moment is not before the last charge (`last`),
-- and not after the moment of the decision (`at`).
--@rarely
local function moment_of_change(number, last, at)
  local holds_from = struct.unpack('<d', ARGV[4], rules_at + 30 * number)
  if holds_from == 0 or holds_from > at then return at end
  return holds_from > last and holds_from or last
end
