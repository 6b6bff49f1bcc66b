-- uses moves.lua
-- Claim a pending rollout: pending -> running, with a lease by Redis's own clock.
-- KEYS: 1 job record (and those of moves.lua)
-- ARGV: 1 rollout id, 2 worker, 3 lease (ms), 4 record's time to live (s), 5 URL of the worker's gateway, or "",
--       6 its wake-up message, for when it must wait for a place, with KEY.mark for the name of its queue,
--       7 the queues of which the worker may claim, " " around each, or "" for all,
--       8.. fields of a new record (name, value, ...), used when there is none: a message that carries its own request.
--       Its record is marked: see consume.lua
-- Returns {"claimed", attempt, spent, max_attempts, batch, gateway or "", when it was submitted (ms), request}, or {state}
-- when there is nothing to claim: "running" or "done" (a duplicate wake-up), "unknown" (no record, and none was offered), "stale" (ended here, as
-- it is too old for what is trained now), "parked" (it is woken when a place is free), "elsewhere" (the worker does not
-- serve its queue; it is sent there, now where its record is made here, and else by the sweep if it is not there).
local now = clock()
local id = ARGV[1]
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  if #ARGV < 9 then return {'unknown'} end
  redis.call('HSET', KEYS[1], 'state', 'pending', 'attempt', 0, 'spent', 0, 'enqueued_ms', now, 'carried', 1,
    unpack(ARGV, 8))
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  local policy = redis.call('HGET', KEYS[1], 'policy')
  if policy then redis.call('ZADD', KEY.versions, policy, id) end
end
if state and state ~= 'pending' then return {state} end
local record = redis.call('HMGET', KEYS[1], 'max_attempts', 'batch', 'request', 'policy', 'places', 'enqueued_ms',
  'parked', 'gateways', 'queue', 'priority')
local queue = queue_of(record[9])
if ARGV[7] ~= '' and not string.find(ARGV[7], ' ' .. (record[9] or QUEUE_KEYS.celery) .. ' ', 1, true) then
  if not state then
    make_known(queue)
    send(queue, id, record[10], filled_in(ARGV[6], queue), now)
  end
  return {'elsewhere'}
end
if is_stale(record[4]) then
  end_waiting(id, record[2], 'stale', ARGV[4])
  return {'stale'}
end
if record[7] then return {'parked'} end
local gateway = record[8] and choose_gateway(id, KEYS[1], record[8]) or ''
if gateway ~= '' then record[5] = redis.call('HGET', KEYS[1], 'places') end
if record[5] and not enter(queue, id, record[5], ARGV[6], record[6]) then return {'parked'} end
local attempt = redis.call('HINCRBY', KEYS[1], 'attempt', 1)
local spent = redis.call('HINCRBY', KEYS[1], 'spent', 1)
redis.call('HSET', KEYS[1], 'state', 'running', 'worker', ARGV[2], 'claimed_ms', now,
  'gateway', gateway ~= '' and gateway or ARGV[5])
-- The record must outlive the longest rollout, however long it waited in the queue.
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('ZREM', queue.pending, id)
redis.call('ZREM', queue.delayed, id)
redis.call('ZADD', queue.running, now + ARGV[3], id)
make_known(queue)
serve_later_lists(queue)
return {'claimed', attempt, spent, tonumber(record[1]), record[2], gateway, record[6] or '0', record[3]}
