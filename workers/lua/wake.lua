-- Send a waiting rollout's wake-up message once it has waited long enough; safe when two workers do it at once.
-- KEYS: 1 the set it waits in (delayed, or pending when its message seems lost), 2 pending set, 3 the queue's list
-- ARGV: 1 rollout id, 2 message, 3 how long past its score it must be (ms)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score or tonumber(score) + ARGV[3] > now then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('LPUSH', KEYS[3], ARGV[2])
return 1
