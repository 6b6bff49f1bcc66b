-- Cancel rollouts: end those that wait, and ask the workers of those that run to cancel them.
-- KEYS: 1 pending set, 2 delayed set, 3 stream of cancels, 4.. job records
--       (and, named by a record's own batch, the streams of the batches: ARGV 3 .. batch)
-- ARGV: 1 time to live of records and streams (s), 2 entries kept in the stream of cancels, 3 prefix of the batches'
--       streams, then the rollout ids
-- Returns for each rollout in order: "cancelled" (it waited), "requested" (it runs), "done" or "unknown" (nothing done).
local FIRST = 3
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i = 1, #KEYS - FIRST do
  local job, id = KEYS[FIRST + i], ARGV[FIRST + i]
  local record = redis.call('HMGET', job, 'state', 'batch')
  local state = record[1]
  if state == 'pending' then
    redis.call('HSET', job, 'state', 'done', 'outcome', 'cancelled', 'finished_ms', now)
    redis.call('EXPIRE', job, ARGV[1])
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
    local stream = ARGV[3] .. record[2]
    redis.call('XADD', stream, '*', 'id', id, 'outcome', 'cancelled')
    redis.call('EXPIRE', stream, ARGV[1])
    answers[i] = 'cancelled'
  elseif state == 'running' then
    -- The mark outlives a worker that restarts or misses the entry; the entry is what makes it quick.
    redis.call('HSET', job, 'cancel', 1)
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[2], '*', 'id', id)
    redis.call('EXPIRE', KEYS[3], ARGV[1])
    answers[i] = 'requested'
  else
    answers[i] = state or 'unknown'
  end
end
return answers
