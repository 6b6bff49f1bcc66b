"""An unmodified client of verifiers' at the door of a real fleet."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import command, wait_until

pytest.importorskip("verifiers.v1")

from doors import CONFIG, DoorProcess, EnvClient, WholeClient, reward, run_arguments, running_door
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvServer
from verifiers.v1.utils.loaders import resolve_env_config

from workers.local import LocalStack

pytestmark = [pytest.mark.xdist_group("door"), pytest.mark.timeout(120)]

Fleet = tuple[LocalStack, Path]


@pytest.fixture(scope="module")
def door(door_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorProcess]:
    stack, config = door_fleet
    with running_door(stack.redis_url, config, tmp_path_factory.mktemp("d") / "shared.log") as door:
        yield door


async def connected(address: str) -> EnvClient:
    client = EnvClient(address)
    await client.wait_for_server_startup(timeout=60, interval=0.2)
    return client


async def episodes(address: str, upstream: str, count: int, **fields: Any) -> list[WireEpisode]:
    client = await connected(address)
    try:
        runs = (client.run(**run_arguments(upstream, number, **fields)) for number in range(count))
        return await asyncio.wait_for(asyncio.gather(*runs), 60)
    finally:
        await client.close()


async def own_server_rewards(upstream: str, count: int) -> list[float]:
    """Return what verifiers' own server answers to the same."""
    server = EnvServer(resolve_env_config(CONFIG), "tcp://127.0.0.1:*")
    serving = asyncio.create_task(server.run())
    try:
        return [reward(episode) for episode in await episodes(server.address, upstream, count)]
    finally:
        serving.cancel()
        await asyncio.wait({serving})


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path


def started(gate: Path) -> list[int]:
    path = gate / "started"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_rewards_are_those_of_verifiers_own_server(door_fleet: Fleet, door: DoorProcess) -> None:
    stack, _ = door_fleet

    async def both() -> tuple[list[WireEpisode], list[float]]:
        return await episodes(door.address, stack.upstream, 6), await own_server_rewards(stack.upstream, 6)

    found, expected = asyncio.run(both())
    assert [reward(episode) for episode in found] == expected
    assert len(set(expected)) > 3
    for episode in found:
        [trace] = episode.traces
        assert trace.is_completed
        assert not trace.errors
        assert sum(node.sampled for node in trace.nodes) == 3


@pytest.mark.parametrize("how", [(), ("--live",)], ids=["held", "live"])
def test_an_episode_of_a_killed_worker_runs_again_elsewhere(
    door_fleet: Fleet, tmp_path: Path, gate: Path, how: tuple[str, ...]
) -> None:
    stack, config = door_fleet

    async def scenario(address: str) -> tuple[WireEpisode, list[dict[str, Any]]]:
        client, seen = await connected(address), []
        run = asyncio.create_task(client.run(**run_arguments(stack.upstream, 3, gate=str(gate)), on_delta=seen.append))
        await asyncio.to_thread(wait_until, lambda: started(gate) and (seen or not how))
        os.kill(started(gate)[0], signal.SIGKILL)
        (gate / "go").touch()
        watch = asyncio.create_task(stack.watch())  # starts the worker again
        try:
            return await asyncio.wait_for(run, 60), seen
        finally:
            watch.cancel()
            await asyncio.wait({watch})
            await client.close()

    with running_door(stack.redis_url, config, tmp_path / "kill.log", *how) as door:
        episode, seen = asyncio.run(scenario(door.address))
    assert len(set(started(gate))) == 2, "it ran in two workers"
    [trace] = episode.traces
    assert not trace.errors
    assert sum(node.sampled for node in trace.nodes) == 3
    others = {delta["trace"] for delta in seen} - {trace.id}
    discarded = {delta["trace"] for delta in seen if delta.get("discard")}
    assert others == discarded, "the first attempt's trace is gone"
    assert bool(others) == bool(how), "and was not even seen where it was held"


def test_a_cancelled_run_ends_in_its_worker(door_fleet: Fleet, door: DoorProcess, gate: Path) -> None:
    stack, _ = door_fleet

    async def scenario() -> None:
        client = await connected(door.address)
        run = asyncio.create_task(client.run(**run_arguments(stack.upstream, 4, gate=str(gate))))
        await asyncio.to_thread(wait_until, lambda: started(gate))
        run.cancel()
        await asyncio.wait({run})
        await client.close()

    asyncio.run(scenario())
    wait_until((gate / "cancelled").exists, what="the episode's end")


