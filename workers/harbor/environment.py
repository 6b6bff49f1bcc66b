"""Runs a task in Harbor's format as a rollout: the agent in the task's sandbox, then the task's own verifier there.

The format is described in `producer.harbor`, which also makes the requests. The paths in a sandbox are Harbor's:
``/tests`` (uploaded when the agent has ended), ``/solution`` (for the agent ``oracle`` only), ``/logs/agent`` and
``/logs/verifier``. In a sandbox without a file system of its own (``Sandbox.root``) they lie below its folder, and the
texts that are uploaded are changed to name them there.

What it cannot guard against: verifier and agent share a sandbox, as in Harbor. A program that an agent leaves running
could read the tests and change a reward, and one that an agent has replaced (``bash``, ``python``) is what runs the
tests. It is not ended, because it may be the service that the task asks for.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from producer.agents import ORACLE
from producer.contract import RolloutRequest
from workers.environment import Environment
from workers.errors import EnvironmentHookError, InvalidRolloutError, SandboxError
from workers.gateway.protocol import rollout_path
from workers.harbor import scripts
from workers.harbor.agents import CHAT, Agent, agent_named
from workers.harbor.scripts import Place, Verdict, VerifierRun
from workers.harbor.task import HarborArguments, PackedFile, relocated_bytes, unpack
from workers.sandboxes.base import CommandResult, Sandbox
from workers.state import Rollout

#: Files of one task that are uploaded at one time.
UPLOADS = 8
#: Seconds for the small commands around an agent and a verifier, and for asking the gateway what it serves.
COMMAND_TIMEOUT, PROBE_TIMEOUT = 60.0, 10.0


class HarborEnvironment(Environment):
    """The bundled environment ``harbor``; see the module. ``environment_args`` are `task.HarborArguments`.

    The prompt is the task's instruction. The reward is what the verifier writes: a number in
    ``/logs/verifier/reward.txt``, or the ``reward`` of the numbers in ``reward.json``, which all become metrics. A
    verifier that fails, takes too long or leaves no such file is an error, never a reward of 0.
    """

    def run_command(self, request: RolloutRequest) -> str:
        """Return the line that starts the agent; raises `InvalidRolloutError` when the request's task cannot be run."""
        arguments = HarborArguments.of(request)
        agent_named(arguments.agent)
        if not isinstance(request.prompt, str) or not request.prompt.strip():
            raise InvalidRolloutError("prompt: expected the task's instruction, a text")
        return scripts.RUN_AGENT

    async def setup(self, rollout: Rollout) -> None:
        """Upload the instruction, the agent, and the files that the task lays over its image; install the agent."""
        sandbox, arguments = _sandbox(rollout), HarborArguments.of(rollout.request)
        agent, place = agent_named(arguments.agent), Place(sandbox.root)
        rollout.warnings += arguments.warnings
        await _check_gateway(rollout, agent)

        files = await asyncio.to_thread(unpack, "files", arguments.files) if arguments.files else []
        folders = [scripts.AGENT_DIR, scripts.VERIFIER, scripts.OTHER_LOGS]
        folders += [arguments.workdir] if arguments.workdir else []
        await _upload(sandbox, "/", files)
        await _upload_agent(sandbox, place, agent, rollout.request, arguments)
        await _execute(sandbox, scripts.prepare_line(place, folders, _executables("/", files)), "prepare the sandbox")
        if agent.install:
            await _install(sandbox, place, agent)

    async def score(self, rollout: Rollout) -> dict[str, float]:
        """Upload the tests, run the verifier, and return what it measured; raises `EnvironmentHookError`."""
        sandbox, arguments = _sandbox(rollout), HarborArguments.of(rollout.request)
        place = Place(sandbox.root)
        tests = await asyncio.to_thread(unpack, "tests", arguments.tests)
        if rollout.agent_timed_out:
            await _execute(sandbox, scripts.end_agent_line(place), "end the agent")
        await _execute(sandbox, scripts.clear_line(place), "clear the folders of tests and rewards")
        await _upload(sandbox, scripts.TESTS, tests)
        run = VerifierRun(place, arguments.workdir, arguments.verifier.env, _executables(scripts.TESTS, tests))
        verdict = await _verify(sandbox, place, run, arguments.verifier.timeout)
        metrics, ignored = measured(verdict)
        if ignored:
            rollout.warnings.append(f"reward.json: {', '.join(ignored)} are no numbers and are left out")
        return metrics


