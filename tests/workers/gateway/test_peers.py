"""Several gateway processes side by side: any of them answers for every rollout, whoever owns it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import free_port, wait_until

from workers.gateway.server import create_app
from workers.gateway.server.peers import Peers


@pytest.fixture
def pair(serve: Callable[[Any], Any], gateway: Any, model_url: str) -> Iterator[list[Any]]:
    """Clients of two gateways that know each other."""
    served, apps = [], []
    for name in ("one", "two"):
        apps.append(create_app(upstream=model_url, instance=name, control_key="control-key"))
        served.append(serve(apps[-1]))
    urls = [each.url for each in served]
    for app, url in zip(apps, urls, strict=True):
        app.state.peers = Peers(url, urls, timeout=20)
    clients = [type(gateway)(base_url=url, timeout=20) for url in urls]
    yield clients
    for client in clients:
        client.close()


CONTROL = {"authorization": "Bearer control-key"}
AGENT = {"authorization": "Bearer agent-key"}
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_rollout_that_was_registered_at_one_is_served_by_both(pair: list[Any], model: Any) -> None:
    urls = [str(gateway.base_url).rstrip("/") for gateway in pair]
    peers = Peers(urls[0], urls, timeout=20)
    names = [f"r-{n}" for n in range(100)]  # both own some of them, wherever they listen
    theirs = [name for name in names if peers.owner(name)][:3]
    ours = [name for name in names if not peers.owner(name)][:3]
    for n, name in enumerate([*theirs, *ours]):
        path, headers = f"/v1/rollouts/{name}", CONTROL | {"x-rollout-key": "agent-key"}
        assert pair[n % 2].post(f"{path}/register", json={"model": "m"}, headers=headers).status_code == 200
        for gateway in pair:
            assert gateway.post(f"{path}/chat/completions", json=BODY, headers=AGENT).status_code == 200
            stream = gateway.post(f"{path}/chat/completions", json=BODY | {"stream": True}, headers=AGENT)
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.content.endswith(b"data: [DONE]\n\n")
            assert gateway.post(f"{path}/chat/completions", json=BODY, headers=CONTROL).status_code == 401
            assert gateway.get(f"{path}/trajectory").status_code == 401
            assert gateway.head(f"{path}/models", headers=AGENT).status_code == 200
        found = [gateway.get(f"{path}/trajectory", params={"wait": 9}, headers=CONTROL) for gateway in pair]
        assert [answer.json()["num_turns"] for answer in found] == [4, 4]
        counts = [gateway.get("/healthz").json()["rollouts"] for gateway in pair]
        assert sum(counts) == n + 1
    assert counts == [3, 3]


def test_every_dialect_is_passed_on(pair: list[Any], model: Any) -> None:
    path = "/v1/rollouts/r-dialects"
    pair[0].post(f"{path}/register", json={"model": "m"}, headers=CONTROL | {"x-rollout-key": "agent-key"})
    for gateway in pair:
        asked = {"input": "hi", "stream": True}
        assert b"response.completed" in gateway.post(f"{path}/responses", json=asked, headers=AGENT).content
        asked = BODY | {"max_tokens": 9}
        answer = gateway.post(f"{path}/v1/messages", json=asked, headers={"x-api-key": "agent-key"})
        assert answer.json()["content"] == [{"type": "text", "text": "hello"}]
        answer = gateway.post(f"{path}/v1/messages", json=asked, headers={"x-api-key": "other"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert gateway.post(f"{path}/v1/messages/count_tokens", json=BODY, headers=AGENT).json() == {"input_tokens": 3}
    assert pair[1].get(f"{path}/trajectory", headers=CONTROL).json()["num_turns"] == 4


def test_an_owner_that_is_away_is_a_typed_failure(gateway_with: Callable[..., Any], model_url: str) -> None:
    own, away = "http://127.0.0.1:1", f"http://127.0.0.1:{free_port()}"
    peers = Peers(own, [own, away], timeout=20)
    gateway = gateway_with(upstream=model_url, peers=peers)
    theirs = next(f"r-{n}" for n in range(100) if peers.owner(f"r-{n}") == away)
    answer = gateway.chat(theirs)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "gateway_error")
    ours = next(f"r-{n}" for n in range(100) if peers.owner(f"r-{n}") is None)
    gateway.register(ours)
    assert gateway.chat(ours).status_code == 200


def test_an_agent_that_leaves_a_stream_at_one_ends_it_at_the_owner(
    pair: list[Any], model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    gate, rollout = threading.Event(), "r-leaves"
    pair[0].post(f"/v1/rollouts/{rollout}/register", json={"model": "m"}, headers=CONTROL)
    for gateway in pair:
        events = events_of(answer_of("abc"))
        model.will(lambda _, events=events: model.events([*events[:3], lambda: gate.wait(20), *events[3:]]))
        body = BODY | {"stream": True}
        with gateway.stream("POST", f"/v1/rollouts/{rollout}/chat/completions", json=body) as answer:
            next(answer.iter_raw())
    wait_until(lambda: model.left_early == 2, what="the model server to notice")
    gate.set()


def test_rollouts_move_only_to_or_from_the_process_that_joins_or_leaves() -> None:
    urls = [f"http://gw-{n}:8080" for n in range(5)]
    more, fewer = Peers(urls[0], urls, 1), Peers(urls[0], urls[:4], 1)
    owners = [(more.owner(f"r-{n}"), fewer.owner(f"r-{n}")) for n in range(1000)]
    moved = [(one, other) for one, other in owners if one != other]
    assert {one for one, _ in moved} == {urls[4]}
    assert 100 < len(moved) < 300


def test_a_process_that_is_none_of_the_peers_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the peers"):
        Peers("http://a", ["http://b"], 1)
    with pytest.raises(ValueError, match="not an http"):
        Peers("http://a", ["http://a", "b"], 1)
