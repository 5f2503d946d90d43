-- Forgets a batch that the ledger (or the quarantine) has.
-- KEYS[1] the shard's `meta` key   ARGV[1] the batch's id
-- Returns 1 if it was still listed, else 0; a second call does nothing.
local prefix = string.sub(KEYS[1], 1, -1 - #'${meta}')
redis.call('UNLINK', prefix .. '${batch}' .. ARGV[1])
return redis.call('LREM', prefix .. '${sealed}', 1, ARGV[1])