# -- the agent ---------------------------------------------------------------------------------------------------------


async def _check_gateway(rollout: Rollout, agent: Agent) -> None:
    """Raise `EnvironmentHookError` when the gateway lacks what ``agent`` calls: the agent itself would only say 404.

    A path that only takes POST answers 405 to GET, one that does not exist 404, and neither is a model call.
    """
    if agent.endpoint in {None, CHAT}:
        return
    import httpx  # a worker that asks no gateway this does without

    url = f"{rollout.gateway_url}{rollout_path(rollout.gateway_id)}/{agent.endpoint}"
    headers = {"Authorization": f"Bearer {rollout.api_key}"}
    try:
        # In a thread: making a client takes 30 ms, for its TLS.
        answer = await asyncio.to_thread(httpx.get, url, headers=headers, timeout=PROBE_TIMEOUT, trust_env=False)
    except httpx.HTTPError as error:
        raise EnvironmentHookError(f"the gateway cannot be reached at {url}: {error!r}", retryable=True) from error
    if answer.status_code == 404:
        raise EnvironmentHookError(
            f"the agent {agent.name!r} calls /{agent.endpoint}, which this gateway does not serve; give it a gateway "
            "that does, or the task an agent that calls /chat/completions (shell, mini-swe-agent, opencode)",
            detail=f"GET {url}: HTTP 404",
        )


async def _upload_agent(
    sandbox: Sandbox, place: Place, agent: Agent, request: RolloutRequest, arguments: HarborArguments
) -> None:
    """Upload everything that makes the agent; its scripts are written for the place where they run."""
    instruction = relocated_bytes(str(request.prompt).encode(), place.root)
    await sandbox.upload_bytes(f"{scripts.AGENT_DIR}/instruction.md", instruction)
    env = arguments.solution_env if agent.name == ORACLE else {}
    run = scripts.run_script(place, agent.command, arguments.workdir, env)
    await sandbox.upload_bytes(f"{scripts.AGENT_DIR}/run.sh", run.encode())
    for name, source in agent.files.items():
        await sandbox.upload_file(f"{scripts.AGENT_DIR}/{name}", source)
    if agent.install:
        install = scripts.install_script(place, agent.install, arguments.workdir)
        await sandbox.upload_bytes(f"{scripts.AGENT_DIR}/install.sh", install.encode())
    if agent.name == ORACLE:
        if not arguments.solution:
            raise InvalidRolloutError(f"environment_args.solution: missing; the agent {ORACLE!r} runs it")
        await _upload(sandbox, "/solution", await asyncio.to_thread(unpack, "solution", arguments.solution))


async def _install(sandbox: Sandbox, place: Place, agent: Agent) -> None:
    # A background job: an installation from the network may take longer than a platform lets a command take.
    job = await sandbox.start_job(f"exec sh {place.quoted(f'{scripts.AGENT_DIR}/install.sh')}")
    ended = await job.wait()
    if ended.exit_code != 0:
        raise EnvironmentHookError(
            f"the agent {agent.name!r} cannot be installed (exit status {ended.exit_code}); an image that has it needs "
            "no installation",
            detail=ended.stderr,
            retryable=True,  # what it fetches comes from the network
        )


# -- the verifier ------------------------------------------------------------------------------------------------------


async def _verify(sandbox: Sandbox, place: Place, run: VerifierRun, timeout: float) -> Verdict:
    job = await sandbox.start_job(run.line)
    try:
        async with asyncio.timeout(timeout):
            await job.ended()
    except TimeoutError:
        raise EnvironmentHookError(
            f"the verifier took longer than its {timeout:g} s", detail=await _tail(sandbox, place)
        ) from None
    ended = await job.wait()  # reading what it printed is not its time
    verdict = run.verdict(ended.stdout)
    if verdict is None:
        raise EnvironmentHookError(
            f"the verifier could not be run (exit status {ended.exit_code})", detail=f"{ended.stdout}\n{ended.stderr}"
        )
    return verdict


