-- Note what a named consumer is done with and what it is given next, in one step; nothing when it was taken over.
-- KEYS: 1 what the consumer has taken, 2 the ids that it has acknowledged (used when there is no position)
-- ARGV: 1 generation: the number of the opening that asks, 2 time to live (s), 3 id that is acknowledged, or "",
--       4 its position in the stream, or "", 5 id that is given out, or ""
-- Returns 1, or 0 when another process has opened it since. Sent twice, it does the same.
local generation = tonumber(redis.call('HGET', KEYS[1], 'generation') or 0)
if generation > tonumber(ARGV[1]) then return 0 end
-- A server that lost its data, or its last second, knows nothing of this opening.
if generation < tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'generation', ARGV[1]) end
if ARGV[3] ~= '' then
  if redis.call('HGET', KEYS[1], 'hand') == ARGV[3] then
    redis.call('HDEL', KEYS[1], 'hand')
    redis.call('HINCRBY', KEYS[1], 'delivered', 1)
  end
  if ARGV[4] ~= '' then
    redis.call('HSET', KEYS[1], 'position', ARGV[4])
  else
    redis.call('SADD', KEYS[2], ARGV[3])
    redis.call('EXPIRE', KEYS[2], ARGV[2])
  end
end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'hand', ARGV[5]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
