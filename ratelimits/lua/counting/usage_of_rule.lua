-- Names the counters of a rule that refuses, or that would refuse. Loaded after usage.lua.

-- `counter` is the name of a counter of admitted requests. Returns the same name with another kind, and with the rule of
-- limit `number`. The kind is 'd' for denied requests, and 's' for requests that a shadow rule would have refused.
local function counter_of_rule(kind, counter, number)
  -- rules.lua explains these bytes of ARGV[4]. `rule` is the text "rule|version".
  local _, rule = struct.unpack('<ds', ARGV[4], rules_at + 30 * number)
  -- `where` is "|bin|meter|", and `who` is "|account|key".
  local where, who = string.match(counter, '^a(|%d+|[^|]*|)%d+|%d+(|.*)$')
  return kind .. where .. rule .. who
end
