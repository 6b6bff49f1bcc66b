-- A token bucket of the whole fleet by Redis's own clock: reserve the next free moment, or shut the bucket for a while.
-- Kept as the moment at which the bucket would be full again (the generic cell rate algorithm), in microseconds.
-- KEYS: 1 the bucket, a hash of full (that moment), till (end of the last pause), pauses (how many there were)
-- ARGV: 1 microseconds for one token, 2 tokens that a full bucket holds, 3 "take" or "pause",
--       4 take: the number of pauses when the caller reserved, or "" for a new reservation; pause: how long (us)
-- Returns microseconds to wait and the number of pauses. A reservation holds until a pause comes: who has waited asks
-- again with the number it was given, and is sent away with a new reservation when there was one meanwhile.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local state = redis.call('HMGET', KEYS[1], 'full', 'till', 'pauses')
local full = math.max(tonumber(state[1] or 0), now)
local till = tonumber(state[2] or 0)
local pauses = tonumber(state[3] or 0)
local allowance = (burst - 1) * interval
local wait = 0
if ARGV[3] == 'pause' then
  local ends = now + tonumber(ARGV[4])
  if ends <= till then return {0, pauses} end
  pauses = pauses + 1
  till = ends
  -- It opens with one token, not with a full bucket: the whole fleet waits behind it.
  full = math.max(full, till + allowance)
elseif ARGV[4] == tostring(pauses) then
  return {0, pauses}
else
  wait = math.max(full - allowance - now, 0)
  full = full + interval
end
redis.call('HSET', KEYS[1], 'full', string.format('%.0f', full), 'till', string.format('%.0f', till), 'pauses', pauses)
-- Until it is full again there is something to remember, and a minute more for those who sleep.
redis.call('PEXPIRE', KEYS[1], math.ceil((full - now) / 1000) + 60000)
return {math.ceil(wait), pauses}
