-- uses moves.lua
-- Give a running rollout back: running with this attempt -> pending, and send its wake-up message in the same step.
-- KEYS: 1 job record, 2 the ledger (and those of moves.lua)
-- ARGV: 1 rollout id, 2 attempt, 3 "lapsed" (only when the lease lapsed) or "owned" (by the worker that holds it),
--       4 1 when the attempt counts, 0 when it does not, 5 delay (ms), 6 1 to put it at the queue's front,
--       7 message, 8 line for the history, 9 the attempt's turns, packed, or ""
-- Returns "requeued", "exhausted" or "cancelled" (nothing was changed: end it instead), or "stale" (not ours to move).
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'spent', 'max_attempts', 'cancel', 'history',
  'places', 'queue', 'priority')
if record[1] ~= 'running' or record[2] ~= ARGV[2] then return 'stale' end
local now = clock()
local queue = queue_of(record[8])
if ARGV[3] == 'lapsed' then
  local lease = redis.call('ZSCORE', queue.running, ARGV[1])
  if lease and tonumber(lease) > now then return 'stale' end
end
if record[5] then return 'cancelled' end
local spent = tonumber(record[3])
if ARGV[4] == '0' then spent = spent - 1 end
if spent >= tonumber(record[4]) then return 'exhausted' end
local history = ARGV[8]
if record[6] then history = record[6] .. '\n' .. history end
redis.call('HSET', KEYS[1], 'state', 'pending', 'spent', spent, 'history', history)
if ARGV[9] ~= '' then redis.call('HSET', KEYS[1], 'turns:' .. ARGV[2], ARGV[9]) end
redis.call('ZREM', queue.running, ARGV[1])
make_known(queue)
-- It takes its turn again when it is claimed: nothing holds a place while it waits, unless it was woken for it.
leave(ARGV[1], record[7])
if ARGV[3] == 'lapsed' then
  -- Its worker cannot be trusted to clean up. In this step, so that no crash comes in between.
  local whose = redis.call('HMGET', KEYS[1], 'worker', 'gateway')
  local entry = {worker = whose[1] or '', gateway = whose[2] or '', since_ms = now}
  redis.call('HSET', KEYS[2], ARGV[1] .. ' ' .. ARGV[2], cjson.encode(entry))
end
if tonumber(ARGV[5]) > 0 then
  redis.call('ZADD', queue.delayed, now + ARGV[5], ARGV[1])
elseif ARGV[6] == '1' then
  send_to_front(queue, ARGV[1], record[9], ARGV[7])
else
  send(queue, ARGV[1], record[9], ARGV[7], now)
end
return 'requeued'
