"""The stand-in as its clients see it: a real server, asked over HTTP and with OpenAI's own client."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from workers.demo import STAND_IN
from workers.demo.agent import CALCULATOR, tool_results
from workers.demo.environment import demo_requests, grade
from workers.demo.model import END

TASK = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": "Rolls?\nFormula: 12 * 6 + 9"}]
TOKENS = {"logprobs": True, "return_token_ids": True}


@pytest.fixture
def ask(model_url: str) -> Any:
    def post(**body: Any) -> Any:
        sent = {"model": STAND_IN, "messages": TASK, "tools": [CALCULATOR], "temperature": 0} | TOKENS | body
        response = httpx.post(f"{model_url}/chat/completions", json=sent, timeout=20)
        response.raise_for_status()
        return response

    return post


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_names_itself_no_language_model(model_url: str) -> None:
    (model,) = httpx.get(f"{model_url}/models", timeout=20).json()["data"]

    assert model["id"] == "stand-in"
    assert model["owned_by"] == "rollout-fleet stand-in (not a language model)"


def test_the_same_request_gets_the_same_bytes(ask: Any) -> None:
    assert ask(seed=3, temperature=1).content == ask(seed=3, temperature=1).content


def converse(ask: Any, **body: Any) -> list[dict[str, Any]]:
    """Play the agent until the model makes no call; returns each turn's completion."""
    messages = list(TASK)
    turns = []
    while True:
        turns.append(ask(messages=messages, **body).json())
        message = turns[-1]["choices"][0]["message"]
        messages.append(message)
        results = tool_results(message)
        if not results:
            return turns
        messages += results


def test_each_turn_continues_the_ids_of_the_turn_before(ask: Any) -> None:
    turns = converse(ask)

    assert [turn["choices"][0]["finish_reason"] for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    for before, after in pairwise(turns):
        so_far = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
        assert after["prompt_token_ids"][: len(so_far)] == so_far


def test_an_answer_that_was_cut_is_continued_too(ask: Any) -> None:
    first = ask(max_tokens=20).json()
    message = first["choices"][0]["message"]
    second = ask(messages=[*TASK, message, {"role": "user", "content": "go on"}]).json()

    so_far = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(so_far)] == so_far


def test_ids_logprobs_and_usage_belong_together(ask: Any) -> None:
    turn = ask().json()
    choice = turn["choices"][0]
    entries = choice["logprobs"]["content"]

    assert len(entries) == len(choice["token_ids"]) == turn["usage"]["completion_tokens"]
    assert len(turn["prompt_token_ids"]) == turn["usage"]["prompt_tokens"]
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] < 0 for entry in entries)
    assert [token for entry in entries for token in entry["bytes"]] == choice["token_ids"][:-1]
    assert choice["token_ids"][-1] == END


def test_token_data_comes_only_when_asked_for(ask: Any) -> None:
    turn = ask(logprobs=False, return_token_ids=False).json()

    assert "prompt_token_ids" not in turn
    assert turn["choices"][0]["logprobs"] is None
    assert "token_ids" not in turn["choices"][0]
    assert ask(top_logprobs=1).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]


@pytest.mark.parametrize("body", [{}, {"tools": None}, {"max_tokens": 9}, {"max_completion_tokens": 60}])
def test_a_stream_carries_what_the_whole_answer_does(ask: Any, body: dict[str, Any]) -> None:
    whole = ask(**body).json()
    events = sse(ask(stream=True, stream_options={"include_usage": True}, **body))

    choices = [event["choices"][0] for event in events if event["choices"]]
    expected = whole["choices"][0]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events[-1]["usage"] == whole["usage"]
    assert events[0]["id"] == whole["id"]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == expected["token_ids"]
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert entries == expected["logprobs"]["content"]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == expected["message"]["content"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [expected["finish_reason"]]


def test_stops_for_length(ask: Any) -> None:
    choice = ask(max_tokens=30).json()["choices"][0]

    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 30
    assert choice["message"]["tool_calls"] is None
    assert choice["message"]["content"] == 'I need 12 * 6. <tool_call>{"na'


@pytest.mark.parametrize("stream", [False, True])
def test_openais_own_client_reads_calls_and_logprobs(model_url: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=model_url, api_key="k")
    common: Any = {"model": STAND_IN, "messages": TASK, "tools": [CALCULATOR], "logprobs": True, "temperature": 0}
    if stream:
        with client.chat.completions.stream(**common) as events:
            completion = events.get_final_completion()
    else:
        completion = client.chat.completions.create(**common)

    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"expression": "12 * 6"}'
    assert choice.message.content == "I need 12 * 6. "
    assert choice.logprobs.content[0].token == "I"


def test_without_tools_it_answers_at_once(ask: Any) -> None:
    assert ask(tools=None).json()["choices"][0]["message"]["content"].endswith("ANSWER: 81")


def test_a_failed_calculation_ends_the_work(ask: Any) -> None:
    call = ask().json()["choices"][0]["message"]
    failed = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "error: no power"}

    assert "error: no power" in ask(messages=[*TASK, call, failed]).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("text", ["Hello!", "007 + 1", "(-5)", "3 - ", "((((", "2" * 300 + " + 1"])
def test_a_task_without_usable_arithmetic_gets_an_answer(ask: Any, text: str) -> None:
    choice = ask(messages=[{"role": "user", "content": text}]).json()["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"]


def test_samples_of_a_task_differ_in_reward(ask: Any) -> None:
    rewards: dict[str, list[float]] = {}
    for request in demo_requests(samples=4):
        body = {"messages": request.messages, "tools": None} | request.sampling_params
        content = ask(**body).json()["choices"][0]["message"]["content"]
        rewards.setdefault(str(request.group_id), []).append(grade(content, request.answer)["reward"])

    every = [reward for group in rewards.values() for reward in group]
    assert 0.5 < sum(every) / len(every) < 0.9
    assert sum(1 for group in rewards.values() if len(set(group)) > 1) >= 8


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": ["hi"]}',
        b'{"messages": [{"content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
        b'{"messages": [{"role": "user", "content": "x", "tool_calls": ["a"]}]}',
    ],
)
def test_a_wrong_body_is_refused_in_openais_form(model_url: str, body: bytes) -> None:
    response = httpx.post(f"{model_url}/chat/completions", content=body, timeout=20)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
