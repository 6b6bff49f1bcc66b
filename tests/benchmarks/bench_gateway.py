"""The bundled gateway against ``rllm-model-gateway`` 0.1.0 and against the model server alone, in one run.

The model server (`gateway_parts/model.py`) answers 1,000 prompt ids and 200 completion tokens with logprobs, 26 KB, at
once; the load generator (`gateway_parts/load.py`) has one connection a client. Both are bare protocols on uvloop: the
lines ``direct`` are what they reach without a gateway, and each line tells the share of a core that they took, so a
line whose ``load_cpu`` and ``model_cpu`` are well below 1 was not held up by them. On a machine with few cores all of
them share these: only ratios inside one run mean anything.

``calls``: rounds of ``direct``, ``ours``, ``journal`` (ours, with a journal) and ``peer`` in turn, at 32 clients and
at 1. ``streams``: 1,000 streams of 50 tokens a second at a time, direct and through ours, begun within ``--spread``
seconds and then all at once; the latency of a chunk is the time from the model server's write to the load generator's
read, and ``*_waited`` the share of the time in which a process could have run and no core was free. ``first``: the time
from a request to a stream's first event, direct and through ours, one stream at a time. ``memory``: rollouts of 50
turns whose prompt grows to 32k tokens. The peer is installed into a virtual environment at first use (``--venv``).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import HERE, default_venv, finish, python_of, report

PARTS = HERE / "gateway_parts"
ROOT = HERE.parents[1]
HOST = "127.0.0.1"
OURS = "from workers.gateway.server import GatewaySettings, run_gateway; run_gateway(GatewaySettings())"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(command: list[str], url: str, variables: dict[str, str]) -> Iterator[psutil.Process]:
    """Run a server until the block ends; ``url`` must answer before it begins."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLOUTS_", "PYTHON"))} | variables
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not answers(url):
            assert process.poll() is None, f"{command} ended"
            assert time.monotonic() < end, f"{url} does not answer"
            time.sleep(0.02)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        httpx.get(url, trust_env=False, timeout=5)
    except httpx.HTTPError:
        return False
    return True


@contextmanager
def model_server(*options: str) -> Iterator[tuple[int, psutil.Process]]:
    port = free_port()
    command = [sys.executable, str(PARTS / "model.py"), "--port", str(port), *options]
    with running(command, f"http://{HOST}:{port}", {}) as process:
        yield port, process


@contextmanager
def our_gateway(model_port: int, clients: int, journal: Path | None = None) -> Iterator[tuple[int, psutil.Process]]:
    """Run ours, with a rollout registered for each client."""
    port = free_port()
    variables = {
        "PYTHONPATH": str(ROOT),
        "ROLLOUTS_GATEWAY_UPSTREAM": f"http://{HOST}:{model_port}",
        "ROLLOUTS_GATEWAY_PORT": str(port),
    } | ({"ROLLOUTS_GATEWAY_JOURNAL": str(journal)} if journal else {})
    url = f"http://{HOST}:{port}"
    with running([sys.executable, "-c", OURS], f"{url}/healthz", variables) as process:
        with httpx.Client(base_url=url, trust_env=False) as client:
            for n in range(clients):
                client.post(f"/v1/rollouts/r-{n}/register", json={"model": "m"}).raise_for_status()
        yield port, process


