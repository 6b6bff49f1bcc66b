-- Renew leases. A lease that lapsed is renewed too, as long as nobody else claimed the rollout.
-- KEYS: 1 running set, 2.. job records
-- ARGV: 1 lease (ms), then for each record: rollout id, attempt
-- Returns, for each record in order: 1 renewed, 0 lost, 2 renewed and its cancellation was asked for. An attempt that has
-- ended its rollout a moment ago has lost nothing.
local time = redis.call('TIME')
local lease = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
local answers = {}
for i = 2, #KEYS do
  local id, attempt = ARGV[2 * i - 2], ARGV[2 * i - 1]
  local record = redis.call('HMGET', KEYS[i], 'state', 'attempt', 'cancel')
  if record[1] == 'running' and record[2] == attempt then
    redis.call('ZADD', KEYS[1], lease, id)
    answers[i - 1] = record[3] and 2 or 1
  elseif record[1] == 'done' and record[2] == attempt then
    answers[i - 1] = 1
  else
    answers[i - 1] = 0
  end
end
return answers
