"""A real model behind the gateway, where its extra is installed: what is recorded is what it sampled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import orjson
import pytest
from support import free_port, wait_until

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the extra llm is not installed")

MESSAGES = [{"role": "user", "content": "Name three colours."}]
FIELDS = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.8, "seed": 7, "logprobs": True}


@pytest.fixture(scope="module")
def llm_url() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", "workers.demo.llm", "--port", str(port)]) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health"), timeout=60, what="the model")
        yield url
        process.terminate()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def entries_of(content: bytes, stream: bool) -> list[dict[str, Any]]:
    """The logprobs' entries of an answer, as the agent got it."""
    if not stream:
        return list(orjson.loads(content)["choices"][0]["logprobs"]["content"])
    chunks = [orjson.loads(line[6:]) for line in content.split(b"\n\n") if line.startswith(b"data: {")]
    found = [choice["logprobs"]["content"] for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
    return [entry for entries in found for entry in entries]


@pytest.mark.parametrize("stream", [False, True])
def test_the_recorded_ids_and_logprobs_are_the_models_own(
    gateway_with: Callable[..., Any], llm_url: str, stream: bool
) -> None:
    gateway = gateway_with(upstream=llm_url)
    gateway.timeout = 60
    rollout = gateway.register()
    answer = gateway.chat(rollout, **FIELDS, stream=stream)
    assert answer.status_code == 200
    entries = entries_of(answer.content, stream)
    recorded = gateway.trajectory(rollout)
    tokens = recorded["trajectory"][0]["tokens"]
    assert tokens["completion_ids"] == [entry["id"] for entry in entries]
    assert tokens["completion_logprobs"] == [entry["logprob"] for entry in entries]
    assert len(entries) > 3
    assert recorded["integrity"]["problems"] == []


@pytest.mark.parametrize(("dialect", "path", "name"), [("responses", "/responses", "input"), ("messages",) * 3])
def test_its_server_is_asked_in_the_dialects_that_it_speaks(
    gateway_with: Callable[..., Any], llm_url: str, dialect: str, path: str, name: str
) -> None:
    """Whole, streamed, and as a chat call: the model gets the same prompt, and the record is what it said."""
    gateway = gateway_with(upstream=llm_url, native=[dialect])
    gateway.timeout = 60
    path = f"/{path.removeprefix('/')}"
    counts = set()
    for stream, params in ((False, {}), (True, {}), (False, {"response_format": {"type": "text"}})):
        rollout = gateway.register(sampling_params={"temperature": 0.0, "max_tokens": 8, **params})
        answer = gateway.post(f"/v1/rollouts/{rollout}{path}", json={name: MESSAGES, "stream": stream})
        assert answer.status_code == 200, answer.text
        (step,) = gateway.trajectory(rollout)["trajectory"]
        assert step["extras"].get("native", False) is not bool(params)
        assert len(step["completion"][0]["content"]) > 3
        if not stream:
            assert orjson.dumps(step["completion"][0]["content"])[1:-1] in answer.content
        counts.add(gateway.get(f"/v1/rollouts/{rollout}/progress").json()["prompt_tokens"])
    assert len(counts) == 1
    assert counts.pop() > 5
