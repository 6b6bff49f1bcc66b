"""The door for prime-rl: serves verifiers' environment-server protocol, and has the fleet run the episodes.

::

    rollouts env-server --env gsm8k.toml --address tcp://127.0.0.1:5000         # extra `verifiers`
    ROLLOUTS_VERIFIERS=gsm8k.toml rollouts worker                               # as many as you like, on any machine

It serves what ``verifiers.v1.serve`` does, to an unmodified ``EnvClient``: name the address as ``serve.address`` of a
source in prime-rl. Each ``run`` is a rollout of the fleet, in which a worker runs the real verifiers environment; a
worker that dies is replaced, and the client sees one answer. One door serves one configuration, a ``NAME.json`` or
``NAME.toml`` with the fields of verifiers' ``EnvConfig`` (such as ``taskset`` and ``agent``): workers run only those
that they have themselves, and refuse a door whose file differs.

- A worker needs the taskset's package, the variable that the client's ``api_key_var`` names, and a way to its
  ``base_url``.
- Deltas are held with their attempt, and come in order with its reply; ``--live`` passes them on as they come.
  ``--wire whole`` is for clients before 0.4: the worker's verifiers must be of the version that its clients have.
- A door that is started again, with the same ``--name`` (by default made of configuration and address), answers what
  was in flight, also to clients that are silent. Which of its connections is the one that waits it cannot know: it
  offers such answers to all.
- An episode whose client is gone for a minute is cancelled, unless a new one has connected since.
- The protocol knows no password: other addresses than loopback need ``--allow-remote``. A ``run`` holds the client's
  headers, and is in Redis until an hour after its answer: whoever reads that Redis reads them.
- What a worker that was killed had started outside of itself, such as a local runtime's process, is left to
  verifiers.
"""
