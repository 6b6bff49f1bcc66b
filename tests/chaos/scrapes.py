"""Scrapes a worker all the while: whatever is broken just then, an answer that comes is a whole one."""

from __future__ import annotations

import threading

import httpx

#: Seconds between two scrapes; Prometheus itself comes less often.
_EVERY = 0.25
#: What every scrape has, with or without Redis.
_ALWAYS = ("rollouts_redis_up", "rollouts_concurrency", "rollouts_loop_behind_seconds", "rollouts_finished_total")


class Scrapes(threading.Thread):
    """Asks the admin port until `stop`; of all workers of this host, one that was free has it.

    ``good`` counts whole answers, ``bad`` tells of the others. Silence and an empty page are neither: workers are
    killed, stopped, and start.
    """

    def __init__(self, port: int) -> None:
        super().__init__(name="scrapes", daemon=True)
        self.good = 0
        self.bad: list[str] = []
        self.port = port
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._over = threading.Event()

    def run(self) -> None:
        """Scrape, until stopped."""
        with httpx.Client(timeout=10, trust_env=False) as client:
            while not self._over.wait(_EVERY):
                try:
                    answer = client.get(self._url)
                except httpx.HTTPError:
                    continue
                if answer.status_code == 200 and not answer.text:  # it is starting, and waits for Redis
                    continue
                missing = [name for name in _ALWAYS if name not in answer.text]
                if answer.status_code != 200 or missing:
                    self.bad.append(f"a scrape: HTTP {answer.status_code}, without {', '.join(missing) or 'nothing'}")
                else:
                    self.good += 1

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(15)
