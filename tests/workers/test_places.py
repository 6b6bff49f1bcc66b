"""Limits of the whole fleet, the choice of a gateway, and the lanes: decided in the claim, by the record's scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from producer import Producer, ProducerSettings, RolloutRequest, StopCondition, broker
from producer.queues import pending_key, queue_keys, running_key
from workers.history import HandBack
from workers.jobs import Claim, JobStore, Requeue
from workers.places import Places
from workers.sweep import sweep

BACK = HandBack.over("test")


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    app = Celery("test", set_as_current=False)
    app.config_from_object(broker.celery_config(redis_url))
    yield app
    app.close()


@pytest.fixture
def store(redis_url: str, app: Celery) -> Iterator[JobStore]:
    client = redis.Redis.from_url(redis_url)
    yield JobStore(client, app, lease_ttl=60)
    client.close()


def submit(url: str, *requests: dict[str, object], limits: dict[str, int] | None = None) -> None:
    async def main() -> None:
        async with Producer(ProducerSettings(redis_url=url)) as producer:
            for place, count in (limits or {}).items():
                await producer.set_limit(place, count)
            await producer.connection.submit([RolloutRequest.parse({"model": "m"} | request) for request in requests])

    asyncio.run(main())


def cancel(url: str, *ids: str) -> None:
    async def main() -> None:
        async with Producer(ProducerSettings(redis_url=url)) as producer:
            await producer.cancel(ids)

    asyncio.run(main())


def queued(store: JobStore) -> list[str]:
    """Take all messages off the queue, in the order in which they are served."""
    ids = []
    for key in broker.queue_keys():
        while (message := store.client.rpop(key)) is not None:
            ids.append(message.split(b'"id":"')[1].split(b'"')[0].decode())
    return ids


def of_env(*ids: str, env: str = "e") -> list[dict[str, object]]:
    return [{"rollout_id": i, "environment": env} for i in ids]


def end(store: JobStore, claim: Claim | str) -> None:
    assert isinstance(claim, Claim)
    assert store.commit(claim.rollout_id, claim.attempt, claim.batch_id, StopCondition.COMPLETED, b"x")


def test_a_rollout_over_its_limit_is_parked_and_woken_by_the_one_that_ends(store, redis_url):
    submit(redis_url, *of_env("a", "b", "c"), limits={"env:e": 1})
    assert queued(store) == ["a", "b", "c"]
    first = store.claim("a", "w")
    assert (store.claim("b", "w"), store.claim("c", "w")) == ("parked", "parked")
    assert queued(store) == []
    end(store, first)
    assert queued(store) == ["b"], "in the order in which they were submitted"
    assert store.claim("c", "w") == "parked", "nobody overtakes"
    end(store, store.claim("b", "w"))
    assert queued(store) == ["c"]
    end(store, store.claim("c", "w"))
    assert not store.client.exists(broker.PLACES, broker.place_key("env:e"), broker.parked_key("env:e"))


def test_within_a_full_place_evaluation_goes_first_and_training_is_not_starved(store, redis_url):
    train = [f"t{n}" for n in range(4)]
    submit(redis_url, *of_env("first", *train), limits={"env:e": 1})
    queued(store)
    running = store.claim("first", "w")
    assert {store.claim(rollout_id, "w") for rollout_id in train} == {"parked"}
    evaluation = [f"e{n}" for n in range(9)]
    submit(redis_url, *(of | {"purpose": "eval"} for of in of_env(*evaluation)))
    assert {store.claim(rollout_id, "w") for rollout_id in queued(store)} == {"parked"}
    served = []
    for _ in train + evaluation:
        end(store, running)
        [next_] = queued(store)
        served.append(next_)
        running = store.claim(next_, "w")
    order = ["e0", "e1", "e2", "t0", "e3", "e4", "e5", "t1", "e6", "e7", "e8", "t2", "t3"]
    assert served == order, "it came last, and does not wait for all that came before"


def test_a_rollout_that_is_given_back_frees_its_place(store, redis_url):
    submit(redis_url, *of_env("a", "b"), limits={"env:e": 1})
    queued(store)
    first = store.claim("a", "w")
    assert store.claim("b", "w") == "parked"
    assert store.release(first.parsed(), first.attempt, "w", BACK) is Requeue.REQUEUED
    assert sorted(queued(store)) == ["a", "b"]
    assert store.claim("a", "w") == "parked"
    assert isinstance(store.claim("b", "w"), Claim)


def test_one_that_was_woken_and_is_cancelled_passes_its_place_on(store, redis_url):
    submit(redis_url, *of_env("a", "b", "c"), limits={"env:e": 1})
    queued(store)
    first = store.claim("a", "w")
    assert store.claim("b", "w") == store.claim("c", "w") == "parked"
    end(store, first)
    cancel(redis_url, "b")
    assert queued(store) == ["c", "b"]
    assert store.claim("b", "w") == "done"
    assert isinstance(store.claim("c", "w"), Claim)


def test_a_parked_rollout_can_be_cancelled(store, redis_url):
    submit(redis_url, *of_env("a", "b"), limits={"env:e": 1})
    first = store.claim("a", "w")
    assert store.claim("b", "w") == "parked"
    cancel(redis_url, "b")
    assert store.client.hget(broker.job_key("b"), "outcome") == b"cancelled"
    assert not store.client.exists(broker.parked_key("env:e"))
    queued(store)
    end(store, first)
    assert queued(store) == []


def test_raising_or_lifting_a_limit_wakes_those_for_whom_there_is_room(store, redis_url):
    submit(redis_url, *of_env("a", "b", "c", "d"), limits={"env:e": 1})
    for rollout_id in "abcd":
        store.claim(rollout_id, "w")
    queued(store)
    submit(redis_url, limits={"env:e": 2})
    assert queued(store) == ["b"]
    submit(redis_url, limits={"env:e": None})
    assert queued(store) == ["c", "d"]
    assert all(isinstance(store.claim(i, "w"), Claim) for i in "bcd")


def test_limits_of_environments_and_gateways_hold_together(store, redis_url):
    url = "http://gateway:1"
    submit(
        redis_url,
        *({"rollout_id": i, "environment": e, "gateway_url": url} for i, e in (("a", "x"), ("b", "y"), ("c", "x"))),
        {"rollout_id": "d", "environment": "y"},
        limits={"env:y": 1, f"gateway:{url}": 1},
    )
    first = store.claim("a", "w")
    assert store.claim("b", "w") == "parked"
    assert isinstance(store.claim("d", "w"), Claim), "one that waits for the gateway holds no place of its environment"
    queued(store)
    end(store, first)
    assert queued(store) == ["b"]
    assert store.claim("b", "w") == "parked", "for the environment this time"
    assert queued(store) == []
    assert isinstance(store.claim("c", "w"), Claim), "and it has let go of the gateway"


def test_the_sweep_mends_what_a_server_that_lost_its_last_second_left_half_done(store, app, redis_url):
    submit(redis_url, *of_env("a", "b"), limits={"env:e": 1})
    assert isinstance(store.claim("a", "w"), Claim)
    assert store.claim("b", "w") == "parked"
    queued(store)
    store.client.delete(broker.job_key("a"))
    store.client.zrem(broker.RUNNING, "a")
    assert sweep(store, app)["places"] == 1
    assert queued(store) == ["b"]
    assert isinstance(store.claim("b", "w"), Claim)


def test_mending_leaves_those_alone_that_run_wait_or_were_woken(store, redis_url):
    submit(redis_url, *of_env("a", "b", "c"), limits={"env:e": 1})
    first = store.claim("a", "w")
    assert store.claim("b", "w") == store.claim("c", "w") == "parked"
    end(store, first)  # "b" is woken
    assert Places(store.client).mend() == 0
    assert store.client.smembers(broker.place_key("env:e")) == {b"b"}
    assert store.client.zrange(broker.parked_key("env:e"), 0, -1) == [b"c"]


# -- gateways ----------------------------------------------------------------------------------------------------------

ONE, TWO = "http://one:1", "http://two:1"


def test_of_several_gateways_the_least_loaded_is_taken_and_kept_over_the_attempts(store, redis_url):
    submit(redis_url, *({"rollout_id": f"r{n}", "gateway_urls": [ONE, TWO]} for n in range(4)))
    claims = [store.claim(f"r{n}", "w") for n in range(4)]
    assert [claim.gateway_url for claim in claims] == [ONE, TWO, ONE, TWO]
    assert claims[1].parsed().gateway_url == TWO
    end(store, claims[3])
    assert store.release(claims[1].parsed(), claims[1].attempt, "w", BACK) is Requeue.REQUEUED
    for spare in range(4, 7):
        submit(redis_url, {"rollout_id": f"r{spare}", "gateway_urls": [TWO]})
        store.claim(f"r{spare}", "w")
    assert store.claim("r1", "w").gateway_url == TWO, "its prefix cache is there"


def test_a_gateway_with_room_comes_before_one_that_is_full(store, redis_url):
    submit(
        redis_url,
        *({"rollout_id": f"r{n}", "gateway_urls": [ONE, TWO]} for n in range(4)),
        limits={f"gateway:{ONE}": 1},
    )
    assert [store.claim(f"r{n}", "w").gateway_url for n in range(4)] == [ONE, TWO, TWO, TWO]


def test_members_of_a_group_can_share_one(store, redis_url):
    shared = {"gateway_urls": [ONE, TWO], "share_gateway": True, "group_id": "g"}
    submit(redis_url, *({"rollout_id": f"r{n}"} | shared for n in range(3)))
    assert {store.claim(f"r{n}", "w").gateway_url for n in range(3)} == {ONE}


def test_a_request_names_one_gateway_or_several():
    with pytest.raises(ValueError, match="exclude each other"):
        RolloutRequest.parse({"model": "m", "gateway_url": ONE, "gateway_urls": [TWO]})


# -- lanes -------------------------------------------------------------------------------------------------------------


def test_evaluation_goes_first_and_training_is_not_starved(store, redis_url):
    submit(
        redis_url,
        *({"rollout_id": f"t{n}"} for n in range(40)),
        *({"rollout_id": f"e{n}", "purpose": "eval"} for n in range(40)),
    )
    served = []
    for _ in range(40):
        key = next(key for key in broker.queue_keys() if store.client.llen(key))
        rollout_id = store.client.rpop(key).split(b'"id":"')[1].split(b'"')[0].decode()
        assert isinstance(store.claim(rollout_id, "w"), Claim)
        served.append(rollout_id)
    assert served[0] == "e0"
    assert [i for i in served if i[0] == "t"] == [f"t{n}" for n in range(9)], "a fourth of the places, in their order"
    assert [i for i in served if i[0] == "e"] == [f"e{n}" for n in range(31)]


def test_a_message_that_is_not_ours_does_not_hold_up_the_lanes(store, redis_url):
    """It is moved like any other, to where the next worker drops it."""
    submit(redis_url, *({"rollout_id": f"e{n}", "purpose": "eval"} for n in range(32)))
    all_junk = [b"junk", b"[]", b'{"headers": 3}', b'{"headers": {"id": 5}}']
    for place, junk in enumerate(all_junk):
        store.client.rpush(broker.queue_key(3), junk)
        for number in range(8):
            assert isinstance(store.claim(f"e{8 * place + number}", "w"), Claim)
    assert store.client.llen(broker.queue_key(3)) == 0
    assert set(all_junk) <= set(store.client.lrange(broker.queue_key(0), 0, -1))


# -- no wake-up is lost: any order of claims, ends, hand-backs, cancellations and limits -------------------------------


BOTH = ("rollouts", "gpu")


class Fleet(RuleBasedStateMachine):
    """Keeps the messages that each queue's lists hold apart, and lets any of them be served next."""

    url = ""
    store: JobStore

    def __init__(self) -> None:
        super().__init__()
        self.store.client.flushall()
        self.running: dict[str, Claim] = {}
        self.made = 0

    @rule(
        env=st.sampled_from("xy"),
        gateways=st.sampled_from([(), (ONE,), (ONE, TWO)]),
        eval_=st.booleans(),
        queue=st.sampled_from(BOTH),
    )
    def submit(self, env: str, gateways: tuple[str, ...], eval_: bool, queue: str) -> None:
        purpose = "eval" if eval_ else "train"
        request = {"rollout_id": f"r{self.made}", "environment": env, "gateway_urls": gateways, "purpose": purpose}
        submit(self.url, request | {"queue": queue})
        self.made += 1

    @rule(place=st.sampled_from(["env:x", "env:y", f"gateway:{ONE}"]), count=st.sampled_from([None, 1, 2]))
    def limit(self, place: str, count: int | None) -> None:
        submit(self.url, limits={place: count})

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        keys = self._lists()
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        # By a worker of that queue: nothing of another one is found there.
        self.store._serves = " gpu " if key in queue_keys("gpu") else " rollouts "
        rollout_id = self.store.client.rpop(key).split(b'"id":"')[1].split(b'"')[0].decode()
        before = self._holders()
        claim = self.store.claim(rollout_id, "w")
        assert claim != "elsewhere"
        if isinstance(claim, Claim):
            self.running[rollout_id] = claim
        for place, holders in self._holders().items():
            limit = self.store.client.hget(broker.LIMITS, place)
            assert limit is None or holders <= max(int(limit), before.get(place, 0)), "no limit is exceeded"

    def _lists(self) -> list[str]:
        return [key for queue in BOTH for key in queue_keys(queue) if self.store.client.llen(key)]

    def _holders(self) -> dict[bytes, int]:
        client = self.store.client
        return {place: client.scard(broker.place_key(place.decode())) for place in client.smembers(broker.PLACES)}

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["commit", "release", "lapse"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        claim = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        if how == "commit":
            end(self.store, claim)
        elif how == "release":
            self.store.release(claim.parsed(), claim.attempt, "w", BACK)
        else:
            self.store.client.zadd(running_key(claim.parsed().queue), {claim.rollout_id: 1})
            for lapsed in self.store.lapsed():
                self.store.requeue_lapsed(lapsed, BACK)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rollout_id = f"r{data.draw(st.integers(0, self.made - 1))}"
        if rollout_id not in self.running:
            cancel(self.url, rollout_id)

    @rule()
    def sweep(self) -> None:
        self.store.forget_queues()
        assert Places(self.store.client).mend() == 0, "nothing was lost, so there is nothing to mend"

    @invariant()
    def wherever_somebody_is_parked_the_place_is_full(self) -> None:
        client = self.store.client
        for place in client.smembers(broker.PLACES):
            name = place.decode()
            holders = {i.decode() for i in client.smembers(broker.place_key(name))}
            limit = client.hget(broker.LIMITS, name)
            if client.zcard(broker.parked_key(name)):
                assert limit is not None
                assert len(holders) >= int(limit)
            for rollout_id in holders - set(self.running):
                scores = [client.zscore(pending_key(queue), rollout_id) for queue in self.store.queues()]
                assert any(score is not None for score in scores), "it was woken, and will be served"

    def teardown(self) -> None:
        """Whatever happened, all of them come to an end when they are served."""
        self.store._serves = ""
        for _ in range(10_000):
            keys = self._lists()
            if keys:
                rollout_id = self.store.client.rpop(keys[0]).split(b'"id":"')[1].split(b'"')[0].decode()
                claim = self.store.claim(rollout_id, "w")
                if isinstance(claim, Claim):
                    self.running[rollout_id] = claim
            elif self.running:
                end(self.store, self.running.pop(min(self.running)))
            else:
                break
        states = {self.store.client.hget(broker.job_key(f"r{n}"), "state") for n in range(self.made)}
        assert states <= {b"done"}
        sets = [key(queue) for key in (pending_key, running_key) for queue in BOTH]
        assert not self.store.client.exists(broker.PLACES, broker.VERSIONS, *sets)
        self.store.forget_queues()
        assert self.store.queues() == ["rollouts"]


def test_no_wake_up_is_lost_and_no_limit_exceeded_whatever_happens(store, redis_url):
    machine = type("Machine", (Fleet,), {"url": redis_url, "store": store})
    quick = settings(
        max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(machine, settings=quick)


# -- what a moved message leaves behind --------------------------------------------------------------------------------

FIRST, LATER = broker.queue_key(0), broker.queue_key(9)


def take(store: JobStore, key: str) -> str:
    return store.client.rpop(key).split(b'"id":"')[1].split(b'"')[0].decode()


def test_a_message_that_was_moved_to_the_first_list_and_lost_is_sent_again(store, redis_url):
    submit(redis_url, *({"rollout_id": f"late{n}", "priority": 9} for n in range(3)))
    submit(redis_url, *({"rollout_id": f"p{n}", "priority": 0} for n in range(8)))
    for number in range(4):  # the fourth claim moves late0 to where the first list is served next
        assert isinstance(store.claim(take(store, FIRST), "w"), Claim), number
    assert take(store, FIRST) == "late0", "taken by a worker that is killed before it claims it"
    for _ in range(4):
        assert isinstance(store.claim(take(store, FIRST), "w"), Claim)
    assert store.client.hget(broker.job_key("late0"), "state") == b"pending"
    store.resend_missing(age=-1)
    assert "late0" in queued(store)


def test_a_cancelled_rollout_at_the_head_of_a_later_list_does_not_starve_those_behind_it(store, redis_url):
    submit(redis_url, *({"rollout_id": f"late{n}", "priority": 9} for n in range(3)))
    cancel(redis_url, "late0")
    submit(redis_url, *({"rollout_id": f"p{n}", "priority": 0} for n in range(40)))
    served = []
    for _ in range(24):
        served.append(take(store, FIRST))
        store.claim(served[-1], "w")
    assert "late1" in served, served
