"""What is left of rollouts that have ended: on the platform, on this machine, and at the gateway."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import psutil

from chaos.agents import RUN_VARIABLE
from chaos.fleet import Fleet, Tell
from producer import RolloutResult
from workers.reaper import carriers
from workers.state import gateway_id

_TICK = 0.5

Leaks = dict[str, list[str]]


def while_it_runs(fleet: Fleet, token: str, results: Iterable[RolloutResult]) -> Leaks:
    """Return what ended rollouts have left beside a fleet that lives on: its workers hold a tunnel each, rightly."""
    found: Leaks = {
        "agents": [f"{pid}: {_line(pid)}" for pid in sorted(carriers(RUN_VARIABLE).get(token, set()))],
        "registrations": _registrations(fleet, results),
    }
    if fleet.emulator:
        left = fleet.emulator.leaked()
        found |= {"sandboxes": left["sandboxes"], "processes": [str(pid) for pid in left["processes"]]}
        found["tunnels"] = _tunnels(fleet)
    else:
        found["sandboxes"] = _folders(fleet.sandboxes, depth=2)
    return {what: left for what, left in found.items() if left}


def after_its_end(fleet: Fleet, token: str) -> Leaks:
    """Return what is left when every worker has ended in order."""
    found: Leaks = {"agents": [f"{pid}: {_line(pid)}" for pid in sorted(carriers(RUN_VARIABLE).get(token, set()))]}
    if fleet.emulator:
        found |= {what: [str(each) for each in left] for what, left in fleet.emulator.leaked().items()}
        found["frpc"] = [f"{t['frpc_pid']} of {t['tunnel_id']}" for t in fleet.emulator.tunnels() if t["frpc_pid"]]
    else:
        found["sandboxes"] = _folders(fleet.sandboxes, depth=1)
    return {what: left for what, left in found.items() if left}


def wait_until_none(fleet: Fleet, token: str, results: Iterable[RolloutResult], limit: float, tell: Tell) -> Leaks:
    """Give the fleet's own sweeps ``limit`` seconds to clear up; returns what they have not.

    That need be no fault: they spare for a while what no ended attempt is known to have left, such as the tunnel of a
    worker that died while it ran nothing.
    """
    results, began, first = list(results), time.monotonic(), True
    while True:
        left = while_it_runs(fleet, token, results)
        waited = time.monotonic() - began
        if not left or waited > limit:
            tell(f"left after {waited:.1f} s: {left or 'nothing'}")
            return left
        if first:
            tell(f"left at the end: { {what: len(each) for what, each in left.items()} }; waiting for the sweeps")
        first = False
        time.sleep(_TICK)


def _tunnels(fleet: Fleet) -> list[str]:
    """Return the registrations that no living process uses: its frpc is no child of a worker that lives."""
    assert fleet.emulator is not None
    pids = {part.process.pid for part in fleet.workers}
    open_ones = [t for t in fleet.emulator.tunnels() if not t["deleted"]]
    return [t["tunnel_id"] for t in open_ones if not pids & _ancestors(t["frpc_pid"])]


def _ancestors(pid: int | None) -> set[int]:
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()} if pid else set()
    except psutil.Error:
        return set()


def _registrations(fleet: Fleet, results: Iterable[RolloutResult]) -> list[str]:
    """Ask the gateway for every attempt of every rollout; it has no list of what is registered."""
    headers = {"Authorization": f"Bearer {fleet.stack.control_key}"}
    left = []
    with httpx.Client(base_url=fleet.stack.gateway_url, headers=headers, timeout=30, trust_env=False) as client:
        for result in results:
            for attempt in range(1, result.attempt + 1):
                name = gateway_id(result.rollout_id, attempt)
                status = client.get(f"/v1/rollouts/{name}/trajectory").status_code
                if status not in {200, 404}:
                    raise RuntimeError(f"the gateway answers {status} when asked for {name}")
                left += [name] if status == 200 else []
    return left


def _folders(top: Path, depth: int) -> list[str]:
    """Return the folders ``depth`` levels below ``top``: workers' own folders, and in these those of sandboxes."""
    pattern = "/".join(["*"] * depth)
    return [str(path.relative_to(top)) for path in top.glob(pattern) if path.is_dir()]


def _line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return os.strerror(3)
