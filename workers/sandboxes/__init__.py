"""Where agents run: one small protocol and its providers.

``local`` is a process group in a directory of its own, for development. It isolates nothing: it runs what the request
says, as the worker's user, so whoever can write to the fleet's Redis can run commands there.

``prime`` is the Prime platform (https://docs.primeintellect.ai), with one pooled tunnel for each worker process and
gateway address::

    export ROLLOUTS_SANDBOX_PROVIDER=prime ROLLOUTS_TUNNEL_PROVIDER=prime
    export PRIME_API_KEY=...                  # or `prime login`; PRIME_TEAM_ID and PRIME_API_BASE_URL are read too
    rollouts doctor                           # says what is missing or wrong, before any rollout is taken
    rollouts worker --name w1 --concurrency 500

Agents get into a sandbox with its image, with ``--harbor``, or with an environment whose ``setup`` uploads them
(``await rollout.sandbox.upload_file("/agent.py", path)``); the default image is ``python:3.11-slim``. A task for such
a fleet::

    {"prompt": "6 times 7?", "image": "my/agent:1", "run_command": "python3 /agent.py", "resources": {"memory_gb": 4}}

A request names its ``image``, ``resources``, ``start_command``, ``env``, ``secret_env``, ``team_id`` and ``advanced``
options; labels (fleet, worker, rollout, attempt, and the request's own) and a lifetime go with every sandbox. The
gateway may be in a private network: agents reach it through the worker's tunnel.

A rollout is bound to the tunnel that it started with. When frpc dies it is restarted under the same URL, and the
agents that retry their calls notice nothing; the attempt of one that gave up during the outage is run again. When the
registration is gone, the URL is too: every rollout on it fails at once with a ``tunnel`` error that holds frpc's last
words, keeps its turns (``failed_attempts`` of the final result), and runs again on the next tunnel. Beat has every
worker process look after its tunnels (``ROLLOUTS_TUNNEL_CHECK_INTERVAL``); one that hears nothing from beat does so
by itself.

Without a gateway (``use_gateway: false`` in a request, or ``ROLLOUTS_USE_GATEWAY=false`` with ``ROLLOUTS_MODEL_URL``)
the worker process serves its agents' model calls itself and passes them on to the model server. Same flow, same
result.
"""
