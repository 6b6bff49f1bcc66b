-- What the scripts that end and move records share; broker.script puts it before them, with the tables KEY, QUEUE_KEYS
-- (of the default queue) and LISTS: of each of a queue's lists its lowest priority, the end of its key, and the score with
-- which it begins in the queue's pending set.

-- Return a queue by the name that its rollouts' records have: {name, celery, pending, delayed, running, lists}. The default
-- one has no name there.
local queues = {}
local function queue_of(name)
  name = name or ''
  if queues[name] then return queues[name] end
  local default = name == ''
  local suffix = default and '' or ':' .. name
  local queue = {name = name, celery = default and QUEUE_KEYS.celery or QUEUE_KEYS.celery_prefix .. name, lists = {}}
  for _, set in ipairs({'pending', 'delayed', 'running'}) do queue[set] = QUEUE_KEYS[set] .. suffix end
  for i, list in ipairs(LISTS) do queue.lists[i] = {list[1], queue.celery .. list[2], list[3]} end
  queues[name] = queue
  return queue
end

-- Have everybody know of a queue in which something is put.
local function make_known(queue)
  if queue.name ~= '' then redis.call('SADD', QUEUE_KEYS.all, queue.name) end
end

-- Of how many that are served one is of a list that is not the first.
local SHARE = 4

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

local function list_of(queue, priority)
  local found, wanted = queue.lists[1], tonumber(priority) or 0
  for _, list in ipairs(queue.lists) do
    if list[1] <= wanted then found = list end
  end
  return found
end

-- Return a wake-up message with the name of its queue in it.
local function filled_in(message, queue)
  return (string.gsub(message, KEY.mark, queue.celery, 1))
end

-- Put a rollout into its queue, at the end or to the front. kombu takes messages from the right end of a list.
local function send(queue, id, priority, message, since)
  local list = list_of(queue, priority)
  redis.call('ZADD', queue.pending, list[3] + since, id)
  redis.call('LPUSH', list[2], message)
end

local function send_to_front(queue, id, priority, message)
  local list = list_of(queue, priority)
  redis.call('ZADD', queue.pending, list[3], id)
  redis.call('RPUSH', list[2], message)
end

local function has_room(place)
  local limit = redis.call('HGET', KEY.limits, place)
  return not limit or redis.call('SCARD', KEY.place .. place) < tonumber(limit)
end

-- Return who is next in a place, of those that are parked there: as in a queue, what is of the first list, in the order of
-- submission, and of every SHARE where others wait too one of these, the one that has waited longest.
local function next_parked(place)
  local parked = KEY.parked .. place
  local first, last = redis.call('ZRANGE', parked, 0, 0, 'WITHSCORES'), redis.call('ZRANGE', parked, -1, -1, 'WITHSCORES')
  local span = #LISTS > 1 and LISTS[2][3] - LISTS[1][3] or math.huge
  if not first[1] or math.floor(first[2] / span) == math.floor(last[2] / span) then return first[1] end
  local woken = redis.call('HINCRBY', KEY.lanes, place, 1)
  redis.call('EXPIRE', KEY.lanes, 60)
  if woken % SHARE ~= 0 then return first[1] end
  local found, since
  for _, list in ipairs(LISTS) do
    if list[3] > tonumber(first[2]) then
      local range = {list[3], '(' .. string.format('%.0f', list[3] + span)}
      local head = redis.call('ZRANGEBYSCORE', parked, range[1], range[2], 'WITHSCORES', 'LIMIT', 0, 1)
      if head[1] and (not since or head[2] - list[3] < since) then found, since = head[1], head[2] - list[3] end
    end
  end
  return found or first[1]
end

-- Give free room in a place to those that wait for it. Each holds it from here on, so that nobody is woken for
-- nothing and nobody overtakes: wherever somebody is parked, the place is full.
local function wake(place)
  local parked, woken = KEY.parked .. place, {}
  while has_room(place) do
    local id = next_parked(place)
    if not id then break end
    redis.call('ZREM', parked, id)
    local record = redis.call('HMGET', KEY.job .. id, 'state', 'parked', 'priority', 'queue')
    if record[1] == 'pending' and record[2] then
      redis.call('SADD', KEY.place .. place, id)
      redis.call('HDEL', KEY.job .. id, 'parked')
      woken[#woken + 1] = {queue_of(record[4]), id, record[3], record[2]}
    end
  end
  -- To the front, for they have waited already, the first of them last.
  for i = #woken, 1, -1 do
    make_known(woken[i][1])
    send_to_front(unpack(woken[i]))
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
local function enter(queue, id, places, message, since)
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
  redis.call('HSET', KEY.job .. id, 'parked', filled_in(message, queue))
  redis.call('ZREM', queue.pending, id)
  redis.call('ZREM', queue.delayed, id)
  local list = list_of(queue, redis.call('HGET', KEY.job .. id, 'priority'))
  redis.call('ZADD', KEY.parked .. full, list[3] + (tonumber(since) or clock()), id)
  -- It holds nothing while it waits: others may need what it was woken for.
  for place in string.gmatch(places, '%S+') do
    if place ~= full and redis.call('SREM', KEY.place .. place, id) == 1 then wake(place) end
  end
  return false
end

-- End a rollout that waits, as cancelled. It may have been waiting for a place.
local function end_waiting(id, batch, reason, ttl)
  local job = KEY.job .. id
  local record = redis.call('HMGET', job, 'queue', 'places')
  local queue = queue_of(record[1])
  redis.call('HSET', job, 'state', 'done', 'outcome', 'cancelled', 'finished_ms', clock())
  if reason ~= '' then redis.call('HSET', job, 'reason', reason) end
  redis.call('HDEL', job, 'parked')
  redis.call('EXPIRE', job, ttl)
  redis.call('ZREM', queue.pending, id)
  redis.call('ZREM', queue.delayed, id)
  redis.call('ZREM', KEY.versions, id)
  local stream = KEY.stream .. batch
  redis.call('XADD', stream, '*', 'id', id, 'outcome', 'cancelled')
  redis.call('EXPIRE', stream, ttl)
  leave(id, record[2])
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

-- Of every SHARE claims of a queue, have the next one be of a list that is not served first: of those, what waits
-- longest. Workers serve a queue's lists strictly in order, and a full first one would keep the others waiting for ever.
local function serve_later_lists(queue)
  local later = {}
  for _, list in ipairs(queue.lists) do
    if redis.call('LLEN', list[2]) > 0 then later[#later + 1] = list end
  end
  if #later < 2 then return end
  local served = redis.call('HINCRBY', KEY.lanes, queue.celery, 1)
  redis.call('EXPIRE', KEY.lanes, 60)
  if served % SHARE ~= 0 then return end
  local found, oldest
  for i = 2, #later do
    local readable, parsed = pcall(cjson.decode, redis.call('LINDEX', later[i][2], -1))
    local id = readable and type(parsed) == 'table' and type(parsed.headers) == 'table' and parsed.headers.id
    local score = type(id) == 'string' and redis.call('ZSCORE', queue.pending, id)
    -- One that nobody waits for any more goes first: the next worker drops it, and what is behind it is served.
    local since = score and tonumber(score) - later[i][3] or -1
    if not oldest or since < oldest then found, oldest = {later[i][2], score and id}, since end
  end
  if not found then return end
  local first = queue.lists[1]
  redis.call('LMOVE', found[1], first[2], 'RIGHT', 'RIGHT')
  if found[2] then redis.call('ZADD', queue.pending, first[3], found[2]) end
end

