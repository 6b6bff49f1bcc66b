-- Let what a consumer is done with expire soon, and its batch's stream once all of that is consumed. Nothing in here takes
-- memory, so that a full Redis can be emptied. How long a key still lives tells whether it is consumed.
-- KEYS: 1 stream of the batch, then for each rollout its record and its result
-- ARGV: 1 time to live from now on (s), 2 position up to which the stream was found consumed before, or "-",
--       3 most entries of the stream to look at, 4 prefix of the records, 5 prefix of the results
--       (and, named by the stream's entries, their records and results: ARGV 4 .. id, ARGV 5 .. id)
-- Returns the position up to which the stream is consumed now.
local stream, keep, position, most = KEYS[1], tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local function shorten(key)
  if redis.call('TTL', key) > keep then redis.call('EXPIRE', key, keep) end
end
for i = 2, #KEYS, 2 do
  local record = redis.call('HMGET', KEYS[i], 'state', 'carried')
  if not record[1] or record[1] == 'done' then shorten(KEYS[i + 1]) end
  -- A message that carries its own request would make a new record, and run again: such a record stays for its full time.
  if record[1] == 'done' and not record[2] then shorten(KEYS[i]) end
end
local function left(id)
  local result, record = redis.call('TTL', ARGV[5] .. id), redis.call('TTL', ARGV[4] .. id)
  if result < record and redis.call('HEXISTS', ARGV[4] .. id, 'carried') == 1 then return result end
  return math.max(result, record)
end
-- Entries of which nothing is left are of use to nobody. They are looked for where they can be: a stream that is always in
-- use, such as the default batch's, never expires.
local time = redis.call('TIME')
local old = string.format('%.0f', math.max(0, time[1] * 1000 - keep * 1000))
for _, entry in ipairs(redis.call('XRANGE', stream, '-', old, 'COUNT', most)) do
  if left(entry[2][2]) < 0 then redis.call('XDEL', stream, entry[1]) end
end
local entries = redis.call('XRANGE', stream, position, '+', 'COUNT', most)
if #entries == 0 then
  -- What was there is deleted, or the stream is another one by now.
  position = '-'
  entries = redis.call('XRANGE', stream, position, '+', 'COUNT', most)
end
for _, entry in ipairs(entries) do
  if left(entry[2][2]) > keep then return position end
  position = entry[1]
end
if #entries < most then shorten(stream) end
return position
