"""No-op rollouts at once through verifiers' RolloutGatewayMixin, unmodified; prints one JSON line.

Run by ``bench_prime.py`` with the Python of a virtual environment that holds ``requirements.txt``, and nothing of this
project. The platform is the one that the ``PRIME_*`` variables name. ``start_command=None``, because prime-sandboxes
refuses the mixin's default since 0.3.0; all else that is not an option here keeps the mixin's defaults. Only
``rollout()`` is measured: no scoring, no saving, and the client is made once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import time
from typing import Any
from urllib.parse import urlsplit

import verifiers as vf
from datasets import Dataset
from ticker import summary, tick
from verifiers.clients import Client, resolve_client
from verifiers.types import ClientConfig


class NoopEnv(vf.RolloutGatewayMixin, vf.CliAgentEnv):
    """An agent that ends at once."""

    def __init__(self, gateway_port: int, poll_interval: float) -> None:
        dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "nothing"}], "answer": ""}])
        super().__init__(
            run_command="true",
            start_command=None,
            poll_interval=poll_interval,
            dataset=dataset,
            rubric=vf.Rubric(),
        )
        self.init_gateway(gateway_port=gateway_port)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def at_once(env: NoopEnv, client: Client, count: int) -> list[Any]:
    """Return the states of ``count`` rollouts, or what they raised."""
    one = {"prompt": [{"role": "user", "content": "nothing"}], "answer": "", "example_id": 0, "task": "noop"}
    runs = (env.rollout({**one, "example_id": n}, client, "null") for n in range(count))
    return await asyncio.gather(*runs, return_exceptions=True)


def failure_of(state: Any) -> str | None:
    """Return why a rollout failed, None when it completed."""
    if isinstance(state, BaseException):
        return repr(state)
    if state["error"] is not None:
        return repr(state["error"])
    return None if state["stop_condition"] == "completed" else state["stop_condition"]


async def measure(env: NoopEnv, client: Client, count: int) -> dict[str, Any]:
    lags: list[float] = []
    ticking = asyncio.create_task(tick(lambda _woke, late: lags.append(late)))
    cpu, began = cpu_seconds(), time.monotonic()
    states = await at_once(env, client, count)
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu
    ticking.cancel()
    failures = [why for state in states if (why := failure_of(state))]
    return {
        "rollouts": count,
        "completed": count - len(failures),
        "failed": len(failures),
        "first_failure": failures[0][:500] if failures else None,
        "seconds": round(seconds, 3),
        "rollouts_per_second": round((count - len(failures)) / seconds, 2),
        "loop_lag_ms": summary(lags),
        "cpu_seconds": round(cpu, 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gateway-url", required=True)
    options.add_argument("--rollouts", type=int, default=300)
    options.add_argument("--poll-interval", type=float, default=1.0)
    options.add_argument("--warm-up", type=int, default=1, help="Rollouts before the measurement begins.")
    given = options.parse_args()
    logging.disable(logging.WARNING)  # it warns of every rollout without turns
    port = urlsplit(given.gateway_url).port
    assert port, "the gateway's URL must name its port"
    env = NoopEnv(port, given.poll_interval)
    client = resolve_client(
        ClientConfig(api_base_url=f"{given.gateway_url}/v1", api_key_var="PRIME_API_KEY", max_retries=0)
    )
    try:
        for state in await at_once(env, client, given.warm_up):
            assert not (why := failure_of(state)), f"the warm-up failed: {why}"
        print(json.dumps(await measure(env, client, given.rollouts)), flush=True)
    finally:
        await env._teardown()


if __name__ == "__main__":
    asyncio.run(main())
