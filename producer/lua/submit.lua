-- Write the records of a chunk of rollouts and send their wake-up messages: all of them, or none when one conflicts.
-- KEYS: 1 pending set, 2 to 5 the queue's lists (first served first), 6.. job records
-- ARGV: 1 records' time to live (s), then for each rollout: id, request, batch, max_attempts, priority,
--       index in KEYS of its list, message
-- Returns for each rollout in order: 0 created, 1 there already with the same request, 2 so and done,
-- 3 there already with another request (then nothing was written at all).
local FIRST, WIDTH = 5, 7
local answers, seen, conflict = {}, {}, false
for i = 1, #KEYS - FIRST do
  local at = 2 + (i - 1) * WIDTH
  local id, request = ARGV[at], ARGV[at + 1]
  local record = redis.call('HMGET', KEYS[FIRST + i], 'request', 'state')
  local known = record[1] or seen[id]
  if not known then
    answers[i] = 0
  elseif known ~= request then
    answers[i] = 3
    conflict = true
  else
    answers[i] = record[2] == 'done' and 2 or 1
  end
  seen[id] = request
end
if conflict then return answers end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #KEYS - FIRST do
  if answers[i] == 0 then
    local at = 2 + (i - 1) * WIDTH
    local job = KEYS[FIRST + i]
    redis.call('HSET', job, 'request', ARGV[at + 1], 'state', 'pending', 'attempt', 0, 'spent', 0,
      'batch', ARGV[at + 2], 'max_attempts', ARGV[at + 3], 'priority', ARGV[at + 4], 'enqueued_ms', now)
    redis.call('EXPIRE', job, ARGV[1])
    -- Scored by list, then time: the lists are KEYS 2 to 5, and 10^14 is broker.LIST_SPAN.
    redis.call('ZADD', KEYS[1], (tonumber(ARGV[at + 5]) - 2) * 1e14 + now, ARGV[at])
    -- kombu takes messages from the right end of the list.
    redis.call('LPUSH', KEYS[tonumber(ARGV[at + 5])], ARGV[at + 6])
  end
end
return answers
