"""Groups: whole or dropped, early, with replacements, and cancelled for good."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from redis import ResponseError

from producer import (
    BatchCancelledError,
    CancelAnswer,
    Drop,
    ErrorInfo,
    ErrorKind,
    Group,
    GroupResult,
    GroupTerms,
    InvalidRequestError,
    OnReady,
    Pace,
    Producer,
    ProducerSettings,
    RolloutConflictError,
    RolloutRequest,
    RolloutResult,
    StopCondition,
    SyncProducer,
    broker,
    client,
    inflight,
)
from producer.connection import FleetConnection, end
from producer.results import Completions

REQUEST = RolloutRequest.parse({"model": "m", "example_id": 7, "policy_version": 3})
BROKEN = ErrorInfo(kind=ErrorKind.SANDBOX, message="it broke")


def failing(*indices: int) -> Callable[[RolloutRequest], RolloutResult]:
    def behave(request: RolloutRequest) -> RolloutResult:
        if request.sample_index in indices:
            return RolloutResult.for_request(request, StopCondition.HAS_ERROR, error=BROKEN)
        return RolloutResult.for_request(request, StopCondition.COMPLETED, reward=1.0)

    return behave


def holding(*indices: int) -> Callable[[RolloutRequest], RolloutResult | None]:
    return lambda request: None if request.sample_index in indices else failing()(request)


def test_a_group_is_delivered_whole(settings, worker):
    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 4, group_id="g")
            whole = await group.result(20)
            assert (whole.group_id, whole.example_id, whole.dropped, whole.reason) == ("g", 7, None, "")
            assert {r.rollout_id for r in whole.results} == {f"g-{n}" for n in range(4)}
            assert {(r.group_id, r.batch_id) for r in whole.results} == {("g", "g")}
            assert sorted(r.sample_index for r in whole.results) == [0, 1, 2, 3]
            assert {r.rollout_id async for r in group} == {r.rollout_id for r in whole.results}

    asyncio.run(main())


def test_a_group_with_a_failure_is_dropped_whole_with_the_reason(settings, worker):
    worker.behaviour = failing(2)

    async def main() -> None:
        async with Producer(settings) as producer:
            dropped = await (await producer.submit_group(REQUEST, 4)).result(20)
            assert (dropped.dropped, dropped.results) == (Drop.FAILED, ())
            assert "it broke" in dropped.reason

    asyncio.run(main())


def test_failed_rollouts_are_replaced_up_to_the_budget(settings, worker):
    worker.behaviour = failing(0, 4)

    async def main() -> None:
        async with Producer(settings) as producer:
            whole = await (await producer.submit_group(REQUEST, 4, group_id="g", replace_failed=2)).result(20)
            assert sorted(r.sample_index for r in whole.results) == [1, 2, 3, 5]
            dropped = await (await producer.submit_group(REQUEST, 4, group_id="h", replace_failed=1)).result(20)
            assert dropped.dropped is Drop.FAILED

    asyncio.run(main())
    assert "h-5" not in worker.started


def test_enough_usable_ones_make_it_ready_and_the_rest_is_cancelled(settings, worker):
    worker.behaviour = holding(1, 3)

    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 4, min_usable=2)
            whole = await group.result(20)
            assert sorted(r.sample_index for r in whole.results) == [0, 2]
            ends = {r.sample_index: r.stop_condition async for r in group}
            assert ends[1] is ends[3] is StopCondition.CANCELLED

    asyncio.run(main())


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(("needed", "dropped"), [(1, None), (4, Drop.FAILED)])
def test_the_rest_is_cancelled_also_when_the_trainer_leaves_at_once(settings, worker, needed, dropped, held):
    worker.behaviour = lambda request: None if request.sample_index > 1 else failing(0)(request)

    async def main() -> None:
        async with Producer(settings) as producer:
            groups = producer.groups([REQUEST], GroupTerms(4, needed), run_id="run")
            assert (await anext(groups)).dropped is dropped
            if not held:
                del groups

    asyncio.run(main())
    for member in ("run-7-2", "run-7-3"):
        state, cancel = worker.client.hmget(broker.job_key(member), "state", "cancel")
        assert state == b"done" or cancel


def test_the_rest_is_cancelled_also_when_redis_was_away_for_longer_than_a_call_waits(settings, worker):
    worker.behaviour = holding(1)

    async def main() -> None:
        async with Producer(settings, patience=0) as producer:
            cancel, away = producer.connection._cancel, iter([True])

            async def cancel_later(**call: list[object]) -> object:
                if next(away, False):
                    raise ConnectionError
                return await cancel(**call)

            producer.connection._cancel = cancel_later
            group = await producer.submit_group(REQUEST, 2, min_usable=1)
            assert {r.stop_condition async for r in group} == {StopCondition.COMPLETED, StopCondition.CANCELLED}

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_cancellation_of_the_rest_that_is_not_answered_is_over_when_the_rest_has_ended(settings, worker):
    worker.behaviour = holding(1)

    async def main() -> None:
        async with Producer(settings) as producer:
            cancel = producer.connection._cancel

            async def unanswered(**call: list[object]) -> None:
                await cancel(**call)
                await asyncio.Event().wait()

            producer.connection._cancel = unanswered
            groups = producer.groups([REQUEST], GroupTerms(2, 1), run_id="run")
            assert len((await anext(groups)).results) == 1
            await wait_for(lambda: not groups._kept)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_closing_a_group_that_is_given_up_ends_it_all_the_same(settings, worker):
    worker.behaviour = holding(1)

    async def main() -> None:
        async with Producer(settings) as producer:
            producer.connection._cancel = lambda **call: asyncio.Event().wait()
            group = await producer.submit_group(REQUEST, 2, min_usable=1)
            await group.result(20)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await group.aclose()
            await wait_for(lambda: group.ended)

    asyncio.run(main())


def test_a_group_that_cannot_be_followed_leaves_no_task(settings, idle_worker, monkeypatch):
    async def main() -> None:
        submitted = asyncio.Event()

        async def read(self: Completions) -> None:
            await submitted.wait()
            raise ResponseError("ERR what Redis may not say")

        monkeypatch.setattr(Completions, "read", read)
        async with Producer(settings) as producer:
            groups = producer.groups([REQUEST], GroupTerms(2), run_id="run")
            coming = asyncio.create_task(anext(groups))
            await wait_for(lambda: groups.open)
            submitted.set()
            with pytest.raises(ResponseError, match="may not say"):
                await coming
            assert not groups.open
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_or_the_rest_is_kept(settings, worker):
    worker.behaviour = holding(1)

    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 3, min_usable=2, on_ready=OnReady.KEEP)
            assert len((await group.result(20)).results) == 2
            [held] = worker.held.values()
            worker.finish(failing()(held))
            assert {r.stop_condition async for r in group} == {StopCondition.COMPLETED}

    asyncio.run(main())


def test_a_group_that_cannot_become_ready_cancels_what_still_runs(settings, worker):
    worker.behaviour = lambda request: None if request.sample_index else failing(0)(request)

    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 3)
            assert (await group.result(20)).dropped is Drop.FAILED
            assert [r.stop_condition async for r in group][1:] == [StopCondition.CANCELLED] * 2

    asyncio.run(main())


def test_a_stale_group_is_dropped_whole_and_nothing_replaced(settings, worker):
    worker.behaviour = holding(0, 1)

    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 2, replace_failed=5)
            await wait_for(lambda: len(worker.held) == 2)
            await producer.set_policy_version(9, max_off_policy_steps=1)
            assert (await group.result(20)).dropped is Drop.STALE

    asyncio.run(main())
    assert len(worker.started) == 2


def test_where_stale_rollouts_are_kept_a_group_of_them_is_whole_and_failures_are_replaced(settings, worker):
    worker.behaviour = failing(0)

    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.set_policy_version(9, max_off_policy_steps=1, on_stale="keep")
            whole = await (await producer.submit_group(REQUEST, 2, replace_failed=1)).result(20)
            assert [(r.sample_index, r.stale) for r in whole.results] == [(1, True), (2, True)]
            dropped = await (await producer.submit_group(REQUEST, 2)).result(20)
            assert dropped.dropped is Drop.FAILED
            worker.behaviour = failing()
            strict = await producer.submit_group(REQUEST, 2, usable=lambda result: not result.stale)
            assert (await strict.result(20)).dropped is Drop.STALE

    asyncio.run(main())


def test_a_group_that_lost_rollouts_to_shed_load_says_so(settings, worker):
    worker.behaviour = holding(0, 1)

    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 2)
            await wait_for(lambda: len(worker.held) == 2)
            await producer.shed(1)
            assert (await group.result(20)).dropped is Drop.OVERLOAD

    asyncio.run(main())


def test_one_cancel_ends_all_and_nothing_can_be_submitted_any_more(settings, worker):
    worker.behaviour = holding(0, 1, 2)

    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 3, group_id="g")
            await wait_for(lambda: len(worker.held) == 3)
            assert set((await group.cancel()).values()) == {CancelAnswer.REQUESTED}
            assert (await group.result()).dropped is Drop.CANCELLED
            assert [r.stop_condition async for r in group] == [StopCondition.CANCELLED] * 3
            with pytest.raises(BatchCancelledError, match="g was cancelled for good"):
                await producer.submit(REQUEST.model_copy(update={"batch_id": "g", "rollout_id": "late"}))
            with pytest.raises(BatchCancelledError):
                await producer.submit_group(REQUEST, 4, group_id="g")
            assert await producer.handle("late", "g").state() is None
            # What was there before is found, as after a lost reply.
            again = await producer.submit_group(REQUEST, 3, group_id="g")
            assert (await again.result(20)).dropped is Drop.CANCELLED

    asyncio.run(main())


def test_a_batch_is_cancelled_for_good_by_its_id_alone_whoever_submitted_it(settings, idle_worker, make):
    async def main() -> None:
        async with Producer(settings) as producer, Producer(settings) as other:
            batch = await producer.submit_many(make(5), batch_id="b", max_in_flight=3)
            assert idle_worker.claim("r-1")
            answers = await other.cancel_batch("b")
            assert answers == {
                "r-0": CancelAnswer.CANCELLED,
                "r-1": CancelAnswer.REQUESTED,
                "r-2": CancelAnswer.CANCELLED,
            }
            assert (await anext(batch)).stop_condition is StopCondition.CANCELLED
            with pytest.raises(BatchCancelledError):
                assert [result async for result in batch] == []

    asyncio.run(main())
    assert not idle_worker.client.exists(broker.job_key("r-3"), broker.job_key("r-4"))


def test_a_rollout_that_is_given_back_while_its_batch_is_cancelled_does_not_escape(
    settings, idle_worker, make, monkeypatch
):
    members, client = inflight._members, idle_worker.client

    async def giving_back(connection: FleetConnection, key: str) -> list[str]:
        found = await members(connection, key)
        if key == broker.PENDING and client.zrem(broker.RUNNING, "r-1"):
            client.hset(broker.job_key("r-1"), "state", "pending")
            client.zadd(broker.PENDING, {"r-1": 1})
        return found

    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.submit_many(make(3), batch_id="b")
            assert idle_worker.claim("r-1")
            monkeypatch.setattr("producer.inflight._members", giving_back)
            assert await producer.cancel_batch("b") == dict.fromkeys(("r-0", "r-1", "r-2"), CancelAnswer.CANCELLED)

    asyncio.run(main())


def test_a_group_that_is_submitted_again_finds_its_rollouts_and_its_replacements(settings, worker):
    worker.behaviour = failing(0)

    async def main() -> list[int]:
        async with Producer(settings) as producer:
            whole = await (await producer.submit_group(REQUEST, 3, group_id="g", replace_failed=1)).result(20)
            return sorted(r.sample_index for r in whole.results)

    assert asyncio.run(main()) == asyncio.run(main()) == [1, 2, 3]
    assert sorted(worker.started) == ["g-0", "g-1", "g-2", "g-3"]


def test_groups_come_once_each_and_go_on_after_a_crash(settings, worker):
    worker.behaviour = failing(3)
    requests = [REQUEST.model_copy(update={"example_id": n}) for n in range(12)]

    async def take(count: int) -> tuple[list[str], list[bool]]:
        async with Producer(settings) as producer:
            groups = producer.groups(requests, GroupTerms(3), run_id="run", max_groups=4, consumer="trainer")
            ids, again = [], []
            async for group in groups:
                assert len(group.results) == 3
                assert len(groups.open) <= 4
                ids.append(group.group_id)
                again.append(groups.redelivered)
                if len(ids) == count:
                    break
            return ids, again

    first, again = asyncio.run(take(5))
    assert not any(again)
    second, again = asyncio.run(take(100))
    assert [i for i, flag in zip(second, again, strict=True) if flag] == [first[-1]]
    assert len(second) == 8
    assert set(first[:-1]) | set(second) == {f"run-{n}" for n in range(12)}
    assert asyncio.run(take(100)) == ([], [])
    assert len(worker.started) == len(set(worker.started)) == 36


def test_a_trainer_that_is_further_by_now_takes_over_what_it_had_submitted_before(settings, worker):
    worker.behaviour = failing(1)

    async def take(version: int, count: int, **fields: object) -> list[GroupResult]:
        requests = [REQUEST.model_copy(update={"example_id": n, "policy_version": version, **fields}) for n in range(4)]
        async with Producer(settings) as producer:
            terms = GroupTerms(2, replace_failed=1)
            groups = producer.groups(requests, terms, run_id="run", max_groups=3, consumer="trainer")
            return [await anext(groups) for _ in range(count)]

    first = asyncio.run(take(3, 1))
    with pytest.raises(RolloutConflictError):
        asyncio.run(take(4, 4, prompt="another task"))
    second = asyncio.run(take(5, 4))
    assert {group.group_id for group in first + second} == {f"run-{n}" for n in range(4)}
    versions = {(group.group_id, r.policy_version) for group in second for r in group.results}
    assert versions >= {(first[0].group_id, 3)}
    assert {version for _, version in versions} == {3, 5}
    assert len(worker.started) == len(set(worker.started)) == 12


def test_what_was_not_handed_out_is_kept_however_long_the_trainer_is_away(redis_url, worker):
    settings = ProducerSettings(redis_url=redis_url, keep_consumed=60)
    requests = [REQUEST.model_copy(update={"example_id": n}) for n in range(3)]
    client = worker.client

    def kept(group_id: str) -> set[bool]:
        keys = [broker.result_key(f"{group_id}-{n}") for n in range(2)]
        assert all(client.ttl(key) > 0 for key in keys)
        return {client.ttl(key) > 60 for key in keys}

    async def main() -> list[str]:
        async with Producer(settings) as producer:
            groups = producer.groups(requests, GroupTerms(2), run_id="run", consumer="trainer")
            ids = [(await anext(groups)).group_id]
            await wait_for(lambda: len(groups.open) == 2 and all(group.ended for group in groups.open))
            assert kept(ids[0]) == {True}, "it is in hand: who knows whether it was dealt with"
            ids.append((await anext(groups)).group_id)
            assert kept(ids[0]) == {False}
            return ids

    ids = asyncio.run(main())
    assert all(kept(f"run-{n}") == {f"run-{n}" not in ids[:1]} for n in range(3))


def test_a_group_is_consumed_by_who_takes_it(settings, worker):
    async def main() -> None:
        async with Producer(settings) as producer:
            groups = [await producer.submit_group(REQUEST, 2, group_id=f"g{n}") for n in range(3)]
            await wait_for(lambda: all(group.ended for group in groups))
            await groups[0].result()
            assert len([result async for result in groups[1]]) == 2
        ttls = [worker.client.ttl(broker.result_key(f"g{n}-0")) > 3600 for n in range(3)]
        assert ttls == [False, False, True]

    asyncio.run(main())


def test_an_example_comes_once_in_a_run(settings, worker):
    async def main() -> None:
        async with Producer(settings) as producer:
            with pytest.raises(InvalidRequestError, match="comes twice"):
                await anext(producer.groups([REQUEST, REQUEST], GroupTerms(2)))

    asyncio.run(main())


@pytest.mark.parametrize(
    "terms",
    [{"size": 0}, {"size": 2, "min_usable": 3}, {"size": 2, "min_usable": 0}, {"size": 2, "replace_failed": -1}],
)
def test_terms_that_cannot_be_met_are_refused(terms):
    with pytest.raises(ValueError, match="a group has at least one"):
        GroupTerms(**terms)


def test_waiting_for_a_group_may_be_given_up(settings, idle_worker):
    async def main() -> None:
        async with Producer(settings) as producer:
            group = await producer.submit_group(REQUEST, 2)
            with pytest.raises(TimeoutError):
                await group.result(0.05)
            assert group.decision is None

    asyncio.run(main())


def test_groups_without_await(settings, worker):
    with SyncProducer(settings) as producer:
        group = producer.submit_group(REQUEST, 3)
        assert len(group.result(20).results) == 3
        assert sorted(r.sample_index for r in group) == [0, 1, 2]
        runs = producer.groups([REQUEST], GroupTerms(2))
        assert [len(g.results) for g in runs] == [2]


def test_a_group_that_somebody_else_cancels_while_a_member_is_replaced_is_dropped(settings, worker):
    worker.behaviour = holding(0, 1)

    async def main() -> None:
        async with Producer(settings) as producer, Producer(settings) as other:
            group = await producer.submit_group(REQUEST, 2, group_id="g", replace_failed=1)
            await wait_for(lambda: len(worker.held) == 2)
            await other.connection.close_batch("g")
            worker.finish(failing(0)(worker.held.pop("g-0")))
            dropped = await group.result(20)
            assert (dropped.dropped, dropped.results) == (Drop.CANCELLED, ())
            await other.cancel_batch("g")
            assert [r.stop_condition async for r in group] == [StopCondition.HAS_ERROR, StopCondition.CANCELLED]

    asyncio.run(main())
    assert "g-2" not in worker.started


def test_a_run_goes_on_past_a_group_that_was_cancelled_for_good(settings, worker):
    requests = [REQUEST.model_copy(update={"example_id": n}) for n in range(3)]

    async def main() -> None:
        async with Producer(settings) as producer:
            await producer.cancel_batch("run-1")
            found = {g.example_id: g.dropped async for g in producer.groups(requests, GroupTerms(2), run_id="run")}
            assert found == {0: None, 1: Drop.CANCELLED, 2: None}

    asyncio.run(main())


def test_groups_are_handed_out_while_an_asynchronous_source_is_slow(settings, worker):
    trained = asyncio.Event()

    async def examples() -> AsyncIterator[RolloutRequest]:
        yield REQUEST
        await trained.wait()  # a curriculum: what comes next depends on what was learnt
        yield REQUEST.model_copy(update={"example_id": 8})

    async def main() -> list[int | str]:
        async with Producer(settings) as producer, asyncio.timeout(20):
            found = []
            async for group in producer.groups(examples(), GroupTerms(2), max_groups=4):
                found.append(group.example_id)
                trained.set()
            return found

    assert asyncio.run(main()) == [7, 8]


@pytest.mark.parametrize("wrong", ["source", "twice", "conflict"])
def test_an_error_is_raised_once_and_the_groups_in_flight_are_still_handed_out(settings, worker, wrong):
    def examples() -> Iterator[RolloutRequest]:
        yield from (REQUEST.model_copy(update={"example_id": n}) for n in range(3))
        if wrong == "source":
            raise ValueError("the data set is broken")
        yield REQUEST.model_copy(update={"example_id": 0 if wrong == "twice" else 3})

    async def main() -> None:
        async with Producer(settings) as producer, asyncio.timeout(20):
            await producer.submit(REQUEST.model_copy(update={"rollout_id": "run-3-1", "batch_id": "run-3"}))
            groups = producer.groups(examples(), GroupTerms(2), run_id="run", max_groups=8)
            found, errors = [], []
            while len(found) < 3 or not errors:
                try:
                    found.append((await anext(groups)).example_id)
                except (ValueError, RolloutConflictError) as error:  # an InvalidRequestError is a ValueError
                    errors.append(error)
            assert sorted(found) == [0, 1, 2]
            assert len(errors) == 1
            with pytest.raises(StopAsyncIteration):
                await anext(groups)

    asyncio.run(main())


def test_cancelling_all_groups_reaches_the_one_that_is_being_submitted(settings, idle_worker):
    async def examples() -> AsyncIterator[RolloutRequest]:
        for n in range(1000):
            yield REQUEST.model_copy(update={"example_id": n})

    async def main() -> None:
        async with Producer(settings) as producer:
            groups = producer.groups(examples(), GroupTerms(2), run_id="run", max_groups=500)
            asking = asyncio.create_task(anext(groups))
            await wait_for(lambda: len(groups.open) >= 5)
            await groups.cancel()
            first = await asking
            rest = [group async for group in groups]
            assert {group.dropped for group in [first, *rest]} == {Drop.CANCELLED}
            assert 5 <= 1 + len(rest) < 500

    asyncio.run(main())
    assert not idle_worker.client.exists(broker.PENDING), "none of them waits any more"


def test_the_window_of_groups_can_be_moved_while_they_run(settings, idle_worker):
    requests = [REQUEST.model_copy(update={"example_id": n}) for n in range(20)]

    def finish(group: Group) -> None:
        for index in range(2):
            member = REQUEST.model_copy(update={"rollout_id": f"{group.group_id}-{index}", "batch_id": group.group_id})
            idle_worker.finish(RolloutResult.for_request(member, StopCondition.COMPLETED))

    async def main() -> None:
        async with Producer(settings) as producer, asyncio.timeout(20):
            groups = producer.groups(requests, GroupTerms(2), run_id="run", max_groups=2)
            asking = asyncio.create_task(anext(groups))
            await wait_for(lambda: len(groups.open) == 2)
            groups.max_groups = 5
            await wait_for(lambda: len(groups.open) == 5)
            groups.max_groups = 0
            for group in groups.open:
                await asyncio.to_thread(finish, group)
            await asking
            for _ in range(4):
                await anext(groups)
            assert groups.open == [], "paused"
            asking = asyncio.create_task(anext(groups))
            groups.max_groups = 100
            await wait_for(lambda: len(groups.open) == 15)
            asking.cancel()
            with pytest.raises(ValueError, match="0 pauses"):
                groups.max_groups = -1

    asyncio.run(main())


def test_groups_keep_to_a_pace_of_rollouts_and_another_can_be_set(settings, idle_worker):
    requests = [REQUEST.model_copy(update={"example_id": n}) for n in range(20)]

    async def main() -> None:
        async with Producer(settings) as producer:
            # A group is submitted whole, also where it is larger than the burst.
            groups = producer.groups(requests, GroupTerms(4), max_groups=20, pace=Pace(1, 9))
            asking = asyncio.create_task(anext(groups))
            await wait_for(lambda: len(groups.open) == 3)
            await asyncio.sleep(0.01)
            assert len(groups.open) == 3
            groups.set_pace(per_minute=60_000, burst=2)
            await wait_for(lambda: len(groups.open) == 20)
            asking.cancel()

    asyncio.run(main())


async def wait_for(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not there():
            await asyncio.sleep(0.005)


def test_of_what_was_ended_no_error_is_left_that_nobody_asked_for(caplog):
    async def main() -> None:
        async def fail() -> None:
            raise ValueError("told elsewhere")

        task = asyncio.create_task(fail())
        await asyncio.wait({task})
        await end(task)

    gc.collect()  # what other tests left, which asyncio complains of only now
    caplog.clear()
    asyncio.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_submission_that_is_given_up_leaves_no_task(settings, idle_worker, monkeypatch):
    monkeypatch.setattr(client, "_GIVE_UP_SECONDS", 0.01)

    async def main() -> None:
        async with Producer(settings) as producer:
            producer.connection.submit_chunk = lambda chunk: asyncio.Event().wait()
            for submitting in (producer.submit_many([REQUEST]), producer.submit_group(REQUEST, 2)):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await submitting
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
