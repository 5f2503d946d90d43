-- Writes a Redis key, so that the server has something to fsync.
-- KEYS[1] the key   ARGV[1] its time to live (ms)
-- If the server's memory is full, SET as the first write would be refused: see full.lua. Here PEXPIRE comes first.
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then redis.call('SET', KEYS[1], '1', 'PX', ARGV[1]) end
