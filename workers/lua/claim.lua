-- Claim a pending rollout: pending -> running, with a lease by Redis's own clock.
-- KEYS: 1 job record, 2 pending set, 3 running set, 4 delayed set
-- ARGV: 1 rollout id, 2 worker, 3 lease (ms), 4 record's time to live (s), 5 URL of the worker's gateway, or "",
--       6.. fields of a new record (name, value, ...), used when there is none: a message that carries its own request.
--       Its record is marked: see consume.lua
-- Returns {"claimed", attempt, spent, max_attempts, batch, request}, or {state} when there is nothing to claim:
-- "running" or "done" (a duplicate wake-up), "unknown" (no record, and none was offered).
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  if #ARGV < 7 then return {'unknown'} end
  redis.call('HSET', KEYS[1], 'state', 'pending', 'attempt', 0, 'spent', 0, 'enqueued_ms', now, 'carried', 1,
    unpack(ARGV, 6))
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  state = 'pending'
end
if state ~= 'pending' then return {state} end
local attempt = redis.call('HINCRBY', KEYS[1], 'attempt', 1)
local spent = redis.call('HINCRBY', KEYS[1], 'spent', 1)
redis.call('HSET', KEYS[1], 'state', 'running', 'worker', ARGV[2], 'gateway', ARGV[5] or '')
-- The record must outlive the longest rollout, however long it waited in the queue.
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZADD', KEYS[3], now + ARGV[3], ARGV[1])
local record = redis.call('HMGET', KEYS[1], 'max_attempts', 'batch', 'request')
return {'claimed', attempt, spent, tonumber(record[1]), record[2], record[3]}
