-- uses moves.lua
-- Set or lift the limit of a place, or take off what holds it or waits for it without cause; then wake those for which
-- there is room.
-- KEYS: 1 the limits (and those of moves.lua)
-- ARGV: 1 the place, 2 its limit, "" for none, or "same", 3.. ids to look at
-- Returns how many were taken off: their records are gone or have ended, because a server lost its last second.
local place = ARGV[1]
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], place)
elseif ARGV[2] ~= 'same' then
  redis.call('HSET', KEYS[1], place, ARGV[2])
end
local taken_off = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  local record = redis.call('HMGET', KEY.job .. id, 'state', 'parked', 'queue')
  -- One that waits holds it only since it was woken, and is in the queue then.
  local waits = record[1] == 'pending' and not record[2] and redis.call('ZSCORE', queue_of(record[3]).pending, id)
  if record[1] ~= 'running' and not waits then taken_off = taken_off + redis.call('SREM', KEY.place .. place, id) end
  if not (record[1] == 'pending' and record[2]) then
    taken_off = taken_off + redis.call('ZREM', KEY.parked .. place, id)
  end
end
wake(place)
if redis.call('EXISTS', KEY.place .. place, KEY.parked .. place) == 0 then redis.call('SREM', KEY.places, place) end
return taken_off
