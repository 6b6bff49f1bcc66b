-- Send the wake-up messages of waiting rollouts; safe when two workers do it at once.
-- KEYS: 1 the set they wait in (delayed, or pending when their messages were lost), 2 pending set, 3 the queue's list,
--       4 the list that was judged, for "next": a rollout that was moved to another list is judged by that one
-- ARGV: 1 highest score at which one is sent, 2 score in the pending set with which its list's rollouts begin,
--       3 "any", or "next" and in 4 the message that was next in the list when it was judged ("" when it was empty),
--       5.. rollout id and message of each
-- Returns how many were sent: none when the list has moved, for then what was missing may have come back meanwhile.
if ARGV[3] == 'next' and (redis.call('LINDEX', KEYS[4], -1) or '') ~= ARGV[4] then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local sent = 0
for i = 5, #ARGV, 2 do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if score and tonumber(score) <= tonumber(ARGV[1]) then
    redis.call('ZREM', KEYS[1], ARGV[i])
    redis.call('ZADD', KEYS[2], ARGV[2] + now, ARGV[i])
    redis.call('LPUSH', KEYS[3], ARGV[i + 1])
    sent = sent + 1
  end
end
return sent
