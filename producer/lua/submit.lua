-- Write the records of a chunk of rollouts and send their wake-up messages: all of them, or none when one conflicts.
-- KEYS: 1 pending set, then the queue's lists, then (after the first ARGV 2) job records
--       (and, named by the rollouts' batches, their streams: ARGV 3 .. batch)
-- ARGV: 1 records' time to live (s), 2 number of KEYS before the job records, 3 prefix of the batches' streams, then for
--       each rollout: id, request, batch, max_attempts, priority, index in KEYS of its list, score in the pending set
--       with which its list's rollouts begin, message
-- Returns for each rollout in order: 0 created, 1 there already with the same request, 2 so and done,
-- 3 there already with another request (then nothing was written at all).
local BEFORE, FIRST, WIDTH = tonumber(ARGV[2]), 4, 8
local answers, seen, conflict = {}, {}, false
for i = 1, #KEYS - BEFORE do
  local at = FIRST + (i - 1) * WIDTH
  local id, request = ARGV[at], ARGV[at + 1]
  local record = redis.call('HMGET', KEYS[BEFORE + i], 'request', 'state')
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
local batches = {}
for i = 1, #KEYS - BEFORE do
  if answers[i] == 0 then
    local at = FIRST + (i - 1) * WIDTH
    local job = KEYS[BEFORE + i]
    redis.call('HSET', job, 'request', ARGV[at + 1], 'state', 'pending', 'attempt', 0, 'spent', 0,
      'batch', ARGV[at + 2], 'max_attempts', ARGV[at + 3], 'priority', ARGV[at + 4], 'enqueued_ms', now)
    redis.call('EXPIRE', job, ARGV[1])
    redis.call('ZADD', KEYS[1], ARGV[at + 6] + now, ARGV[at])
    -- kombu takes messages from the right end of the list.
    redis.call('LPUSH', KEYS[tonumber(ARGV[at + 5])], ARGV[at + 7])
    batches[ARGV[at + 2]] = true
  end
end
-- A stream that is always in use, such as the default batch's, would never expire: drop the entries whose results have.
-- Last, for a script that has written something is no longer refused when Redis is full.
local oldest = string.format('%.0f', now - ARGV[1] * 1000)
for batch in pairs(batches) do
  redis.call('XTRIM', ARGV[3] .. batch, 'MINID', '~', oldest)
end
return answers