def test_a_run_that_cannot_be_run_fails_in_verifiers_words(door_fleet: Fleet, door: DoorProcess) -> None:
    stack, _ = door_fleet
    wrong = run_arguments(stack.upstream, 1)
    wrong["task_data"] |= {"seed": "SECRET-no-number"}

    async def scenario() -> str:
        client = await connected(door.address)
        try:
            with pytest.raises(RuntimeError) as raised:
                await asyncio.wait_for(client.run(**wrong), 60)
            return str(raised.value)
        finally:
            await client.close()

    said = asyncio.run(scenario())
    assert said.startswith("ValidationError: seed: ")
    assert "SECRET" not in said


def test_a_door_that_is_started_again_answers_what_was_in_flight(door_fleet: Fleet, tmp_path: Path, gate: Path) -> None:
    """Its client says nothing meanwhile: it has nothing to say."""
    stack, config = door_fleet

    async def scenario(door: DoorProcess) -> WireEpisode:
        client = await connected(door.address)
        run = asyncio.create_task(client.run(**run_arguments(stack.upstream, 5, gate=str(gate))))
        await asyncio.to_thread(wait_until, lambda: started(gate))
        door.stop(signal.SIGKILL)
        (gate / "go").touch()
        await asyncio.to_thread(door.start)
        try:
            return await asyncio.wait_for(run, 60)
        finally:
            await client.close()

    with running_door(stack.redis_url, config, tmp_path / "again.log") as door:
        episode = asyncio.run(scenario(door))
    assert len(started(gate)) == 1, "it ran once"
    assert sum(node.sampled for node in episode.traces[0].nodes) == 3


def test_deltas_are_passed_on_as_they_come_when_that_is_wanted(door_fleet: Fleet, tmp_path: Path, gate: Path) -> None:
    stack, config = door_fleet

    async def scenario(address: str) -> tuple[int, WireEpisode]:
        client, seen = await connected(address), []
        run = asyncio.create_task(client.run(**run_arguments(stack.upstream, 6, gate=str(gate)), on_delta=seen.append))
        await asyncio.to_thread(wait_until, lambda: any("nodes" in delta for delta in seen), what="a first turn")
        early = len(seen)
        (gate / "go").touch()
        try:
            return early, await asyncio.wait_for(run, 60)
        finally:
            await client.close()

    with running_door(stack.redis_url, config, tmp_path / "live.log", "--live") as door:
        early, episode = asyncio.run(scenario(door.address))
    assert early >= 1
    assert sum(node.sampled for node in episode.traces[0].nodes) == 3


def test_the_wire_before_deltas_is_spoken_too(door_fleet: Fleet, tmp_path: Path) -> None:
    stack, config = door_fleet
    arguments = run_arguments(stack.upstream, 0)
    fields = {name: arguments[name].model_dump(mode="json") for name in ("client", "sampling")}
    fields |= {"model": "stand-in", "task_data": arguments["task_data"]}

    async def scenario(address: str) -> tuple[dict[str, Any], ...]:
        client = WholeClient(address)
        try:
            return (
                await client.ask("health", "h"),
                await client.ask("run", "r", **fields),
                await client.ask("cancel", "c", request_id="r"),
                await client.ask("dance", "d"),
            )
        finally:
            client.close()

    with running_door(stack.redis_url, config, tmp_path / "whole.log", "--wire", "whole") as door:
        health, ran, cancelled, dance = asyncio.run(scenario(door.address))
    assert health == {"success": True, "error": None}
    episode = WireEpisode.model_validate(ran["episode"])
    assert [reward(episode)] == asyncio.run(own_server_rewards(stack.upstream, 1))
    assert cancelled == {"success": True, "error": None, "cancelled": False}
    assert dance == {"success": False, "error": "unknown method 'dance'"}


def test_another_configuration_than_the_workers_is_refused(door_fleet: Fleet, tmp_path: Path) -> None:
    stack, _ = door_fleet
    other = tmp_path / "small.json"
    other.write_text('{"taskset": {"id": "small_taskset"}}')

    async def scenario(address: str) -> str:
        with pytest.raises(RuntimeError) as raised:
            await episodes(address, stack.upstream, 1)
        return str(raised.value)

    with running_door(stack.redis_url, other, tmp_path / "other.log") as door:
        assert "is another one than the door's" in asyncio.run(scenario(door.address))


def test_an_address_that_others_reach_must_be_asked_for(tmp_path: Path) -> None:
    found = command("env-server", "--env", "small", "--address", "tcp://0.0.0.0:5000")
    assert found.returncode == 2
    assert "--allow-remote" in found.stderr
