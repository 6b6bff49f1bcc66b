-- uses moves.lua
-- Forget the queues of which nothing waits or runs, and in which no message lies. In one step with the look, so that no rollout is forgotten with them.
-- KEYS: none but those of moves.lua
-- ARGV: the queues
-- Returns how many were forgotten.
local forgotten = 0
for _, name in ipairs(ARGV) do
  local queue = queue_of(name)
  local found = redis.call('EXISTS', queue.pending, queue.delayed, queue.running)
  for _, list in ipairs(queue.lists) do found = found + redis.call('EXISTS', list[2]) end
  if found == 0 then
    forgotten = forgotten + redis.call('SREM', QUEUE_KEYS.all, name)
  end
end
return forgotten
