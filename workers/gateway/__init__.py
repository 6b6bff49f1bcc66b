"""The rollout gateway: its protocol, our client of it, and the bundled server.

``rollouts gateway`` prints its routes when it starts; ``/openapi.json`` describes them, ``/healthz``, ``/readyz`` and
``/metrics`` are what they are called. It refuses to listen on other addresses than loopback without a control key.
What matters in production, of its settings (`workers.gateway.server.serve.GatewaySettings`):

- ``ROLLOUTS_GATEWAY_UPSTREAM``: model servers, by commas. A rollout stays with the one that has its prefix cached,
  new ones go to the least loaded; a server that fails is left alone until it answers again.
- ``ROLLOUTS_GATEWAY_DATA_PARALLEL_SIZE``: ranks of each (``X-data-parallel-rank``).
- ``ROLLOUTS_GATEWAY_UPSTREAM_CONNECTIONS``: calls at one time at each; more wait in line, and a full line answers 429
  with ``Retry-After``.
- ``ROLLOUTS_GATEWAY_JOURNAL``: a directory. A gateway that was killed and is started on it again has every registered
  rollout and every answered call.
- ``ROLLOUTS_GATEWAY_PEERS`` and ``_OWN_URL``: several processes; each passes a rollout's calls on to the one that its
  id belongs to.
- ``ROLLOUTS_GATEWAY_NATIVE``: ``responses``, ``messages``, or ``responses@URL`` for one server: pass these on to a
  model server that speaks them. They are translated to chat completions otherwise, for which model servers give token
  ids.

``POST /admin/pause?drain=SECONDS`` holds new calls during a weight update and ``POST /admin/resume`` with
``{"policy_version": 7}`` lets them go on; each step's ``extras`` name the version that it was sampled under. Admin
calls want the control key, and do not exist under a tunnel's host name. ``GET .../trajectory?format=compact`` says
each token and message once.

A registered rollout of 50 turns whose prompt grows to 32,000 tokens takes 0.6 MB of the gateway's memory (0.2 MB are
its tokens and logprobs, 0.13 MB its text); the answers as they came were 5.9 MB. A stream's first event comes 0.5 ms
later than from the model server itself (p50). A token of a stream costs 0.02 ms of the gateway's one core, so that a
thousand streams of 50 tokens a second are what one process can do; each token then comes 0.7 ms later (p50; 10 ms
p99). ``make bench`` measures all.
"""
