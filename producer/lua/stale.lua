-- uses moves.lua
-- Say which policy version is trained, and deal with what is too old for it: some of it per call, for as long as the
-- last number returned is not 0.
-- KEYS: 1 the policy (and those of moves.lua)
-- ARGV: 1 time to live of records and streams (s), 2 entries kept in the stream of cancels, 3 most rollouts to look at,
--       4 how many to pass over: what earlier calls have left,
--       5.. the new version, max_off_policy_steps and on_stale; without them, those that hold already
-- Returns how many that waited were ended, how many that run are to be cancelled, how many were left, and how many were
-- looked at.
if ARGV[5] then redis.call('HSET', KEYS[1], 'version', ARGV[5], 'steps', ARGV[6], 'on_stale', ARGV[7]) end
local now = redis.call('HMGET', KEYS[1], 'version', 'steps', 'on_stale')
if not now[1] or now[3] == 'keep' then return {0, 0, 0, 0} end
local oldest = '(' .. string.format('%.0f', tonumber(now[1]) - tonumber(now[2]))
local ids = redis.call('ZRANGEBYSCORE', KEY.versions, '-inf', oldest, 'LIMIT', ARGV[4], ARGV[3])
local ended, asked, left = 0, 0, 0
for _, id in ipairs(ids) do
  local record = redis.pcall('HMGET', KEY.job .. id, 'state', 'batch') -- it may be no record at all
  if record[1] == 'pending' then
    end_waiting(id, record[2], 'stale', ARGV[1])
    ended = ended + 1
  elseif record[1] ~= 'running' then
    redis.call('ZREM', KEY.versions, id)
  elseif now[3] == 'cancel' then
    ask_to_cancel(id, 'stale', ARGV[1], ARGV[2])
    redis.call('ZREM', KEY.versions, id)
    asked = asked + 1
  else
    left = left + 1
  end
end
return {ended, asked, left, #ids}
