-- uses moves.lua
-- Cancel rollouts: end those that wait, and ask the workers of those that run to cancel them.
-- KEYS: job records (and those of moves.lua)
-- ARGV: 1 time to live of records and streams (s), 2 entries kept in the stream of cancels, 3 why, or "" when their
--       producer wants it, then the rollout ids
-- Returns for each rollout in order: "cancelled" (it waited), "requested" (it runs), "done" or "unknown" (nothing done).
local FIRST = 3
local answers = {}
for i = 1, #KEYS do
  local id = ARGV[FIRST + i]
  local record = redis.call('HMGET', KEYS[i], 'state', 'batch')
  local state = record[1]
  if state == 'pending' then
    end_waiting(id, record[2], ARGV[3], ARGV[1])
    answers[i] = 'cancelled'
  elseif state == 'running' then
    ask_to_cancel(id, ARGV[3], ARGV[1], ARGV[2])
    answers[i] = 'requested'
  else
    answers[i] = state or 'unknown'
  end
end
return answers
