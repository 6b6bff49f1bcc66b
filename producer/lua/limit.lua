-- uses moves.lua
-- Set or lift the limit of a place, take off what does not hold it any more, and wake those for which there is room.
-- KEYS: 1 the limits (and those of moves.lua)
-- ARGV: 1 the place, 2 its limit, "" for none, or "same"
-- Returns how many were taken off: their records are gone or have ended, because a server lost its last second.
local place = ARGV[1]
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], place)
elseif ARGV[2] ~= 'same' then
  redis.call('HSET', KEYS[1], place, ARGV[2])
end
local taken_off = 0
if ARGV[2] == 'same' then
  for _, id in ipairs(redis.call('SMEMBERS', KEY.place .. place)) do
    local record = redis.call('HMGET', KEY.job .. id, 'state', 'parked')
    -- One that waits holds it only since it was woken, and is in the queue then.
    local waits = record[1] == 'pending' and not record[2] and redis.call('ZSCORE', KEY.pending, id)
    if record[1] ~= 'running' and not waits then
      redis.call('SREM', KEY.place .. place, id)
      taken_off = taken_off + 1
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', KEY.parked .. place, 0, -1)) do
    if redis.call('HGET', KEY.job .. id, 'state') ~= 'pending' then redis.call('ZREM', KEY.parked .. place, id) end
  end
end
wake(place)
return taken_off
