-- What the scripts that end and move records share; broker.script puts it before them, with the tables KEY and LISTS.
-- LISTS has, for each of the queue's lists, its lowest priority, its key, and the score with which it begins in KEY.pending.

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Whether what was made for this policy version is of no use any more, by what the trainer trains now.
local function is_stale(policy)
  if not policy then return false end
  local now = redis.call('HMGET', KEY.policy, 'version', 'steps', 'on_stale')
  return now[1] and now[3] ~= 'keep' and tonumber(now[1]) - tonumber(policy) > tonumber(now[2])
end

local function list_of(priority)
  local found = LISTS[1]
  for _, list in ipairs(LISTS) do
    if list[1] <= (tonumber(priority) or 0) then found = list end
  end
  return found
end

local function has_room(place)
  local limit = redis.call('HGET', KEY.limits, place)
  return not limit or redis.call('SCARD', KEY.place .. place) < tonumber(limit)
end

-- Give free room in a place to those that wait for it longest. Each holds it from here on, so that nobody is woken for
-- nothing and nobody overtakes: wherever somebody is parked, the place is full.
local function wake(place)
  local parked, woken = KEY.parked .. place, {}
  while has_room(place) do
    local id = redis.call('ZRANGE', parked, 0, 0)[1]
    if not id then break end
    redis.call('ZREM', parked, id)
    local record = redis.call('HMGET', KEY.job .. id, 'state', 'parked', 'priority')
    if record[1] == 'pending' and record[2] then
      redis.call('SADD', KEY.place .. place, id)
      redis.call('HDEL', KEY.job .. id, 'parked')
      woken[#woken + 1] = {id, record[2], list_of(record[3])}
    end
  end
  -- To the front, for they have waited already, the first of them last: kombu takes messages from the right end.
  for i = #woken, 1, -1 do
    local id, message, list = unpack(woken[i])
    redis.call('ZADD', KEY.pending, list[3], id)
    redis.call('RPUSH', list[2], message)
  end
end

-- Let go of the places that a rollout holds or waits for. Not only of those that it holds: one that was woken and ends
-- before it is claimed must pass its place on.
local function leave(id, places)
  for place in string.gmatch(places or '', '%S+') do
    redis.call('SREM', KEY.place .. place, id)
    redis.call('ZREM', KEY.parked .. place, id)
    wake(place)
    if redis.call('EXISTS', KEY.place .. place, KEY.parked .. place) == 0 then redis.call('SREM', KEY.places, place) end
  end
end

-- Take all of the places, or none and park in the first that is full; returns whether they were taken.
local function enter(id, places, message, since)
  local full
  for place in string.gmatch(places or '', '%S+') do
    redis.call('SADD', KEY.places, place)
    if redis.call('SISMEMBER', KEY.place .. place, id) == 0 and not has_room(place) then
      full = place
      break
    end
  end
  if not full then
    for place in string.gmatch(places or '', '%S+') do redis.call('SADD', KEY.place .. place, id) end
    return true
  end
  redis.call('HSET', KEY.job .. id, 'parked', message)
  redis.call('ZREM', KEY.pending, id)
  redis.call('ZREM', KEY.delayed, id)
  redis.call('ZADD', KEY.parked .. full, tonumber(since) or clock(), id)
  -- It holds nothing while it waits: others may need what it was woken for.
  for place in string.gmatch(places, '%S+') do
    if place ~= full and redis.call('SREM', KEY.place .. place, id) == 1 then wake(place) end
  end
  return false
end

-- End a rollout that waits, as cancelled. It may have been waiting for a place.
local function end_waiting(id, batch, reason, ttl)
  local job = KEY.job .. id
  redis.call('HSET', job, 'state', 'done', 'outcome', 'cancelled', 'finished_ms', clock())
  if reason ~= '' then redis.call('HSET', job, 'reason', reason) end
  redis.call('HDEL', job, 'parked')
  redis.call('EXPIRE', job, ttl)
  redis.call('ZREM', KEY.pending, id)
  redis.call('ZREM', KEY.delayed, id)
  redis.call('ZREM', KEY.versions, id)
  local stream = KEY.stream .. batch
  redis.call('XADD', stream, '*', 'id', id, 'outcome', 'cancelled')
  redis.call('EXPIRE', stream, ttl)
  leave(id, redis.call('HGET', job, 'places'))
end

-- Ask the worker of a rollout that runs to cancel it. The mark outlives a worker that restarts or misses the entry; the
-- entry is what makes it quick.
local function ask_to_cancel(id, reason, ttl, kept)
  redis.call('HSET', KEY.job .. id, 'cancel', 1)
  if reason ~= '' then redis.call('HSETNX', KEY.job .. id, 'reason', reason) end
  redis.call('XADD', KEY.cancels, 'MAXLEN', '~', kept, '*', 'id', id)
  redis.call('EXPIRE', KEY.cancels, ttl)
end

-- Return the gateway of a rollout: the one it had, its group's, or of those it may use the one that runs the fewest.
local function choose_gateway(id, job, gateways)
  local record = redis.call('HMGET', job, 'gateway', 'places', 'shares')
  if record[1] then return record[1] end
  local chosen = record[3] and redis.call('GET', KEY.group .. record[3])
  local fewest
  if not chosen then
    for url in string.gmatch(gateways, '%S+') do
      local place = 'gateway:' .. url
      local load = redis.call('SCARD', KEY.place .. place) + redis.call('ZCARD', KEY.parked .. place)
      -- Any with room before all without: limits may differ.
      if not has_room(place) then load = load + 1e9 end
      if not fewest or load < fewest then chosen, fewest = url, load end
    end
    if record[3] then redis.call('SET', KEY.group .. record[3], chosen, 'EX', redis.call('TTL', job)) end
  end
  redis.call('HSET', job, 'gateway', chosen, 'places', (record[2] and record[2] .. ' ' or '') .. 'gateway:' .. chosen)
  return chosen
end

-- Of every so many claims, have the next one be of a list that is not served first: of those, what waits longest. kombu
-- serves the lists strictly in order, and a full first one would keep the others waiting for ever.
local function serve_later_lists(share)
  local later = {}
  for _, list in ipairs(LISTS) do
    if redis.call('LLEN', list[2]) > 0 then later[#later + 1] = list end
  end
  if #later < 2 then return end
  local served = redis.call('HINCRBY', KEY.lanes, 'served', 1)
  redis.call('EXPIRE', KEY.lanes, 60)
  if served % share ~= 0 then return end
  local found, oldest
  for i = 2, #later do
    local readable, parsed = pcall(cjson.decode, redis.call('LINDEX', later[i][2], -1))
    local id = readable and type(parsed) == 'table' and type(parsed.headers) == 'table' and parsed.headers.id
    local score = type(id) == 'string' and redis.call('ZSCORE', KEY.pending, id)
    -- One that nobody waits for any more goes first: the next worker drops it, and what is behind it is served.
    local since = score and tonumber(score) - later[i][3] or -1
    if not oldest or since < oldest then found, oldest = {later[i][2], score and id}, since end
  end
  if not found then return end
  redis.call('LMOVE', found[1], LISTS[1][2], 'RIGHT', 'RIGHT')
  if found[2] then redis.call('ZADD', KEY.pending, LISTS[1][3], found[2]) end
end

