-- uses moves.lua
-- Run rollouts again that have ended: done -> pending, with all attempts before them, and send their wake-up messages.
-- One that waits for a delay to pass is sent now.
-- KEYS: for each rollout its record and its result
--       (and, named by the records' batches, their streams, and those of moves.lua)
-- ARGV: 1 time to live of records (s), then for each rollout: id, message
-- Returns for each rollout in order: "retried", or "pending", "running", "unknown" or "closed" (its batch was cancelled for
-- good): then nothing was done.
local now = clock()
local answers = {}
for i = 1, #KEYS / 2 do
  local job, result, id, message = KEYS[2 * i - 1], KEYS[2 * i], ARGV[2 * i], ARGV[2 * i + 1]
  local record = redis.call('HMGET', job, 'state', 'batch', 'finished_ms', 'policy', 'queue', 'priority')
  local queue = queue_of(record[5])
  local state = record[1]
  if state == 'done' and redis.call('EXISTS', KEY.tombstone .. record[2]) == 1 then state = 'closed' end
  local delayed = state == 'pending' and redis.call('ZREM', queue.delayed, id) == 1
  if state == 'done' then
    -- Its end was announced in the same millisecond by the same clock, or in the next. Who reads the batch from its
    -- beginning must not find an end without a result.
    local stream, ended = KEY.stream .. record[2], tonumber(record[3] or 0)
    local range = {string.format('%.0f', ended), string.format('%.0f', ended + 1)}
    for _, entry in ipairs(redis.call('XRANGE', stream, range[1], range[2])) do
      if entry[2][2] == id then redis.call('XDEL', stream, entry[1]) end
    end
    redis.call('DEL', result)
    redis.call('HDEL', job, 'outcome', 'finished_ms', 'cancel', 'reason')
    redis.call('HSET', job, 'state', 'pending', 'spent', 0)
    if record[4] then redis.call('ZADD', KEY.versions, record[4], id) end
  end
  if state == 'done' or delayed then
    redis.call('EXPIRE', job, ARGV[1])
    make_known(queue)
    send(queue, id, record[6], message, now)
    answers[i] = 'retried'
  else
    answers[i] = state or 'unknown'
  end
end
return answers
