"""Polling together: how often, how many at a time, and who suffers from a look that fails.

On a clock that moves only when everybody waits: what is due together comes together, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from workers.errors import SandboxError
from workers.sandboxes import polls
from workers.sandboxes.polls import Answer, Ended, Failed, Poller, Unclear


class Platform:
    """Answers looks from a table that tests change, and notes them."""

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        self.answers: dict[str, Answer[int]] = {}
        self.failures: list[Exception] = []
        self.looks: list[tuple[float, tuple[str, ...]]] = []
        self.looked = asyncio.Event()

    async def ask(self, keys: Sequence[str]) -> Mapping[str, Answer[int]]:
        self.looks.append((asyncio.get_running_loop().time(), tuple(keys)))
        self.looked.set()
        if self.failures:
            raise self.failures.pop(0)
        return {key: Ended(self.ended[key]) if key in self.ended else self.answers.get(key) for key in keys}


class Leap(selectors.DefaultSelector):
    """Has the clock leap to the next moment at which something is due, instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing is due"
        self.now += max(0.0, timeout)
        return super().select(0)


class OwnTime(asyncio.SelectorEventLoop):
    """An event loop whose clock is that of its `Leap`."""

    def __init__(self) -> None:
        self._leap = Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        return self._leap.now


def run(body: Callable[[Platform], Awaitable[Any]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await body(Platform())

    with asyncio.Runner(loop_factory=OwnTime) as runner:
        runner.run(main())


def poller(platform: Platform, **options: Any) -> Poller[str, int]:
    return Poller(platform.ask, **({"first": 0.02, "longest": 0.1} | options))


async def ended(*waiting: Awaitable[int]) -> list[int]:
    return list(await asyncio.gather(*waiting))


def test_120_at_once_share_two_requests_a_round() -> None:
    async def body(platform: Platform) -> None:
        polls = poller(platform)
        waiting = [asyncio.create_task(polls.wait(f"job{i}")) for i in range(120)]
        await platform.looked.wait()
        while len(platform.looks) < 6:
            await asyncio.sleep(0.001)
        platform.ended = {f"job{i}": i for i in range(120)}
        assert await ended(*waiting) == list(range(120))
        sizes = [len(keys) for _, keys in platform.looks]
        assert sizes == [100, 20] * (len(sizes) // 2)

    run(body)


def test_those_that_are_due_at_about_the_same_time_share_a_request() -> None:
    async def body(platform: Platform) -> None:
        polls = poller(platform, first=0.1, longest=0.1)
        waiting = []
        for i in range(20):  # started one after the other, within a quarter of the interval
            waiting.append(asyncio.create_task(polls.wait(f"job{i}")))
            await asyncio.sleep(0.001)
        while len(platform.looks) < 4:
            await asyncio.sleep(0.001)
        platform.ended = dict.fromkeys([f"job{i}" for i in range(20)], 0)
        await ended(*waiting)
        assert [len(keys) for _, keys in platform.looks[1:4]] == [20, 20, 20]

    run(body)


def test_looks_are_frequent_at_first_and_rarer_later_up_to_the_longest_interval() -> None:
    async def body(platform: Platform) -> None:
        polls = poller(platform, first=0.02, share=0.5, longest=0.2)
        began = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(polls.wait("job"))
        while len(platform.looks) < 9:
            await asyncio.sleep(0.001)
        platform.ended = {"job": 7}
        assert await waiting == 7
        times = [at - began for at, _ in platform.looks]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert times[0] < 0.1
        assert gaps[0] < gaps[3] < 0.5
        assert max(gaps) < 0.4
        assert gaps[-1] >= 0.2 - 0.01

    run(body)


def test_one_bad_job_fails_alone() -> None:
    async def body(platform: Platform) -> None:
        polls = poller(platform)
        gone = SandboxError("sandbox b is gone")
        platform.answers = {"b": Failed(gone)}
        waiting = {key: asyncio.create_task(polls.wait(key)) for key in "abc"}
        with pytest.raises(SandboxError) as raised:
            await waiting["b"]
        assert raised.value is not gone, "each gets a copy, to which it may add"
        assert str(raised.value) == str(gone)
        platform.ended = {"a": 0, "c": 1}
        assert await ended(waiting["a"], waiting["c"]) == [0, 1]

    run(body)


def test_a_look_that_fails_as_a_whole_costs_nobody_anything() -> None:
    async def body(platform: Platform) -> None:
        polls = poller(platform)
        platform.failures = [SandboxError("500"), ConnectionError("dropped")]
        platform.ended = {"a": 0, "b": 1}
        assert await ended(polls.wait("a"), polls.wait("b")) == [0, 1]
        assert len(platform.looks) == 3

    run(body)


def test_a_job_that_the_answer_leaves_out_is_looked_at_again() -> None:
    async def body(platform: Platform) -> None:
        async def forgetful(keys: Sequence[str]) -> Mapping[str, Answer[int]]:
            platform.looks.append((0.0, tuple(keys)))
            return {} if len(platform.looks) == 1 else {key: Ended(3) for key in keys}

        assert await Poller(forgetful, first=0.01, longest=0.1).wait("a") == 3

    run(body)


def test_looks_that_fail_for_too_long_fail_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "BACKOFF", 0.01)

    async def body(platform: Platform) -> None:
        polls = poller(platform, patience=0.1, min_failures=3)
        platform.answers = {"a": Unclear(SandboxError("no idea"))}
        healthy = asyncio.create_task(polls.wait("b"))
        with pytest.raises(SandboxError, match="no idea"):
            await polls.wait("a")
        assert sum("a" in keys for _, keys in platform.looks) >= 3
        platform.ended = {"b": 0}
        assert await healthy == 0

    run(body)


def test_an_answer_in_between_begins_the_patience_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "BACKOFF", 0.01)

    async def body(platform: Platform) -> None:
        polls = poller(platform, patience=0.0, min_failures=3)
        waiting = asyncio.create_task(polls.wait("a"))
        for _ in range(3):
            platform.failures = [ConnectionError(), ConnectionError()]
            while platform.failures:
                await asyncio.sleep(0.001)
            looks = len(platform.looks)
            while len(platform.looks) == looks:
                await asyncio.sleep(0.001)
        platform.ended = {"a": 5}
        assert await waiting == 5

    run(body)


def test_retry_after_is_obeyed() -> None:
    async def body(platform: Platform) -> None:
        error = ConnectionError()
        error.retry_after = 0.4  # type: ignore[attr-defined]
        platform.failures = [error]
        platform.ended = {"a": 1}
        await poller(platform, longest=0.02).wait("a")
        (first, _), (second, _) = platform.looks
        assert second - first >= 0.4

    run(body)


def test_a_request_that_hangs_holds_up_only_its_own_jobs() -> None:
    async def body(platform: Platform) -> None:
        hangs = asyncio.Event()

        async def ask(keys: Sequence[str]) -> Mapping[str, Answer[int]]:
            if "a" in keys:
                await hangs.wait()
            return {key: Ended(0) for key in keys}

        polls = Poller(ask, first=0.01, longest=0.1, batch=1)
        stuck = asyncio.create_task(polls.wait("a"))
        assert await polls.wait("b") == 0
        assert not stuck.done()
        hangs.set()
        assert await stuck == 0

    run(body)


def test_nobody_is_looked_at_whom_nobody_waits_for() -> None:
    async def body(platform: Platform) -> None:
        polls = poller(platform)
        waiting = [asyncio.create_task(polls.wait("a")) for _ in range(2)]
        await platform.looked.wait()
        waiting[0].cancel()
        platform.looked.clear()
        await platform.looked.wait()  # the other one still waits
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        looks = len(platform.looks)
        platform.ended = {"b": 0}
        await polls.wait("b")
        assert [keys for _, keys in platform.looks[looks:]] == [("b",)]

    run(body)


def test_dropping_and_closing_tell_those_who_wait() -> None:
    async def body(platform: Platform) -> None:
        polls = poller(platform)
        waiting = {key: asyncio.create_task(polls.wait(key)) for key in "ab"}
        await platform.looked.wait()
        polls.drop(lambda key: key == "a", SandboxError("deleted"))
        with pytest.raises(SandboxError, match="deleted"):
            await waiting["a"]
        await polls.aclose(SandboxError("closed"))
        with pytest.raises(SandboxError, match="closed"):
            await waiting["b"]

    run(body)
