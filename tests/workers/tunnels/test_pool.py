"""The tunnel pool's promises, each on a service of plain objects and on the emulated platform."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from workers.errors import TunnelError
from workers.tunnels.backend import Limits, RegistrationGoneError, StartRefusedError
from workers.tunnels.pool import TunnelPool

GATEWAY = "http://127.0.0.1:8080"
LEASES = 20


async def hold(stack: AsyncExitStack, pool: TunnelPool, number: int = LEASES, url: str = GATEWAY) -> list[Any]:
    return list(await asyncio.gather(*(stack.enter_async_context(pool.lease(url)) for _ in range(number))))


async def ends_of(leases: list[Any]) -> list[TunnelError]:
    """Wait until all ``leases`` are broken, and return why."""
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*(lease.broken() for lease in leases), return_exceptions=True)
    assert all(isinstance(end, TunnelError) for end in ends), ends
    return ends  # type: ignore[return-value]


async def still_holds(leases: list[Any]) -> bool:
    """Whether none is broken, after everything that is ready to run has run."""
    waits = [asyncio.ensure_future(lease.broken()) for lease in leases]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    broken = [wait for wait in waits if wait.done()]
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    return not broken


# -- one tunnel for all ------------------------------------------------------------------------------------------------


def test_100_concurrent_callers_wait_for_one_start(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> set[tuple[str, int]]:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool, 100)
            return {(lease.url, lease.generation) for lease in leases}

    assert len(scenario(world.backend(), story)) == 1
    assert world.starts == 1
    assert world.leaked() == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_caller_who_comes_just_when_the_start_ends_does_not_hold_the_loop(
    service: Any, scenario: Any, fails: bool
) -> None:
    """Between the end of the start's task and its callbacks there is a moment in which others may run."""

    async def story(pool: TunnelPool) -> list[object]:
        under_way, ended = asyncio.Event(), asyncio.Event()
        plain = service.open

        def open_gated(*args: Any) -> Any:
            tunnel = plain(*args)
            started = tunnel.start

            async def start(*, timeout: float) -> None:
                await started(timeout=timeout)
                under_way.set()
                await ended.wait()
                if fails:
                    raise StartRefusedError("no", retryable=False)

            tunnel.start = start
            return tunnel

        service.open = open_gated

        async def once() -> object:
            async with pool.lease(GATEWAY) as lease:
                return lease.url

        first = asyncio.create_task(once())
        await under_way.wait()
        ended.set()  # the start's next step is ready to run, ...
        late = asyncio.create_task(once())  # ... and right behind it, before its callbacks, that of one who comes now
        return await asyncio.gather(first, late, return_exceptions=True)

    first, late = scenario(service, story)
    assert [isinstance(end, TunnelError if fails else str) for end in (first, late)] == [True, True]


def test_gateways_have_tunnels_of_their_own_and_paths_share_one(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> list[str]:
        urls = [GATEWAY, GATEWAY + "/", "HTTP://127.0.0.1:8080/prefix/", "http://127.0.0.1:9090"]
        async with AsyncExitStack() as stack:
            return [(await hold(stack, pool, 1, url))[0].url for url in urls]

    plain, slash, prefix, other = scenario(world.backend(), story)
    assert (slash, prefix) == (plain, f"{plain}/prefix")
    assert other != plain
    assert world.starts == 2
    assert world.leaked() == []


def test_an_ipv6_gateway_is_reported_as_a_url(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> str:
        async with pool.lease("http://[::1]:8080") as lease:
            assert lease.local_addr == "::1"
            return str(pool.report()[0]["gateway_url"])

    assert scenario(service, story) == "http://[::1]:8080"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://gateway.internal", "plain HTTP"),
        ("http://127.0.0.1:99999", "gateway_url"),
        ('http://a"b:80', "expected http://HOST:PORT"),
        ("ftp://host", "expected http://HOST:PORT"),
        ("http://user:word@host", "expected http://HOST:PORT"),
    ],
)
def test_a_gateway_that_no_tunnel_can_lead_to_is_refused(service: Any, scenario: Any, url: str, says: str) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(url):
            pytest.fail("was not refused")

    with pytest.raises(TunnelError, match=says) as caught:
        scenario(service, story)
    assert not caught.value.retryable
    assert service.calls == []


