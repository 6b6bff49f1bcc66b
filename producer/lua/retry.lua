-- Run rollouts again that have ended: done -> pending, with all attempts before them, and send their wake-up messages. One
-- that waits for a delay to pass is sent now.
-- KEYS: 1 pending set, 2 delayed set, then the queue's lists, then (after the first ARGV 2) for each rollout its record and
--       its result
--       (and, named by a record's own batch, the streams of the batches: ARGV 3 .. batch)
-- ARGV: 1 time to live of records (s), 2 number of KEYS before the records, 3 prefix of the batches' streams, then for
--       each rollout: id, index in KEYS of its list, score in the pending set with which its list's rollouts begin, message
-- Returns for each rollout in order: "retried", or "pending", "running" or "unknown" (nothing done).
local BEFORE, FIRST, WIDTH = tonumber(ARGV[2]), 4, 4
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i = 1, (#KEYS - BEFORE) / 2 do
  local at = FIRST + (i - 1) * WIDTH
  local job, result, id = KEYS[BEFORE + 2 * i - 1], KEYS[BEFORE + 2 * i], ARGV[at]
  local record = redis.call('HMGET', job, 'state', 'batch', 'finished_ms')
  local delayed = record[1] == 'pending' and redis.call('ZREM', KEYS[2], id) == 1
  if record[1] == 'done' then
    -- Its end was announced in the same millisecond by the same clock, or in the next. Who reads the batch from its
    -- beginning must not find an end without a result.
    local stream, ended = ARGV[3] .. record[2], tonumber(record[3] or 0)
    local range = {string.format('%.0f', ended), string.format('%.0f', ended + 1)}
    for _, entry in ipairs(redis.call('XRANGE', stream, range[1], range[2])) do
      if entry[2][2] == id then redis.call('XDEL', stream, entry[1]) end
    end
    redis.call('DEL', result)
    redis.call('HDEL', job, 'outcome', 'finished_ms', 'cancel')
    redis.call('HSET', job, 'state', 'pending', 'spent', 0)
  end
  if record[1] == 'done' or delayed then
    redis.call('EXPIRE', job, ARGV[1])
    redis.call('ZADD', KEYS[1], ARGV[at + 2] + now, id)
    -- kombu takes messages from the right end of the list.
    redis.call('LPUSH', KEYS[tonumber(ARGV[at + 1])], ARGV[at + 3])
    answers[i] = 'retried'
  else
    answers[i] = record[1] or 'unknown'
  end
end
return answers