@contextmanager
def peers_gateway(model_port: int, python: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run the peer, with its traces in memory, which is the faster of its two stores."""
    port = free_port()
    command = [str(python), "-m", "rllm_model_gateway", "--host", HOST, "--port", str(port)]
    command += ["--worker", f"http://{HOST}:{model_port}", "--store", "memory", "--log-level", "warning"]
    with running(command, f"http://{HOST}:{port}/health", {}) as process:
        yield port, process


def load(mode: str, port: int, path: str, clients: int, calls: int = 1, spread: float = 0.0) -> dict[str, Any]:
    command = [sys.executable, str(PARTS / "load.py"), mode, "--port", str(port), "--path", path]
    command += ["--clients", str(clients), "--calls", str(calls), "--spread", str(spread)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    numbers: dict[str, Any] = json.loads(done.stdout)
    return numbers


def waited(process: psutil.Process) -> float:
    """Return the seconds in which a process could have run, and something else did on all cores (Linux)."""
    schedstat = Path(f"/proc/{process.pid}/schedstat")
    return int(schedstat.read_text().split()[1]) / 1e9 if schedstat.exists() else 0.0


def measured(
    mode: str, target: Target, model: psutil.Process, clients: int, calls: int = 1, spread: float = 0.0
) -> dict[str, Any]:
    """Run a load, and tell the shares of a core that the model server and the gateway took, and lacked."""
    watched = {"model": model} | ({"gateway": target.process} if target.process else {})
    before = {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}
    lacked = {name: -waited(process) for name, process in watched.items()}
    numbers = load(mode, target.port, target.path, clients, calls, spread)
    for name, process in watched.items():
        numbers[f"{name}_waited"] = round((lacked[name] + waited(process)) / numbers["seconds"], 3)
    used = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in watched.items()}
    numbers["load_cpu"] = numbers.pop("load_cpu_share")
    numbers["model_cpu"] = round(used["model"] / numbers["seconds"], 3)
    if target.process:
        numbers["gateway_us_per_item"] = round(used["gateway"] / max(1, numbers["count"]) * 1e6, 1)
        numbers["gateway_rss_mb"] = round(target.process.memory_info().rss / 1e6, 1)
    return numbers


class Target:
    """Where a load goes."""

    def __init__(self, port: int, path: str, process: psutil.Process | None = None) -> None:
        self.port, self.path, self.process = port, path, process


def bench_calls(given: argparse.Namespace) -> None:
    """Measure all sides in turn, and print what was required."""
    rounds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        model_port, model = stack.enter_context(model_server())
        journal = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = our_gateway(model_port, 32)
        targets = {
            "direct": Target(model_port, "/v1/chat/completions"),
            "ours": Target(*_first(stack.enter_context(ours), "/v1/rollouts/r-{n}/chat/completions")),
            "journal": Target(
                *_first(
                    stack.enter_context(our_gateway(model_port, 32, journal)), "/v1/rollouts/r-{n}/chat/completions"
                )
            ),
        }
        if not given.no_peer:
            peer = stack.enter_context(
                peers_gateway(model_port, python_of(given.venv, PARTS / "requirements.txt", "the peer"))
            )
            targets["peer"] = Target(*_first(peer, "/sessions/s-{n}/v1/chat/completions"))
        for target in targets.values():
            load("calls", target.port, target.path, 32, 5)  # warm
        for _ in range(given.rounds):
            for clients in (32, 1):
                for name, target in targets.items():
                    calls = max(
                        1,
                        (given.calls if name != "peer" else given.calls // 5) // clients // (4 if clients == 1 else 1),
                    )
                    numbers = measured("calls", target, model, clients, calls)
                    rounds.setdefault((name, clients), []).append(numbers)
                    report("gateway_calls", target=name, clients=clients, **numbers)
    compare(rounds)


def _first(running_gateway: tuple[int, psutil.Process], path: str) -> tuple[int, str, psutil.Process]:
    port, process = running_gateway
    return port, path, process


def compare(rounds: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    def median(name: str, clients: int, of: str) -> float:
        return statistics.median(each[of] for each in rounds[name, clients])

    def ratio(one: str, other: str, of: str) -> float:
        pairs = zip(rounds[one, 32], rounds[other, 32], strict=True)
        return statistics.median(mine[of] / theirs[of] for mine, theirs in pairs)

    numbers: dict[str, Any] = {
        "share_of_direct": ratio("ours", "direct", "per_second"),
        "share_of_direct_with_journal": ratio("journal", "direct", "per_second"),
        "added_p50_ms_at_1": median("ours", 1, "p50_ms") - median("direct", 1, "p50_ms"),
        "errors": sum(each["errors"] for group in rounds.values() for each in group),
    }
    if ("peer", 32) in rounds:
        numbers |= {
            "rate_against_peer": ratio("ours", "peer", "per_second"),
            "rate_against_peer_with_journal": ratio("journal", "peer", "per_second"),
            "p99_against_peer": ratio("ours", "peer", "p99_ms"),
            "cpu_against_peer": ratio("ours", "peer", "gateway_us_per_item"),
        }
    against_peer = {"rate_against_peer": (">=", 8), "p99_against_peer": ("<=", 0.2)}
    required = {"added_p50_ms_at_1": ("<=", 0.5), "errors": ("==", 0)} | (
        against_peer if ("peer", 32) in rounds else {}
    )
    report("gateway_ratios", required, **numbers)


def bench_streams(given: argparse.Namespace) -> None:
    """Measure slow streams, direct and through ours."""
    options = ["--tokens", str(given.tokens)]
    with model_server(*options) as (model_port, model), our_gateway(model_port, given.streams) as (port, process):
        targets = {
            "direct": Target(model_port, "/v1/chat/completions"),
            "ours": Target(port, "/v1/rollouts/r-{n}/chat/completions", process),
        }
        for spread in (given.spread, 0.0):
            found = {}
            for name, target in targets.items():
                found[name] = measured("streams", target, model, given.streams, spread=spread)
                report("gateway_streams", target=name, streams=given.streams, spread=spread, **found[name])
            # All in one moment is more than slow streams are: told, and not judged.
            judged = {"p99_ms": ("<=", 20), "rss_mb": ("<=", 400), "errors": ("==", 0)} if spread else None
            report(
                "gateway_streams_added" if spread else "gateway_streams_at_once",
                judged,
                spread=spread,
                p50_ms=found["ours"]["p50_ms"] - found["direct"]["p50_ms"],
                p99_ms=found["ours"]["p99_ms"] - found["direct"]["p99_ms"],
                rss_mb=found["ours"]["gateway_rss_mb"],
                errors=found["ours"]["errors"],
            )


def bench_first(given: argparse.Namespace) -> None:
    """Measure how much later than the model server's own a stream's first event is, in rounds of both.

    One stream at a time: more, without a pause between them, would wait for the gateway's CPU and nothing else.
    """
    rounds: dict[str, list[dict[str, Any]]] = {"direct": [], "ours": []}
    with model_server("--tokens", "4", "--rate", "1000") as (model_port, model), our_gateway(model_port, 1) as ours:
        targets = {
            "direct": Target(model_port, "/v1/chat/completions"),
            "ours": Target(*_first(ours, "/v1/rollouts/r-{n}/chat/completions")),
        }
        for _ in range(given.rounds):
            for name, target in targets.items():
                rounds[name].append(measured("first", target, model, 1, max(10, given.calls // 8)))
                report("gateway_first", target=name, clients=1, **rounds[name][-1])

    def added(of: str) -> float:
        pairs = zip(rounds["ours"], rounds["direct"], strict=True)
        return statistics.median(mine[of] - alone[of] for mine, alone in pairs)

    errors = sum(each["errors"] for group in rounds.values() for each in group)
    numbers = {"p50_ms": added("p50_ms"), "p99_ms": added("p99_ms"), "errors": errors}
    report("gateway_first_added", {"p50_ms": ("<=", 2), "errors": ("==", 0)}, **numbers)


def bench_memory(given: argparse.Namespace) -> None:
    """Measure rollouts of 50 turns, each prompt the whole conversation before it and 400 tokens more, to 32k."""
    from gateway_parts.memory import rollouts

    report("gateway_memory", **rollouts(given.memory_rollouts))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="Measurements of each side, in turn (3).")
    parser.add_argument("--calls", type=int, default=3200, help="Calls in each; a fifth for the peer (3,200).")
    parser.add_argument("--streams", type=int, default=1000, help="Streams at once (1,000).")
    parser.add_argument("--tokens", type=int, default=500, help="Chunks of each stream (500).")
    parser.add_argument("--spread", type=float, default=1.0, help="Seconds in which the streams begin (1).")
    parser.add_argument("--memory-rollouts", type=int, default=20, help="Rollouts whose memory is measured (20).")
    parser.add_argument("--no-peer", action="store_true", help="Leave the peer out.")
    parser.add_argument("--only", choices=["calls", "first", "streams", "memory"], help="One of them.")
    parser.add_argument("--venv", type=Path, default=default_venv("peer-gateway"), help="Where the peer is installed.")
    return parser.parse_args()


def main() -> None:
    """Run all of them, or the one that was asked for."""
    given = arguments()
    parts = {"calls": bench_calls, "first": bench_first, "streams": bench_streams, "memory": bench_memory}
    for name, part in parts.items():
        if given.only in {None, name}:
            part(given)


if __name__ == "__main__":
    main()
    finish()
