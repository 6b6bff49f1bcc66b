"""THE FLOW: one rollout, from its registration with the gateway to its score.

    register -> tunnel -> sandbox -> setup -> agent -> trajectory -> score -> clean up

Everything that is acquired is released in reverse order, whatever happens. The agent talks to the gateway directly;
this code never carries model traffic. Stage names in the log are those of the rollout gateway mixin.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from producer.contract import Phase
from workers.aio import first_of
from workers.attempt import Cleanup, in_phase, judge, log, quietly, record_trajectory, recorded, salvaged
from workers.environment import Environment, reward_and_metrics
from workers.errors import AgentError, AgentStalledError, TunnelError
from workers.gateway.protocol import Gateway, Registration, Trajectory, rollout_path
from workers.hooks import call_hook, derive
from workers.sandboxes.base import CommandResult, Sandbox, SandboxProvider, SandboxSpec
from workers.state import Rollout
from workers.tunnels.base import TunnelLease, TunnelProvider
from workers.watchdog import Limits, hard_limit, stalled

#: Seconds in which a sandbox must have started the agent.
_START_TIMEOUT = 120.0
#: Seconds in which what the agent printed must be read; a rollout is not lost for its output. A provider's own limit is
#: shorter, for it can say why.
_OUTPUT_TIMEOUT = 60.0
#: Variables that hold the rollout's own key, one for each API that the gateway speaks.
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")


@dataclass(frozen=True)
class Systems:
    """The three foreign systems that a rollout touches, as their protocols."""

    gateway: Gateway
    tunnels: TunnelProvider
    sandboxes: SandboxProvider
    #: What every sandbox of this worker is labelled with.
    labels: tuple[str, ...] = ()
    #: Bounds for requests that set none.
    limits: Limits = field(default_factory=Limits)


async def run_rollout(rollout: Rollout, environment: Environment, systems: Systems) -> None:
    """Run one attempt and record it in ``rollout``; returns also when it failed, with ``rollout.error`` set.

    Raises only `asyncio.CancelledError`, after clean-up.
    """
    request, gateway = rollout.request, systems.gateway
    async with recorded(rollout):
        command = derive(environment, "run_command", request)
        limit = systems.limits.attempt_of(rollout)
        async with Cleanup(rollout) as cleanup, hard_limit(rollout, limit):
            async with in_phase(rollout, Phase.REGISTER):
                await cleanup.enter(_registered(rollout, gateway))
                log(rollout, "register_rollout", "registered as %s", rollout.gateway_id)
                await _shut_out_earlier(rollout, gateway)

            async with salvaged(rollout, gateway):
                async with in_phase(rollout, Phase.TUNNEL):
                    tunnel = await _open_tunnel(rollout, systems.tunnels, cleanup)

                async with in_phase(rollout, Phase.SANDBOX):
                    spec = _sandbox_spec(rollout, environment, systems.labels, limit)
                    sandbox = await cleanup.enter(systems.sandboxes.create(spec))
                    rollout.sandbox, rollout.sandbox_id = sandbox, sandbox.id
                    log(rollout, "create_sandbox", "sandbox %s is ready", sandbox.id)

                async with in_phase(rollout, Phase.SETUP):
                    await call_hook(environment, "setup", rollout)

                async with in_phase(rollout, Phase.AGENT, bounded=False):  # its deadline is an outcome
                    await _run_agent(rollout, command, sandbox, tunnel, systems)

                async with in_phase(rollout, Phase.TRAJECTORY):
                    # An agent that ran out of time may have a call in flight that nobody waits for any more.
                    if rollout.agent_timed_out:
                        await gateway.cancel(rollout.gateway_url, rollout.gateway_id)
                    trajectory = await gateway.fetch_trajectory(rollout.gateway_url, rollout.gateway_id)
                    record_trajectory(rollout, trajectory)
                    log(rollout, "fetch_trajectory", "%d turns", trajectory.num_turns)
                    await _confirm_tunnel(rollout, tunnel, trajectory)
                    judge(rollout, trajectory)

                async with in_phase(rollout, Phase.SCORE):
                    rollout.reward, metrics = reward_and_metrics(await call_hook(environment, "score", rollout))
                    rollout.metrics |= {name: value for name, value in metrics.items() if name not in rollout.metrics}
                    await call_hook(environment, "after", rollout)


def _registered(rollout: Rollout, gateway: Gateway) -> AbstractAsyncContextManager[None]:
    request = rollout.request
    registration = Registration(
        model=request.model,
        sampling_params=request.sampling_params,
        max_turns=request.max_turns,
        max_seq_len=request.max_seq_len,
    )
    return gateway.registered(rollout.gateway_url, rollout.gateway_id, registration, api_key=rollout.api_key)


async def _shut_out_earlier(rollout: Rollout, gateway: Gateway) -> None:
    """Forget the registration of the attempt before: its worker may have died, and its agent may live on."""
    if earlier := rollout.earlier_gateway_id:
        await quietly(rollout, "unregister", gateway.unregister(rollout.gateway_url, earlier))


async def _open_tunnel(rollout: Rollout, tunnels: TunnelProvider, cleanup: Cleanup) -> TunnelLease:
    rollout.tunnel_local_addr = urlsplit(rollout.gateway_url).hostname
    log(rollout, "resolve_tunnel_local_addr", "gateway is at %s", rollout.tunnel_local_addr)
    tunnel = await cleanup.enter(tunnels.lease(rollout.gateway_url))
    rollout.tunnel_url, rollout.tunnel_id, rollout.tunnel_local_addr = (
        tunnel.url,
        tunnel.tunnel_id,
        tunnel.local_addr,
    )
    rollout.rollout_base_url = tunnel.url + rollout_path(rollout.gateway_id)
    log(rollout, "start_tunnel", "agents reach the gateway at %s", tunnel.url)
    return tunnel


def _sandbox_spec(
    rollout: Rollout, environment: Environment, labels: tuple[str, ...], limit: float | None
) -> SandboxSpec:
    request = rollout.request
    env: dict[str, str] = derive(environment, "build_env_vars", request, rollout)
    # The rollout's key is a secret too: variables of a sandbox are shown by its platform, secrets are not.
    keys = {name: env.pop(name) for name in _KEYS if name in env}
    deadlines = request.deadlines
    return SandboxSpec(
        name=f"{request.rollout_id}-{rollout.attempt}",
        image=derive(environment, "docker_image", request),
        start_command=request.start_command,
        resources=request.resources,
        env=env,
        secrets=keys | rollout.secrets,
        labels=(*request.labels, *labels, f"rollout:{request.rollout_id}", f"attempt:{rollout.attempt}"),
        # It must outlive every phase in which it is used, and no worker's death.
        ttl=min(sum(map(deadlines.of, Phase)), (limit or math.inf) + deadlines.cleanup)
        + _START_TIMEOUT
        + _OUTPUT_TIMEOUT,
        team_id=request.team_id,
        advanced=request.advanced,
    )


async def _run_agent(rollout: Rollout, command: str, sandbox: Sandbox, tunnel: TunnelLease, systems: Systems) -> None:
    """Start the agent and wait until it ends, its tunnel breaks, it stalls, or its time is up."""
    try:
        async with asyncio.timeout(_START_TIMEOUT):
            job = await sandbox.start_job(command)
    except TimeoutError:
        raise AgentError(f"the sandbox did not start the agent within {_START_TIMEOUT:.0f} s", retryable=True) from None
    rollout.agent_started_at = time.monotonic()
    log(rollout, "start_agent", "agent started")

    deadline = rollout.request.deadlines.agent
    log(rollout, "wait_for_agent_completion", "waiting up to %.0f s", deadline)
    watches = [tunnel.broken()]
    if idle := systems.limits.idle_of(rollout):
        ask = partial(systems.gateway.progress, rollout.gateway_url, rollout.gateway_id)
        watches.append(stalled(rollout, idle, ask, tunnel.confirm))
    try:
        code = await first_of(job.ended(), *watches, timeout=deadline)
    except TunnelError as error:
        log(rollout, "tunnel_died", "%s", error)
        raise
    except AgentStalledError:
        await _record_output(rollout, job.output())
        raise
    rollout.agent_ended_at = time.monotonic()
    rollout.agent_exit_code = code  # before its output is read, which may fail
    rollout.agent_completed = code is not None
    rollout.agent_timed_out = code is None
    await _record_output(rollout, job.output() if code is None else job.wait())
    log(rollout, "agent_completed", "exit code %s%s", code, " (timed out)" if code is None else "")


async def _confirm_tunnel(rollout: Rollout, tunnel: TunnelLease, trajectory: Trajectory) -> None:
    """Raise `TunnelError` if the agent may have ended because its tunnel did not serve.

    An agent that gives up at its first failed call ends before anybody hears of the outage, perhaps with exit code 0
    and half of its turns. One that made a call after the outage has come through it.
    """
    if not rollout.agent_completed:
        return
    idle = trajectory.idle_seconds
    heard = rollout.agent_started_at if idle is None else time.monotonic() - idle
    try:
        await tunnel.confirm(since=heard, until=rollout.agent_ended_at)
    except TunnelError as error:
        log(rollout, "tunnel_died", "%s", error)
        raise


async def _record_output(rollout: Rollout, reading: Awaitable[CommandResult | None]) -> None:
    try:
        async with asyncio.timeout(_OUTPUT_TIMEOUT):
            output = await reading
    except TimeoutError:
        rollout.warnings.append(f"what the agent printed could not be read within {_OUTPUT_TIMEOUT:.0f} s")
        return
    if output is not None:
        rollout.agent_stdout, rollout.agent_stderr = output.stdout, output.stderr
