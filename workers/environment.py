"""The class that users subclass: which image, which command, which variables, how to set up and how to score.

::

    class Math(Environment):
        def run_command(self, request):
            return "python3 agent.py > answer.txt"

        def build_env_vars(self, request, rollout):
            return super().build_env_vars(request, rollout) | {"ROLLOUT_PROMPT": request.prompt}

        async def setup(self, rollout):                      # rollout.sandbox: upload_file, execute_command, ...
            await rollout.sandbox.upload_file("agent.py", Path(__file__).with_name("agent.py"))

        async def score(self, rollout):                      # a number, or a dictionary of metrics with "reward"
            answer = await rollout.sandbox.execute_command("cat answer.txt")            # exit_code, stdout, stderr
            return float(str(rollout.request.answer) in answer.stdout)

Name it in the allow-list of every worker that serves the queue, and have its module importable there: ``PYTHONPATH=.
ROLLOUTS_ENVIRONMENTS=math=my_module:Math rollouts worker``; nothing else is ever imported. ``after`` is the last
hook, and ``docker_image`` names the image. Hooks that use the sandbox are ``async def``; plain ``def`` hooks run in a
thread and may block. The environment ``command`` is built in: image and command come from the request, the agent
finds the prompt in ``ROLLOUT_PROMPT``, and nothing is scored.

Secrets go by name: ``secret_env: ["HF_TOKEN"]`` in a request passes on the worker's own variable, if the worker
offers it (``ROLLOUTS_SECRET_ENV=HF_TOKEN``). Values do not enter Redis or logs, and are cut out of what the agent
printed, of errors and of warnings. What an agent itself writes into a model call is recorded as it is.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from producer.contract import RolloutRequest
from workers.errors import EnvironmentHookError, InvalidRolloutError
from workers.state import Rollout

DEFAULT_IMAGE = "python:3.11-slim"
#: Seconds that an agent's HTTP client waits for one model call, unless the request says otherwise.
MODEL_CALL_TIMEOUT = "600"
#: Bytes of a prompt that `CommandEnvironment` passes on; Linux takes 128 KiB for one variable.
LONGEST_PROMPT = 64 * 1024


class Environment:
    """One kind of task: subclass it, and name it in the worker's ``ROLLOUTS_ENVIRONMENTS=name=module:Class``.

    One instance serves all rollouts of a worker process at once, so keep a rollout's state on the `Rollout`, not on
    ``self``. Hooks may be coroutines or plain functions; plain ones run in a thread, so they may block. A hook that
    raises ends the attempt with an environment error that names it.
    """

    def docker_image(self, request: RolloutRequest) -> str:
        """Return the sandbox's image."""
        return request.image or DEFAULT_IMAGE

    def run_command(self, request: RolloutRequest) -> str:
        """Return the shell line that starts the agent; raises `InvalidRolloutError` when there is none."""
        if not request.run_command:
            raise InvalidRolloutError(
                f"run_command: missing; environment {request.environment!r} has no command of its own"
            )
        return request.run_command

    def build_env_vars(self, request: RolloutRequest, rollout: Rollout) -> dict[str, str]:
        """Return the agent's variables: where its model is and its own key; the request's ``env`` wins.

        One set for each API that the gateway speaks, all of the same rollout. A request whose ``secret_env`` names
        ``ANTHROPIC_API_KEY`` means Anthropic itself, so that it gets none for that.
        """
        base_url = rollout.rollout_base_url or ""
        anthropic = {"ANTHROPIC_BASE_URL": base_url, "ANTHROPIC_API_KEY": rollout.api_key}
        return {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_MODEL": request.model,
            "OPENAI_API_KEY": rollout.api_key,
            **({} if "ANTHROPIC_API_KEY" in request.secret_env else anthropic),
            "OPENAI_TIMEOUT": MODEL_CALL_TIMEOUT,
            "OPENAI_REQUEST_TIMEOUT": MODEL_CALL_TIMEOUT,
            "HTTPX_TIMEOUT": MODEL_CALL_TIMEOUT,
        } | request.env

    async def setup(self, rollout: Rollout) -> None:
        """Prepare the sandbox before the agent starts: upload files, run commands."""

    async def score(self, rollout: Rollout) -> float | dict[str, float] | None:
        """Return the reward, or metrics of which ``reward`` is one; may run commands in the sandbox before it goes."""
        return None

    async def after(self, rollout: Rollout) -> None:
        """Do what is left to do while the sandbox still lives: fetch files, write a record."""


class EpisodeEnvironment(Environment):
    """One that runs whole episodes by itself, in the worker's process: without gateway, tunnel and sandbox.

    Its other hooks are not called. A rollout of it is queued, leased, retried, cancelled and delivered as any other.
    """

    async def run(self, rollout: Rollout) -> None:
        """Run the episode, and record in ``rollout`` its ``episode``, ``reward`` and ``metrics``.

        Raises `RolloutError`; has ended all that it began also when it is cancelled.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Release what it holds for all episodes, when the worker ends."""


class CommandEnvironment(Environment):
    """The bundled environment ``command``: the request names the image and the command, and nothing is scored.

    The agent finds its task in ``ROLLOUT_PROMPT``: the prompt itself, or a list of messages as JSON. A variable holds
    64 KiB; a longer prompt is not given to the agent, which the result warns of.
    """

    def build_env_vars(self, request: RolloutRequest, rollout: Rollout) -> dict[str, str]:
        """Return the agent's variables, with its task; the request's ``env`` wins."""
        prompt = request.prompt if isinstance(request.prompt, str) else orjson.dumps(request.prompt).decode()
        if len(prompt.encode()) > LONGEST_PROMPT or "\x00" in prompt:
            rollout.warnings.append(
                "the prompt does not fit ROLLOUT_PROMPT (64 KiB, no NUL): use an environment whose setup uploads it"
            )
            prompt = ""
        return {"ROLLOUT_PROMPT": prompt} | super().build_env_vars(request, rollout)


def reward_and_metrics(scored: Any) -> tuple[float | None, dict[str, float]]:
    """Split what ``score`` returned into the reward and the metrics.

    Raises `EnvironmentHookError` for anything else, and for numbers that JSON cannot hold.
    """
    if scored is None:
        return None, {}
    if isinstance(scored, bool | int | float):
        return _finite("reward", scored), {}
    if isinstance(scored, dict) and all(isinstance(v, bool | int | float) for v in scored.values()):
        metrics = {str(name): _finite(str(name), value) for name, value in scored.items()}
        return metrics.get("reward"), metrics
    raise EnvironmentHookError(
        f"score returned {type(scored).__name__}; expected a float, or a dict of names to numbers"
    )


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise EnvironmentHookError(f"score returned {value} as {name}; expected a finite number")
    return float(value)
