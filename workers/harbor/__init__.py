"""Tasks in Harbor's format as rollouts: the environment, the agents that it can run, and one agent of our own.

::

    rollouts run --harbor TASKS_DIR --agent shell --model my-model --samples 4 --out results.jsonl

``TASKS_DIR`` is one task's folder or holds such folders: ``task.toml``, ``instruction.md``,
``environment/Dockerfile``, ``tests/test.sh``, and ``solution/solve.sh`` for checking (the format:
https://www.harborframework.com/docs/tasks, schema 1.x, single-step, verifier in the agent's sandbox). Each becomes a
rollout: ``example_id`` is the folder's name, ``info`` its metadata, deadlines and resources are the task's, and tests
and ``COPY``ed files travel in the request, so workers need no copy of the folder. After the agent has ended, the
tests are uploaded and run; the reward is what they write to ``/logs/verifier/reward.txt``, or ``reward`` in
``reward.json``, whose numbers all become metrics. A verifier that fails, takes too long or writes no reward is an
``environment`` error with the end of its output, never a reward of 0.

The image is ``docker_image`` of the task, else ``--image``, else the Dockerfile if that needs no build (FROM,
WORKDIR, ENV and plain COPY). All tasks are checked first: each that cannot be run is named with the reason, and
nothing is submitted.

The agents (``--agent``):

- ``shell``: our own, a model with a shell; one Python file (3.8 or newer, standard library only)
- ``mini-swe-agent``, ``opencode``: installed with pip or npm where the image has them not
- ``codex``: likewise, with npm; it calls ``/responses``, which the bundled gateway serves (tried with 0.171)
- ``claude-code``: likewise, with npm; it calls ``/v1/messages``, which the bundled gateway serves (tried with 2.1)
- ``oracle``, ``nop``: the task's own solution, and nothing; they should get 1 and 0, and make no model call

Verifier and agent share a sandbox, as in Harbor: what an agent leaves running could still see the tests.
``allow_internet = false`` is not enforced; the result warns of it. A variable ``NAME = "${NAME}"`` in
``[environment.env]`` is passed on from the worker (``ROLLOUTS_SECRET_ENV``). In ``local`` sandboxes no image is used;
``/app``, ``/tests``, ``/logs`` and the like lie in the sandbox's folder, and the texts that are uploaded are changed
to say so.
"""
