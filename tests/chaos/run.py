"""The chaos suite as a command: prints what it does on stderr and one line of JSON on stdout.

    python tests/chaos/run.py --rollouts 1000 --workers 3 --seed 1

Exit status 0 when every rollout's result was delivered once and nothing is left over.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from dataclasses import fields
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from chaos.scenario import Options, passed, report, run  # noqa: E402 - found only now


def parsed(arguments: list[str] | None = None) -> Options:
    """Return the options of a command line; without a seed, one is drawn and printed with the result."""
    parser = argparse.ArgumentParser(description="Break a fleet while it runs rollouts, and count what came of it.")
    parser.add_argument("--rollouts", type=int, default=Options.rollouts, help="split between the systems")
    parser.add_argument("--workers", type=int, default=Options.workers)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--systems", default=",".join(Options.systems), help="local, prime or both, by a comma")
    parser.add_argument("--concurrency", type=int, default=Options.concurrency, help="rollouts at one time in a worker")
    parser.add_argument("--in-flight", type=int, default=Options.in_flight, help="rollouts at one time in all")
    parser.add_argument("--lease-ttl", type=float, default=Options.lease_ttl, help="seconds")
    parser.add_argument("--chaos-limit", type=float, default=Options.chaos_limit, help="seconds, for each system")
    parser.add_argument("--sweep-limit", type=float, default=Options.sweep_limit, help="seconds to clear up at the end")
    parser.add_argument("--keep", type=Path, default=None, help="folder in which logs and data are kept")
    given = vars(parser.parse_args(arguments))
    given["systems"] = tuple(given["systems"].split(","))
    if given["seed"] is None:
        given["seed"] = random.randrange(1_000_000)
    return Options(**{f.name: given[f.name] for f in fields(Options) if f.name in given})


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    options = parsed()
    numbers = report(options, run(options))
    print(json.dumps(numbers), flush=True)
    return 0 if passed(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