async def _tail(sandbox: Sandbox, place: Place) -> str:
    """Return the end of the verifier's output, for a report; nothing where that cannot be had."""
    try:
        printed = await sandbox.execute_command(scripts.tail_line(place), timeout=COMMAND_TIMEOUT)
    except SandboxError as error:
        return f"(its output cannot be read: {error.message})"
    return printed.stdout


def measured(verdict: Verdict) -> tuple[dict[str, float], list[str]]:
    """Return the metrics, ``reward`` among them, and the names in ``reward.json`` that are no numbers.

    As in Harbor, ``reward.json`` comes first, a ``reward`` that it lacks is taken from ``reward.txt``, and the
    verifier's exit status counts for nothing when a reward is there. Raises `EnvironmentHookError`.
    """
    metrics: dict[str, float] = {}
    ignored: list[str] = []
    if "reward.json" in verdict.rewards:
        metrics, ignored = _numbers(verdict)
    if "reward" not in metrics and "reward.txt" in verdict.rewards:
        metrics["reward"] = _number(verdict, "reward.txt", verdict.rewards["reward.txt"].strip())
    if "reward" not in metrics:
        names = ", ".join(sorted(metrics)) or "nothing"
        what = f"its reward.json names {names}, but no reward" if verdict.rewards else "it wrote no reward file"
        raise _bad(verdict, what)
    return metrics, ignored


def _numbers(verdict: Verdict) -> tuple[dict[str, float], list[str]]:
    try:
        found: Any = json.loads(verdict.rewards["reward.json"])
    except (ValueError, RecursionError) as error:
        raise _bad(verdict, f"its reward.json is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _bad(verdict, f"its reward.json holds {type(found).__name__}, not an object of numbers")
    numbers = {name: _number(verdict, name, value) for name, value in found.items() if _is_number(value)}
    return numbers, sorted(set(found) - set(numbers))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(verdict: Verdict, where: str, given: str | float) -> float:
    try:
        value = float(given)
    except (ValueError, OverflowError):
        raise _bad(verdict, f"its {where} is {str(given)[:80]!r}, not a number") from None
    if not math.isfinite(value):
        raise _bad(verdict, f"its {where} is {given}, not a finite number")
    return value


def _bad(verdict: Verdict, what: str) -> EnvironmentHookError:
    return EnvironmentHookError(
        f"the verifier gave no reward: {what} (exit status {verdict.exit_code})", detail=verdict.output
    )


# -- the sandbox -------------------------------------------------------------------------------------------------------


def _sandbox(rollout: Rollout) -> Sandbox:
    if rollout.sandbox is None:
        raise InvalidRolloutError("a Harbor task needs a sandbox")
    return rollout.sandbox


async def _execute(sandbox: Sandbox, line: str, what: str) -> CommandResult:
    ended = await sandbox.execute_command(line, timeout=COMMAND_TIMEOUT)
    if ended.exit_code != 0:
        raise EnvironmentHookError(
            f"could not {what} (exit status {ended.exit_code})", detail=f"{ended.stdout}\n{ended.stderr}"
        )
    return ended


async def _upload(sandbox: Sandbox, folder: str, files: Iterable[PackedFile]) -> None:
    """Upload ``files`` below ``folder``, a few at one time; texts are put in place for the sandbox's root."""
    waiting = iter(files)

    async def upload() -> None:
        for file in waiting:
            path = str(PurePosixPath(folder, file.name))
            await sandbox.upload_bytes(path, relocated_bytes(file.content, sandbox.root))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(UPLOADS):
                group.create_task(upload())
    except ExceptionGroup as failures:  # the others were cancelled for the first one
        raise failures.exceptions[0] from None


def _executables(folder: str, files: Iterable[PackedFile]) -> list[str]:
    return [str(PurePosixPath(folder, file.name)) for file in files if file.executable]
