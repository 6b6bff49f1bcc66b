-- Send a waiting rollout's wake-up message; safe when two workers do it at once.
-- KEYS: 1 the set it waits in (delayed, or pending when its message was lost), 2 pending set, 3 the queue's list
-- ARGV: 1 rollout id, 2 message, 3 highest score at which it is sent,
--       4 score in the pending set with which its list's rollouts begin
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score or tonumber(score) > tonumber(ARGV[3]) then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[4] + now, ARGV[1])
redis.call('LPUSH', KEYS[3], ARGV[2])
return 1
