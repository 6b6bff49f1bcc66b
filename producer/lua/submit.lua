-- uses moves.lua
-- Write the records of a chunk of rollouts and send their wake-up messages: all of them, or none when one conflicts
-- or is of a batch that was cancelled for good.
-- KEYS: job records
--       (and, named by the rollouts' batches, their streams, and those of moves.lua)
-- ARGV: 1 records' time to live (s), then for each rollout: id, request, batch, max_attempts, priority, message, version of
--       its policy or "", what it holds of what may be limited, the gateways that it may use or "", the group that shares
--       its gateway or "", its queue or "" for the default one
-- Returns for each rollout in order: 0 created, 1 there already with the same request, 2 so and done,
-- 3 there already with another request, 4 its batch takes no more (after 3 or 4 nothing was written at all).
local FIRST, WIDTH = 2, 11
local answers, seen, closed, refused = {}, {}, {}, false
for i = 1, #KEYS do
  local at = FIRST + (i - 1) * WIDTH
  local id, request = ARGV[at], ARGV[at + 1]
  local record = redis.call('HMGET', KEYS[i], 'request', 'state')
  local known = record[1] or seen[id]
  local batch = ARGV[at + 2]
  if closed[batch] == nil then closed[batch] = redis.call('EXISTS', KEY.tombstone .. batch) == 1 end
  if not known and closed[batch] then
    answers[i] = 4
    refused = true
  elseif not known then
    answers[i] = 0
  elseif known ~= request then
    answers[i] = 3
    refused = true
  else
    answers[i] = record[2] == 'done' and 2 or 1
  end
  seen[id] = request
end
if refused then return answers end
local now = clock()
local batches, filled = {}, {}
for i = 1, #KEYS do
  if answers[i] == 0 then
    local at = FIRST + (i - 1) * WIDTH
    local job, queue = KEYS[i], queue_of(ARGV[at + 10])
    redis.call('HSET', job, 'request', ARGV[at + 1], 'state', 'pending', 'attempt', 0, 'spent', 0,
      'batch', ARGV[at + 2], 'max_attempts', ARGV[at + 3], 'priority', ARGV[at + 4], 'enqueued_ms', now,
      'places', ARGV[at + 7])
    if ARGV[at + 8] ~= '' then redis.call('HSET', job, 'gateways', ARGV[at + 8]) end
    if ARGV[at + 9] ~= '' then redis.call('HSET', job, 'shares', ARGV[at + 9]) end
    if queue.name ~= '' then redis.call('HSET', job, 'queue', queue.name) end
    if ARGV[at + 6] ~= '' then
      redis.call('HSET', job, 'policy', ARGV[at + 6])
      redis.call('ZADD', KEY.versions, ARGV[at + 6], ARGV[at])
    end
    redis.call('EXPIRE', job, ARGV[1])
    send(queue, ARGV[at], ARGV[at + 4], ARGV[at + 5], now)
    filled[queue] = true
    batches[ARGV[at + 2]] = true
  end
end
-- A stream that is always in use, such as the default batch's, would never expire: drop the entries whose results have.
-- Last, for a script that has written something is no longer refused when Redis is full.
for queue in pairs(filled) do make_known(queue) end
local oldest = string.format('%.0f', now - ARGV[1] * 1000)
for batch in pairs(batches) do
  redis.call('XTRIM', KEY.stream .. batch, 'MINID', '~', oldest)
end
return answers
