-- uses moves.lua
-- Run rollouts again that have ended: done -> pending, with all attempts before them, and send their wake-up messages.
-- One that waits for a delay to pass is sent now.
-- KEYS: 1 pending set, 2 delayed set, then the queue's lists, then (after the first ARGV 2) for each rollout its record and
--       its result
--       (and, named by the records' batches, their streams, and those of moves.lua)
-- ARGV: 1 time to live of records (s), 2 number of KEYS before the records, then for each rollout: id, index in KEYS of
--       its list, score in the pending set with which its list's rollouts begin, message
-- Returns for each rollout in order: "retried", or "pending", "running", "unknown" or "closed" (its batch was cancelled for
-- good): then nothing was done.
local BEFORE, FIRST, WIDTH = tonumber(ARGV[2]), 3, 4
local now = clock()
local answers = {}
for i = 1, (#KEYS - BEFORE) / 2 do
  local at = FIRST + (i - 1) * WIDTH
  local job, result, id = KEYS[BEFORE + 2 * i - 1], KEYS[BEFORE + 2 * i], ARGV[at]
  local record = redis.call('HMGET', job, 'state', 'batch', 'finished_ms', 'policy')
  local state = record[1]
  if state == 'done' and redis.call('EXISTS', KEY.tombstone .. record[2]) == 1 then state = 'closed' end
  local delayed = state == 'pending' and redis.call('ZREM', KEYS[2], id) == 1
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
    redis.call('ZADD', KEYS[1], ARGV[at + 2] + now, id)
    -- kombu takes messages from the right end of the list.
    redis.call('LPUSH', KEYS[tonumber(ARGV[at + 1])], ARGV[at + 3])
    answers[i] = 'retried'
  else
    answers[i] = state or 'unknown'
  end
end
return answers
