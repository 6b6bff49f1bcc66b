-- uses moves.lua
-- End a rollout in one step: store its result, mark it done, and announce it on its batch's stream. The first one wins.
-- KEYS: 1 job record, 2 stream of the batch, 3 key of the result, 4 the ledger
--       (and those of moves.lua)
-- ARGV: 1 rollout id, 2 attempt, 3 outcome, 4 time to live of record, stream and result (s), 5 result,
--       6 "owned" (by the worker that holds it) or "lapsed" (only when the lease lapsed)
-- Returns 1 when this attempt is the one that ended it (also when it is told so twice), else 0.
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'places', 'queue')
if record[2] ~= ARGV[2] then return 0 end
if record[1] == 'done' then return 1 end
if record[1] ~= 'running' then return 0 end
local now = clock()
local running = queue_of(record[4]).running
if ARGV[6] == 'lapsed' then
  -- Its worker may have come back since it was found lapsed.
  local lease = redis.call('ZSCORE', running, ARGV[1])
  if lease and tonumber(lease) > now then return 0 end
end
redis.call('SET', KEYS[3], ARGV[5], 'EX', ARGV[4])
-- Celery's own clients wait for results on a channel of the key's name.
redis.call('PUBLISH', KEYS[3], ARGV[5])
redis.call('HSET', KEYS[1], 'state', 'done', 'outcome', ARGV[3], 'finished_ms', now)
-- The result holds the turns of earlier attempts by now.
for earlier = 1, tonumber(ARGV[2]) - 1 do redis.call('HDEL', KEYS[1], 'turns:' .. earlier) end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('ZREM', running, ARGV[1])
redis.call('ZREM', KEY.versions, ARGV[1])
leave(ARGV[1], record[3])
if ARGV[6] == 'lapsed' then
  -- Its worker cannot be trusted to clean up.
  local whose = redis.call('HMGET', KEYS[1], 'worker', 'gateway')
  local entry = {worker = whose[1] or '', gateway = whose[2] or '', since_ms = now}
  redis.call('HSET', KEYS[4], ARGV[1] .. ' ' .. ARGV[2], cjson.encode(entry))
end
redis.call('XADD', KEYS[2], '*', 'id', ARGV[1], 'outcome', ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
