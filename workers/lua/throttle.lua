-- A token bucket of the whole fleet by Redis's own clock: take what is free, else reserve the next free moment; give
-- back what was not used; or shut the bucket for a while.
-- Kept as the moment at which the bucket would be full again (the generic cell rate algorithm), in microseconds.
-- KEYS: 1 the bucket, a hash of full (that moment), till (end of the last pause), pauses (how many there were)
-- ARGV: 1 microseconds for one token, 2 tokens that a full bucket holds, 3 "take", "give" or "pause", 4 how many tokens,
--       5 take: the number of pauses when the caller reserved, or "" without a reservation; give: that number when they
--       were taken; pause: how long (us)
-- Returns the tokens that the caller has now, the microseconds after which it has one more, which is reserved for it if
-- it wanted more (else 0), and the number of pauses. A reservation holds until a pause comes: who has waited asks again
-- with the number it was given, and is sent away with a new reservation when there was one meanwhile.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, burst, tokens = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local state = redis.call('HMGET', KEYS[1], 'full', 'till', 'pauses')
local full = math.max(tonumber(state[1] or 0), now)
local till = tonumber(state[2] or 0)
local pauses = tonumber(state[3] or 0)
local allowance = (burst - 1) * interval
local granted, wait = 0, 0
if ARGV[3] == 'pause' then
  local ends = now + tonumber(ARGV[5])
  if ends <= till then return {0, 0, pauses} end
  pauses = pauses + 1
  till = ends
  -- It opens with one token, not with a full bucket: the whole fleet waits behind it.
  full = math.max(full, till + allowance)
elseif ARGV[3] == 'give' then
  -- What was taken before a pause is settled by it: given back, it would open the bucket before the pause is over.
  if ARGV[5] ~= tostring(pauses) then return {0, 0, pauses} end
  full = math.max(full - tokens * interval, now)
else
  local reserved = ARGV[5] == tostring(pauses) and 1 or 0
  local free = math.max(math.floor((now + allowance - full) / interval) + 1, 0)
  granted = math.min(tokens, free + reserved)
  full = full + (granted - reserved) * interval
  if granted < tokens then
    wait = full - allowance - now
    full = full + interval
  end
end
redis.call('HSET', KEYS[1], 'full', string.format('%.0f', full), 'till', string.format('%.0f', till), 'pauses', pauses)
-- Until it is full again there is something to remember, and a minute more for those who sleep.
redis.call('PEXPIRE', KEYS[1], math.ceil((full - now) / 1000) + 60000)
return {granted, math.ceil(wait), pauses}
