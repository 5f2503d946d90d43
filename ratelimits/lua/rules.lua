-- Reads the rule of a limit. The end of ARGV[4] has 30 bytes for each limit, '<dc22': the moment (µs) from which the
-- params hold, and the text "rule|version". The bytes of limit `number` (from 1) begin at rules_at + 30 * number.
-- engine/assemble sets `rules_at`.

-- Returns the moment from which the params of limit `number` hold. If it is 0, or after the moment of the decision
-- (`at`), returns `at`. If it is any other moment before the last charge (`last`), returns `last`.
--@rarely
local function moment_of_change(number, last, at)
  local holds_from = struct.unpack('<d', ARGV[4], rules_at + 30 * number)
  if holds_from == 0 or holds_from > at then return at end
  return holds_from > last and holds_from or last
end
