"""Writes the capacity table of helm/README.md from what the benchmarks printed:

    make bench | tee bench.jsonl; PYTHONPATH=tests python tests/benchmarks/capacity.py bench.jsonl

A row whose benchmark is not among the lines keeps what it said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from marked import part, table, with_part

README = Path(__file__).parents[2] / "helm" / "README.md"

Numbers = Mapping[str, Any]

#: What is measured, the report that says it, and how.
ROWS: list[tuple[str, str, Callable[[Numbers], str]]] = [
    (
        "rollouts that one worker process holds",
        "in_flight",
        lambda n: f"{n['in_flight']:,} at once: {n['peak_rss_mb']:.0f} MB, loop lag p99 {n['loop_lag_p99_ms']:.0f} ms",
    ),
    (
        "rollouts that one worker process ends, of agents that do nothing",
        "throughput",
        lambda n: f"{n['whole_path_per_second']:.0f} a second",
    ),
    ("two worker processes against one, rollouts waiting", "scale_out", lambda n: f"{n['ratio']:.2f} times as many"),
    (
        "a rollout in Redis, besides its request and result",
        "scale_records",
        lambda n: (
            f"{n['queued_bytes'] / 1000:.1f} kB queued, {n['running_bytes'] / 1000:.1f} kB running, "
            f"{n['ended_bytes'] / 1000:.1f} kB ended with a small result"
        ),
    ),
    (
        "what one Redis does, one client on one connection",
        "scale_records",
        lambda n: (
            f"{n['submits_per_second']:,.0f} submissions, {n['claims_per_second']:,.0f} claims, "
            f"{n['commits_per_second']:,.0f} ends, {n['renewals_per_second']:,.0f} renewals a second"
        ),
    ),
    (
        "renewing all leases of 100,000 rollouts",
        "scale_records",
        lambda n: (
            f"{n['renewing_all_seconds']:.1f} s of Redis's time, four times in each lease: "
            f"{100 * n['share_of_lease_for_renewals']:.0f} % of it"
        ),
    ),
    (
        "10,000 queued, 5,000 running: sweep, status, scrape",
        "scale_view",
        lambda n: ", ".join(f"{n[of]['median']:.1f} ms" for of in ("sweep_ms", "status_ms", "scrape_ms")),
    ),
    ("a sweep that requeues 1,000 of dead workers", "scale_view", lambda n: f"{n['sweep_of_1000_lapsed_ms']:.0f} ms"),
    (
        "a producer",
        "enqueue",
        lambda n: f"enqueues {n['ours_per_second']:,.0f} a second, {n['ratio']:.1f} times plain `apply_async`",
    ),
    (
        "its consumer",
        "collect",
        lambda n: (
            f"collects {n['ours_per_second']:,.0f} small results a second, {n['ratio']:.1f} times `join_native`, "
            f"in {n['rss_mb']:.0f} MB"
        ),
    ),
    (
        "a trajectory of 50 turns to 32,000 tokens",
        "trajectory",
        lambda n: f"{n['stored_bytes'] / 1000:.0f} kB in Redis, {n['percent']:.1f} % of its JSON",
    ),
    (
        "such a rollout in the gateway's memory",
        "gateway_memory",
        lambda n: f"{n['kb_per_rollout']:.0f} kB",
    ),
    (
        "1,000 slow streams in one gateway process",
        "gateway_streams_added",
        lambda n: f"{n['rss_mb']:.0f} MB, {n['p50_ms']:.1f} ms later (p50), {n['p99_ms']:.0f} ms (p99)",
    ),
]


def made(text: str, lines: list[Numbers]) -> str:
    """Return the README with what these lines say in its table."""
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in part(text, "capacity").splitlines()}
    found = {str(numbers["benchmark"]): numbers for numbers in lines}
    rows = [
        [what, say(found[name]), f"`{name}`"] if name in found else kept[what].strip("| ").split(" | ")
        for what, name, say in ROWS
        if name in found or what in kept
    ]
    return with_part(text, "capacity", table(["what", "measured", "by"], rows))


if __name__ == "__main__":
    printed = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    reports = [json.loads(line) for line in printed if line.startswith('{"benchmark"')]
    README.write_text(made(README.read_text(), reports))
