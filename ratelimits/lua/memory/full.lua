-- Loaded at the beginning of a script that must also write if the server's memory is full. (While the server is full,
-- decide.lua does the same.)
--
-- A server that has reached `maxmemory` refuses each command that may need more memory, if it is the first write of a
-- script. After any other write it refuses nothing, because it cannot undo what a script has written. PERSIST needs no
-- memory, so it is never refused. It changes nothing: KEYS[1] is a Redis key without a time to live.
redis.call('PERSIST', KEYS[1])
