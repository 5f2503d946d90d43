-- Deletes a sealed batch. Call this script after the batch was written to the database: to the ledger or to quarantine.
-- KEYS[1] the shard's `meta` key   ARGV[1] the batch's id
-- Returns 1 if the batch was still in the list `sealed`, otherwise 0. A second call for the same batch changes nothing.
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
redis.call('UNLINK', prefix .. '${batch}' .. ARGV[1])
return redis.call('LREM', prefix .. '${sealed}', 1, ARGV[1])
