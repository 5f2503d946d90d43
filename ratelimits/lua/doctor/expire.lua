-- The end of a script that `ratelimits_doctor` sends (doctor/scratch.py): gives the keys of the shard a time to live in
-- the step that writes them. So they go away even if the doctor is killed. `reply` is the reply of the app's script.
-- (A state can have a long time to live of its own: it lasts as long as its limit.)
local prefix = string.match(KEYS[1], '^.-}:')
for _, name in ipairs({'${head}', '${meta}', '${open}', '${sealed}', '${receipts}'}) do
  redis.pcall('PEXPIRE', prefix .. name, ${ttl})
end
for _, key in ipairs(KEYS) do
  redis.pcall('PEXPIRE', key, ${ttl})
end
for _, id in ipairs(redis.pcall('LRANGE', prefix .. '${sealed}', 0, -1)) do
  redis.pcall('PEXPIRE', prefix .. '${batch}' .. id, ${ttl})
end
return reply
