"""The seeded script: what is broken, one thing after the other. The sequence depends on the seed alone."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from emulators.prime import PrimeEmulator
from support import wait_until

from chaos.fleet import Fleet, Part, Tell
from chaos.recovery import Recoveries

#: Seconds between two actions.
PAUSE = (0.5, 3.0)
#: Seconds that a quiet kill waits for every part to be whole.
CALM_LIMIT = 20.0
#: As `PAUSE`, and the greatest strength, in a round.
ROUND_PAUSE, ROUND_STRENGTH = (0.3, 1.0), 0.4
#: How many rollouts a worker must run for a round to kill it quietly.
_WORTH_WATCHING = 3
#: Seconds for which a round tries what is not possible at the moment.
_INSIST = 30.0
_RETRY = 0.1


@dataclass(frozen=True)
class Step:
    """One action: after how many seconds, to which worker, and how strong (0 to 1)."""

    pause: float
    action: str
    worker: int
    strength: float


#: How often each action is chosen, relative to the others; those of the second part need the platform.
ACTIONS = {
    "kill_worker": 3,
    "kill_worker_quietly": 3,
    "stop_worker": 2,
    "term_worker": 2,
    "term_redis": 1,
    "kill_redis": 1,
    "cut_redis": 2,
    "stall_redis": 2,
    "kill_gateway": 1,
    "kill_beat": 1,
    "run_two_beats": 1,
}
PLATFORM_ACTIONS = {
    "kill_frpc": 2,
    "delete_tunnel": 1,
    "fail_create": 1,
    "fail_delete": 1,
    "fail_polls": 1,
}


def steps(seed: str, *, platform: bool) -> Iterator[Step]:
    """Return the endless sequence of a seed."""
    rng = random.Random(f"script-{seed}")
    actions = ACTIONS | (PLATFORM_ACTIONS if platform else {})
    names, weights = list(actions), list(actions.values())
    while True:
        yield Step(rng.uniform(*PAUSE), rng.choices(names, weights)[0], rng.randrange(1000), rng.random())


def round_of(seed: str, *, platform: bool) -> list[Step]:
    """Return each action once, in the order and strength of a seed; of the two ways to restart Redis, one.

    The quiet kill comes first: it need not wait for the end of what another action began.
    """
    rng = random.Random(f"round-{seed}")
    first, left_out = "kill_worker_quietly", rng.choice(["term_redis", "kill_redis"])
    names = [name for name in ACTIONS | (PLATFORM_ACTIONS if platform else {}) if name not in {first, left_out}]
    rng.shuffle(names)
    return [
        Step(rng.uniform(*ROUND_PAUSE), name, rng.randrange(1000), rng.uniform(0.0, ROUND_STRENGTH))
        for name in [first, *names]
    ]


class Script:
    """Does steps to a fleet until it is stopped, in a thread of its own.

    One that ``insists`` goes only for workers that run rollouts, and tries again what is not possible at the moment; a
    step that stays so is a failure.
    """

    def __init__(
        self, fleet: Fleet, recoveries: Recoveries, steps: Iterable[Step], tell: Tell, *, insists: bool
    ) -> None:
        self.done: dict[str, int] = {}
        self.last = "nothing yet"
        self.failure: str | None = None
        self._fleet = fleet
        self._recoveries = recoveries
        self._steps = steps
        self._insists = insists
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="script", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    @property
    def is_over(self) -> bool:
        """Whether all is done, or nothing more can be."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        for step in self._steps:
            if self._over.wait(step.pause):
                if self._insists:
                    self._fail_with(f"{step.action}: no time was left")
                return
            try:
                what = self._do(step)
            except BaseException as error:  # pytest's failures are none of Exception
                self._fail_with(f"{step.action}: {error!r}")
                return
            if what is not None:
                self.done[step.action] = self.done.get(step.action, 0) + 1
            elif self._insists:
                self._fail_with(f"{step.action}: not possible")
                return
            self.last = f"{step.action}: {what or 'not possible now'}"
            self._tell(self.last)

    def _do(self, step: Step) -> str | None:
        act: Callable[[Step], str | None] = getattr(self, f"_{step.action}")
        what, end = act(step), time.monotonic() + _INSIST
        while what is None and self._insists and time.monotonic() < end and not self._over.wait(_RETRY):
            what = act(step)
        return what

    def _fail_with(self, what: str) -> None:
        self.failure = what
        self._tell(f"FAULT of the suite: {what}")

    def _worker(self, step: Step, *, runs: int = 1) -> Part | None:
        """Choose a worker; a script that insists wants one that is neither stopped nor ending and ``runs`` rollouts."""
        workers = self._fleet.workers
        if self._insists:
            running = self._recoveries.running_on
            workers = [w for w in workers if not w.stopped and not w.told and len(running(w)) >= runs]
        return workers[step.worker % len(workers)] if workers else None

    # -- workers -------------------------------------------------------------------------------------------------------

    def _kill_worker(self, step: Step) -> str | None:
        part = self._worker(step)
        watched = self._recoveries.watch(part, quiet=False) if part else 0
        return f"{part.name}, {watched} rollouts" if part and self._kill(part, step) else None

    def _kill_worker_quietly(self, step: Step) -> str | None:
        """Kill a worker while everything else is whole, and do nothing more until its rollouts run again."""
        fleet, calm_from = self._fleet, time.monotonic() + CALM_LIMIT
        while not (fleet.is_calm and self._recoveries.trusted and (part := self._worker(step, runs=_WORTH_WATCHING))):
            if time.monotonic() > calm_from or self._over.wait(0.1):
                return None
        watched = self._recoveries.watch(part, quiet=True)
        self._kill(part, step)
        end = time.monotonic() + 4 * fleet.lease_ttl
        while not self._recoveries.settled and time.monotonic() < end and not self._over.wait(0.05):
            pass
        return f"{part.name}, {watched} rollouts, recovered: {self._recoveries.settled}"

    def _kill(self, part: Part, step: Step) -> bool:
        return self._fleet.tell_to_end(part, signal.SIGKILL, away=step.strength)

    def _stop_worker(self, step: Step) -> str | None:
        part, seconds = self._worker(step), (1.2 + 1.3 * step.strength) * self._fleet.lease_ttl
        return f"{part.name} for {seconds:.1f} s" if part and self._fleet.stop(part, seconds) else None

    def _term_worker(self, step: Step) -> str | None:
        part = self._worker(step)
        told = part and self._fleet.tell_to_end(part, signal.SIGTERM, away=step.strength)
        return part.name if part and told else None

    # -- Redis ---------------------------------------------------------------------------------------------------------

    def _term_redis(self, step: Step) -> str:
        return self._restart_redis(signal.SIGTERM, step)

    def _kill_redis(self, step: Step) -> str:
        return self._restart_redis(signal.SIGKILL, step)

    def _restart_redis(self, sig: signal.Signals, step: Step) -> str:
        fleet, away = self._fleet, 2 * step.strength * self._fleet.lease_ttl
        with self._recoveries.redis_disturbed():
            fleet.server.stop(sig)
            self._over.wait(away)
            fleet.server.start()
        return f"{sig.name}, away for {away:.1f} s"

    def _cut_redis(self, step: Step) -> str:
        with self._recoveries.redis_disturbed():
            return f"{self._fleet.proxy.cut()} connections"

    def _stall_redis(self, step: Step) -> str:
        fleet, seconds = self._fleet, 2 * step.strength * self._fleet.lease_ttl
        fleet.proxy.stall()

        def resume() -> None:
            with self._recoveries.redis_disturbed():
                fleet.proxy.resume()

        fleet.later(seconds, resume)
        return f"for {seconds:.1f} s"

    # -- gateway and beat ----------------------------------------------------------------------------------------------

    def _kill_gateway(self, step: Step) -> str | None:
        killed = self._fleet.tell_to_end(self._fleet.gateway, signal.SIGKILL, away=step.strength)
        return f"away for {step.strength:.1f} s or more" if killed else None

    def _kill_beat(self, step: Step) -> str | None:
        away = 10 * step.strength
        return f"away for {away:.1f} s" if self._fleet.tell_to_end(self._fleet.beat, signal.SIGKILL, away) else None

    def _run_two_beats(self, step: Step) -> str:
        seconds = 3 + 7 * step.strength
        self._fleet.another_beat(seconds)
        return f"for {seconds:.1f} s"

    # -- the platform --------------------------------------------------------------------------------------------------

    def _kill_frpc(self, step: Step) -> str | None:
        tunnel = self._tunnel(step)
        return f"{tunnel}: {self._emulator.kill_frpc(tunnel)}" if tunnel else None

    def _delete_tunnel(self, step: Step) -> str | None:
        tunnel = self._tunnel(step)
        if tunnel:
            self._emulator.delete_tunnel(tunnel)
        return tunnel

    def _tunnel(self, step: Step) -> str | None:
        alive = [t["tunnel_id"] for t in self._emulator.tunnels() if not t["deleted"] and t["frpc_pid"]]
        return alive[step.worker % len(alive)] if alive else None

    def _fail_create(self, step: Step) -> str:
        return self._fail("create_sandbox", step)

    def _fail_delete(self, step: Step) -> str:
        return self._fail("delete_sandbox", step)

    def _fail_polls(self, step: Step) -> str:
        return self._fail("job_statuses", step)

    def _fail(self, endpoint: str, step: Step) -> str:
        self._emulator.fault(endpoint, status=500, times=None)
        self._fleet.later(1.0, self._emulator.clear_faults)
        return f"{endpoint}: 500 for 1 s"

    @property
    def _emulator(self) -> PrimeEmulator:
        assert self._fleet.emulator is not None
        return self._fleet.emulator


def wait_calm(fleet: Fleet, timeout: float) -> None:
    """Wait until every part is whole; raises pytest's failure when it is not in time."""
    wait_until(lambda: fleet.is_calm, timeout=timeout, what="every worker to take work again")