# -- a tunnel that fails under its rollouts ----------------------------------------------------------------------------


def test_a_killed_process_is_restarted_under_the_same_url_and_no_lease_breaks(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool)
            world.kill(leases[0].tunnel_id)
            await scenario.until(lambda: pool.report()[0]["restarts"] == 1, "the restart")
            assert await still_holds(leases)
            later = (await hold(stack, pool, 1))[0]
            assert (later.url, later.generation) == (leases[0].url, 1)
            assert pool.report()[0]["alive"]

    scenario(world.backend(), story)
    assert world.starts == 1
    assert world.leaked() == []


def test_a_dead_process_is_noticed_within_a_second(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> float:
        async with pool.lease(GATEWAY) as lease:
            service.tunnels[lease.tunnel_id].running = False
            killed = time.monotonic()
            await scenario.until(lambda: "restart" in service.calls)
            return time.monotonic() - killed

    assert Limits().watch_interval <= 0.5
    assert scenario(service, story, Limits()) < 15, "its end is seen by nothing else"


def test_a_caller_during_a_restart_waits_for_it(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            (lease,) = await hold(stack, pool, 1)
            service.faults["restart"] = ["hang"]
            service.tunnels[lease.tunnel_id].running = False
            await scenario.until(lambda: "restart" in service.calls)
            assert not pool.report()[0]["alive"]
            waiting = asyncio.create_task(hold(stack, pool, 1))
            await asyncio.sleep(0)
            assert not waiting.done()
            service.gate.set()
            assert (await waiting)[0].url == lease.url

    scenario(service, story)
    assert service.calls.count("start") == 1


def test_a_deleted_registration_breaks_all_leases_with_frpcs_output_and_a_new_generation_serves(
    world: Any, scenario: Any
) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool)
            world.delete(leases[0].tunnel_id)
            ends = await ends_of(leases)
            assert len({id(end) for end in ends}) == LEASES, "each rollout writes its phase into its own"
            for end in ends:
                assert (end.retryable, leases[0].tunnel_id in end.message) == (True, True)
                assert "start proxy success" in (end.detail or "")
            new = (await hold(stack, pool, 1))[0]
            assert (new.generation, new.url != leases[0].url) == (2, True)
            assert await still_holds([new])

    scenario(world.backend(), story)
    assert world.starts == 2
    assert world.leaked() == []


def test_a_lease_of_the_old_generation_breaks_however_alive_the_new_one_is(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            (old,) = await hold(stack, pool, 1)
            world.delete(old.tunnel_id)
            await scenario.until(lambda: pool.report()[0]["tunnel_id"] is None, "the end of generation 1")
            (new,) = await hold(stack, pool, 1)
            await pool.check()
            # Only now does the old rollout look, as one does that polls.
            (end,) = await ends_of([old])
            assert old.tunnel_id in end.message
            assert await still_holds([new])

    scenario(world.backend(), story)
    assert world.leaked() == []


@pytest.mark.parametrize("times", [1, 2])
def test_two_disconnected_in_a_row_restart_and_one_does_nothing(world: Any, scenario: Any, times: int) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool)
            world.disconnect(leases[0].tunnel_id)
            for _ in range(times):
                await pool.check()
            if times == 2:
                await scenario.until(lambda: pool.report()[0]["restarts"] == 1, "the restart")
            assert await still_holds(leases)
            assert pool.report()[0]["restarts"] == times - 1

    scenario(world.backend(), story)
    assert world.leaked() == []


def test_a_connected_in_between_clears_the_count(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            for down in (True, False, True):
                service.disconnected = {lease.tunnel_id} if down else set()
                await pool.check()
            assert await still_holds([lease])

    scenario(service, story)
    assert "restart" not in service.calls


def test_a_status_that_cannot_be_had_is_no_verdict(world: Any, scenario: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool)
            world.fail_status()
            for _ in range(3):
                await pool.check()
            assert await still_holds(leases)
            assert pool.report()[0]["restarts"] == 0

    scenario(world.backend(), story)
    assert [record for record in caplog.records if "status is not known" in record.getMessage()]
    assert world.leaked() == []


def test_a_status_from_before_a_restart_is_no_verdict(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            service.disconnected.add(lease.tunnel_id)
            await pool.check()
            service.faults["status"] = ["hang"]
            second = asyncio.create_task(pool.check())
            await scenario.until(lambda: service.calls.count("status") == 2)
            service.tunnels[lease.tunnel_id].running = False
            await scenario.until(lambda: pool.report()[0]["restarts"] == 1)
            service.disconnected.add(lease.tunnel_id)  # what the late answer will say
            service.gate.set()
            await second
            await pool.check()  # the first that tells about the new process, and one is not enough
            assert await still_holds([lease])

    scenario(service, story)
    assert service.calls.count("restart") == 1


def test_two_rounds_at_once_are_one(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            service.disconnected.add(lease.tunnel_id)
            await asyncio.gather(pool.check(), pool.check(), pool.check())
            assert await still_holds([lease])

    scenario(service, story)
    assert (service.calls.count("status"), service.calls.count("restart")) == (1, 0)


def test_a_restart_that_fails_for_a_moment_is_tried_again(service: Any, scenario: Any) -> None:
    service.faults["restart"] = [TunnelError("cannot connect to frps"), TunnelError("cannot connect to frps")]

    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool)
            service.tunnels[leases[0].tunnel_id].running = False
            await scenario.until(lambda: pool.report()[0]["restarts"] == 1)
            assert await still_holds(leases)

    scenario(service, story)
    assert service.calls.count("restart") == 3


def test_a_restart_that_fails_for_ever_ends_the_generation_and_deletes_it(service: Any, scenario: Any) -> None:
    service.faults["restart"] = [TunnelError("cannot connect to frps", detail="frps: down"), "for ever"]

    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool)
            service.tunnels[leases[0].tunnel_id].running = False
            for end in await ends_of(leases):
                assert "cannot connect to frps" in end.message
                assert "frps: down" in (end.detail or "")
            await scenario.until(lambda: service.registered == {}, "its deletion")
            assert "cannot connect to frps" in pool.report()[0]["last_error"]

    scenario(service, story)
    assert service.calls.count("restart") == 3
    assert service.opened[0].stopped


def test_a_restart_that_hangs_is_bounded(service: Any, scenario: Any, quick: Any) -> None:
    service.faults["restart"] = ["hang", "for ever"]

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            service.tunnels[lease.tunnel_id].running = False
            (end,) = await ends_of([lease])
            assert "took longer than" in end.message

    scenario(service, story, quick(restart_timeout=0.02, restart_budget=0.05))
    assert service.registered == {}


def test_a_process_that_dies_after_every_restart_is_given_up(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            broken = asyncio.create_task(ends_of([lease]))
            while not broken.done():
                service.tunnels[lease.tunnel_id].running = False
                await asyncio.sleep(0.005)
            assert "time after time" in (await broken)[0].message

    scenario(service, story)
    assert service.calls.count("restart") == 3


def test_a_tunnel_that_served_for_long_has_all_its_tries_again(service: Any, scenario: Any, quick: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            for restarts in range(1, 6):
                service.tunnels[lease.tunnel_id].running = False
                await scenario.until(lambda n=restarts: pool.report()[0]["restarts"] == n)
            assert await still_holds([lease])

    scenario(service, story, quick(stable_after=0.0))


def test_a_tunnel_that_stays_disconnected_after_a_restart_is_replaced(service: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            for restarts in (1, 2):
                service.disconnected.add(lease.tunnel_id)
                await pool.check()
                await pool.check()
                if restarts == 1:
                    await scenario.until(lambda: pool.report()[0]["restarts"] == 1)
            (end,) = await ends_of([lease])
            assert "stayed disconnected" in end.message
        async with pool.lease(GATEWAY) as lease:
            assert lease.generation == 2

    scenario(service, story)
    assert service.calls.count("restart") == 1


def test_an_error_nobody_thought_of_breaks_the_leases_too(service: Any, scenario: Any) -> None:
    service.faults["restart"] = [KeyError("surprise")]

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            service.tunnels[lease.tunnel_id].running = False
            (end,) = await ends_of([lease])
            assert "KeyError" in end.message

    scenario(service, story)
    assert service.registered == {}


# -- starts that fail --------------------------------------------------------------------------------------------------


def test_a_start_that_fails_for_a_moment_is_tried_again_for_all_who_wait(service: Any, scenario: Any) -> None:
    service.faults["start"] = [TunnelError("HTTP 500"), TunnelError("HTTP 500")]

    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            assert {lease.generation for lease in await hold(stack, pool)} == {1}

    scenario(service, story)
    assert service.calls.count("start") == 3


def test_a_start_that_keeps_failing_fails_for_all_with_the_services_words(service: Any, scenario: Any) -> None:
    service.faults["start"] = [TunnelError("HTTP 500", detail="database on fire"), "for ever"]

    async def story(pool: TunnelPool) -> list[Any]:
        async with AsyncExitStack() as stack:
            entered = (stack.enter_async_context(pool.lease(GATEWAY)) for _ in range(LEASES))
            ends = await asyncio.gather(*entered, return_exceptions=True)
            assert "HTTP 500" in pool.report()[0]["last_error"]
            return ends

    ends = scenario(service, story)
    assert {(end.message, end.detail, end.retryable) for end in ends} == {
        ("no tunnel to 127.0.0.1:8080 after 3 tries: HTTP 500", "database on fire", True)
    }
    assert len({id(end) for end in ends}) == LEASES
    assert service.calls.count("start") == 3


def test_the_start_after_a_failed_one_waits(service: Any, scenario: Any, quick: Any) -> None:
    service.faults["start"] = [TunnelError("HTTP 500")]

    async def story(pool: TunnelPool) -> None:
        with pytest.raises(TunnelError):
            await pool.lease(GATEWAY).__aenter__()
        waiting = asyncio.create_task(pool.lease(GATEWAY).__aenter__())
        for _ in range(20):
            await asyncio.sleep(0)
        assert service.calls.count("start") == 1
        await pool.aclose()
        with pytest.raises(TunnelError, match="shutting down"):
            await waiting

    scenario(service, story, quick(start_attempts=1, backoff=60.0, backoff_max=60.0))


def test_a_refused_start_fails_at_once_and_is_not_tried_again_for_a_while(service: Any, scenario: Any) -> None:
    service.faults["start"] = [StartRefusedError("check PRIME_API_KEY", retryable=False)]
    now = 0.0

    async def story(pool: TunnelPool) -> None:
        nonlocal now
        for _ in range(3):
            with pytest.raises(TunnelError, match="PRIME_API_KEY") as caught:
                await pool.lease(GATEWAY).__aenter__()
            assert not caught.value.retryable
        assert service.calls.count("start") == 1
        now = 31.0
        async with pool.lease(GATEWAY) as lease:
            assert lease.generation == 1

    scenario(service, story, clock=lambda: now)
    assert service.calls.count("start") == 2


@pytest.mark.parametrize("point", ["start", "connect"])
def test_a_start_that_hangs_ends_at_its_deadline_and_leaves_nothing(
    service: Any, scenario: Any, quick: Any, point: str
) -> None:
    service.faults[point] = ["hang", "for ever"]

    async def story(pool: TunnelPool) -> None:
        with pytest.raises(TunnelError, match="took longer"):
            await pool.lease(GATEWAY).__aenter__()

    scenario(service, story, quick(start_timeout=0.02, start_budget=0.05))
    assert service.registered == {}


def test_what_a_failed_start_registered_is_deleted_by_its_label(service: Any, scenario: Any) -> None:
    service.faults["connect"] = [TunnelError("the answer was lost")]
    service.faults["stop"] = [TunnelError("not known which it is")]

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            await scenario.until(lambda: len(service.registered) == 1, "the first one's deletion")
            assert list(service.registered) == [lease.tunnel_id]
            assert len({tunnel.label for tunnel in service.opened}) == 2

    scenario(service, story)
    assert service.registered == {}


def test_what_cannot_be_deleted_now_is_deleted_by_a_later_check(service: Any, scenario: Any) -> None:
    service.faults |= {"connect": [TunnelError("lost")], "stop": [TunnelError("?")], "sweep": [TunnelError("HTTP 500")]}

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            await scenario.until(lambda: service.calls.count("sweep") == 1)
            assert len(service.registered) == 2
            await pool.check()
            assert len(service.registered) == 1

    scenario(service, story)
    assert service.registered == {}


def test_a_registration_that_a_slow_service_makes_late_is_found_by_the_next_check(service: Any, scenario: Any) -> None:
    service.faults["start"] = [TunnelError("could not start a tunnel within 25 s")]

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            await scenario.until(lambda: service.calls.count("sweep") == 1)
            service.registered["t9"] = service.opened[0].label
            await pool.check()
            assert list(service.registered) == [lease.tunnel_id]
            await pool.check()

    scenario(service, story)
    assert service.calls.count("sweep") == 3, "twice for the failed start, once for the tunnel in the end"


def test_what_appears_after_a_look_for_it_is_looked_for_again(service: Any, scenario: Any) -> None:
    service.faults |= {"connect": [TunnelError("lost")], "stop": ["hang"], "sweep": [None, TunnelError("HTTP 500")]}

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            await scenario.until(lambda: "stop" in service.calls)
            await pool.check()
            service.registered["t9"] = service.opened[0].label  # the service was slow
            service.gate.set()
            await scenario.until(lambda: service.calls.count("sweep") == 2)
            assert "t9" in service.registered
            await pool.check()
            assert "t9" not in service.registered

    scenario(service, story)
    assert service.registered == {}


def test_what_is_left_in_the_end_is_named(service: Any, scenario: Any, caplog: pytest.LogCaptureFixture) -> None:
    service.faults |= {"stop": [TunnelError("HTTP 500"), "for ever"], "sweep": [TunnelError("HTTP 500"), "for ever"]}

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            pass

    scenario(service, story)
    (label,) = service.registered.values()
    assert [r for r in caplog.records if r.levelno == logging.ERROR and label in r.getMessage()]


def test_a_cancelled_caller_does_not_cancel_the_start_for_the_others(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            world.hold_starts()
            first = asyncio.create_task(hold(stack, pool, 1))
            others = asyncio.create_task(hold(stack, pool))
            await scenario.until(lambda: world.starts == 1, "the start")
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            world.let_starts_go()
            assert len(await others) == LEASES

    scenario(world.backend(), story)
    assert world.starts == 1
    assert world.leaked() == []


def test_a_start_whose_callers_are_all_gone_is_of_use_to_the_next(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            world.hold_starts()
            only = asyncio.create_task(hold(stack, pool, 1))
            await scenario.until(lambda: world.starts == 1, "the start")
            only.cancel()
            with pytest.raises(asyncio.CancelledError):
                await only
            world.let_starts_go()
            await hold(stack, pool, 1)

    scenario(world.backend(), story)
    assert world.starts == 1
    assert world.leaked() == []


# -- the fleet's rate --------------------------------------------------------------------------------------------------


class Gate:
    """A throttle that lets one in when told to."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.taken = 0
        self.paused: list[float] = []

    async def take(self) -> None:
        await self.open.wait()
        self.taken += 1

    async def pause(self, seconds: float) -> None:
        self.paused.append(seconds)


def test_waiting_for_the_fleets_turn_does_not_count_against_the_rollouts_deadline(service: Any, scenario: Any) -> None:
    from workers.aio import deadline

    gate = Gate()

    async def story(pool: TunnelPool) -> None:
        clocks: list[asyncio.Timeout] = []

        async def caller() -> str:
            async with deadline(50) as clock:
                clocks.append(clock)
                async with pool.lease(GATEWAY) as lease:
                    assert clock.when() is not None, "it has its turn"
                    return str(lease.url)

        waiting = [asyncio.create_task(caller()) for _ in range(3)]
        await scenario.until(lambda: [clock.when() for clock in clocks] == [None] * 3, "the clocks to stop")
        gate.open.set()
        assert len(set(await asyncio.gather(*waiting))) == 1

    scenario(service, story, throttle=gate)
    assert (gate.taken, service.calls.count("start")) == (1, 1)


def test_a_429_pauses_the_whole_fleet(service: Any, scenario: Any) -> None:
    from workers.tunnels.backend import RateLimitedError

    service.faults["start"] = [RateLimitedError("slow down", retry_after=0.02)]
    gate = Gate()
    gate.open.set()

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            pass

    scenario(service, story, throttle=gate)
    assert (gate.paused, gate.taken) == ([0.02], 2)


def test_a_refused_account_is_one_for_everybody_who_asks(service: Any, scenario: Any) -> None:
    """Those who wait for the start, and those who come while it is not tried again."""
    service.faults["start"] = [StartRefusedError("check PRIME_API_KEY", retryable=False)]

    async def story(pool: TunnelPool) -> None:
        async def refusal() -> TunnelError:
            with pytest.raises(TunnelError) as raised:
                await pool.lease(GATEWAY).__aenter__()
            return raised.value

        errors = [*await asyncio.gather(refusal(), refusal()), await refusal()]
        assert len(set(map(id, errors))) == 3, "each adds its own phase"
        for error in errors:
            assert error.info().account
            assert not error.retryable

    scenario(service, story)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_breaks_the_leases_and_refuses_new_ones_and_may_be_repeated(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            leases = await hold(stack, pool)
            await asyncio.gather(pool.aclose(), pool.aclose())
            for end in await ends_of(leases):
                assert "shutting down" in end.message
            with pytest.raises(TunnelError, match="shutting down"):
                await hold(stack, pool, 1)
            await pool.check()
            assert world.leaked() == []

    scenario(world.backend(), story)


def test_closing_during_a_start_ends_it_and_leaves_nothing(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        async with AsyncExitStack() as stack:
            world.hold_starts()
            waiting = asyncio.create_task(hold(stack, pool, 1))
            await scenario.until(lambda: world.starts == 1, "the start")
            await pool.aclose()
            with pytest.raises(TunnelError, match="shutting down"):
                await waiting

    scenario(world.backend(), story)
    assert world.leaked() == []


def test_a_start_that_does_not_notice_its_cancellation_is_stopped_nevertheless(service: Any, scenario: Any) -> None:
    service.faults["connect"] = ["deaf"]

    async def story(pool: TunnelPool) -> None:
        waiting = asyncio.create_task(pool.lease(GATEWAY).__aenter__())
        await scenario.until(lambda: "connect" in service.calls)
        await pool.aclose()
        with pytest.raises(TunnelError, match="shutting down"):
            await waiting

    scenario(service, story)
    assert service.registered == {}
    assert service.opened[0].stopped


def test_closing_during_a_restart_leaves_nothing(service: Any, scenario: Any) -> None:
    service.faults["restart"] = ["hang"]

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            service.tunnels[lease.tunnel_id].running = False
            await scenario.until(lambda: "restart" in service.calls)
            await pool.aclose()
            await ends_of([lease])

    scenario(service, story)
    assert (service.registered, service.closed) == ({}, True)


def test_a_stop_that_hangs_does_not_hold_up_the_end(service: Any, scenario: Any, quick: Any) -> None:
    service.faults |= {"stop": ["hang"], "sweep": ["hang"]}

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            pass
        async with asyncio.timeout(30):
            await pool.aclose()

    scenario(service, story, quick(stop_timeout=60.0, sweep_timeout=60.0, close_timeout=0.05))
    assert service.closed


def test_a_cancellation_during_the_end_does_not_interrupt_it(service: Any, scenario: Any) -> None:
    service.faults["stop"] = ["hang"]

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY):
            pass
        closing = asyncio.create_task(pool.aclose())
        await scenario.until(lambda: "stop" in service.calls)
        closing.cancel()
        service.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

    scenario(service, story)
    assert (service.registered, service.closed) == ({}, True)


def test_a_tunnel_that_nobody_uses_is_closed_and_one_in_use_is_not(world: Any, scenario: Any) -> None:
    now = 0.0

    async def story(pool: TunnelPool) -> None:
        nonlocal now
        async with pool.lease(GATEWAY), pool.lease("http://127.0.0.1:9090"):
            now = 1000.0
            await pool.check()
            assert len(pool.report()) == 2
        async with pool.lease(GATEWAY) as used:
            now = 2000.0
            await pool.check()
            assert [entry["gateway_url"] for entry in pool.report()] == [GATEWAY]
            await scenario.until(lambda: world.leaked() and len(tunnels_of(world)) == 1, "the deletion")
            assert tunnels_of(world) == [used.tunnel_id]
        async with pool.lease("http://127.0.0.1:9090"):
            pass

    scenario(world.backend(), story, clock=lambda: now)
    assert world.starts == 3
    assert world.leaked() == []


def tunnels_of(world: Any) -> list[str]:
    if world.real:
        return [tunnel["tunnel_id"] for tunnel in world.emulator.tunnels() if not tunnel["deleted"]]
    return list(world.service.registered)


def test_the_report_says_what_each_tunnel_is_and_does(world: Any, scenario: Any) -> None:
    async def story(pool: TunnelPool) -> None:
        assert pool.report() == []
        async with AsyncExitStack() as stack:
            (lease, *_) = await hold(stack, pool, 3)
            assert pool.report() == [
                {
                    "gateway_url": GATEWAY,
                    "tunnel_id": lease.tunnel_id,
                    "url": lease.url,
                    "alive": True,
                    "generation": 1,
                    "restarts": 0,
                    "rollouts": 3,
                    "last_error": None,
                }
            ]
            world.delete(lease.tunnel_id)
            await ends_of([lease])
            (entry,) = pool.report()
            assert (entry["alive"], entry["tunnel_id"], entry["rollouts"]) == (False, None, 0)
            assert lease.tunnel_id in entry["last_error"]

    scenario(world.backend(), story)


def test_a_gone_registration_that_a_restart_finds_ends_the_generation(service: Any, scenario: Any) -> None:
    service.faults["restart"] = [RegistrationGoneError("tunnel is inactive")]

    async def story(pool: TunnelPool) -> None:
        async with pool.lease(GATEWAY) as lease:
            service.tunnels[lease.tunnel_id].running = False
            (end,) = await ends_of([lease])
            assert "tunnel is inactive" in end.message

    scenario(service, story)
    assert service.calls.count("restart") == 1
