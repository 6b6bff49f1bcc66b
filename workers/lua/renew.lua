-- uses moves.lua
-- Renew leases. A lease that lapsed is renewed too, as long as nobody else claimed the rollout.
-- KEYS: job records (and those of moves.lua)
-- ARGV: 1 lease (ms), then for each record: rollout id, attempt
-- Returns, for each record in order: 1 renewed, 0 lost, 2 renewed and its cancellation was asked for. An attempt that has
-- ended its rollout a moment ago has lost nothing.
local lease = clock() + ARGV[1]
local answers = {}
for i = 1, #KEYS do
  local id, attempt = ARGV[2 * i], ARGV[2 * i + 1]
  local record = redis.call('HMGET', KEYS[i], 'state', 'attempt', 'cancel', 'queue')
  if record[1] == 'running' and record[2] == attempt then
    redis.call('ZADD', queue_of(record[4]).running, lease, id)
    answers[i] = record[3] and 2 or 1
  elseif record[1] == 'done' and record[2] == attempt then
    answers[i] = 1
  else
    answers[i] = 0
  end
end
return answers
