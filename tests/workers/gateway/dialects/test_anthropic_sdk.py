"""Anthropic's own client against the gateway, where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

CALL = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def agent(gateway: Any) -> Iterator[Any]:
    rollout = gateway.register(key="agent-key")
    base = str(gateway.base_url.join(f"/v1/rollouts/{rollout}"))
    with anthropic.Anthropic(base_url=base, api_key="agent-key", max_retries=0, timeout=20) as client:
        yield client


def test_a_conversation_with_a_tool(agent: Any, model: Any, answer_of: Callable[..., Any]) -> None:
    called = answer_of(
        "sum",
        message={"reasoning_content": "think", "tool_calls": [CALL]},
        choice={"finish_reason": "tool_calls"},
    )
    model.will(called, answer_of("2"))
    first = agent.messages.create(**ASKED, tools=[TOOL])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.stop_reason, first.content[2].input) == ("tool_use", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "2"}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert agent.messages.create(**ASKED | {"messages": history}, tools=[TOOL]).content[0].text == "2"
    assert model.requests[1]["messages"][1] == {
        "role": "assistant",
        "content": "sum",
        "reasoning_content": "think",
        "tool_calls": [CALL],
    }


def test_the_clients_own_stream_helper_reads_it(agent: Any, model: Any, answer_of: Callable[..., Any]) -> None:
    message = {"reasoning_content": "think", "tool_calls": [CALL]}
    model.will(answer_of("sum", message=message, choice={"finish_reason": "tool_calls"}))
    with agent.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == "sum"
        answer = stream.get_final_message()
    assert (answer.content[0].thinking, answer.content[2].input) == ("think", {"a": 1})
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens) == ("tool_use", 3, 3)


def test_tokens_and_errors(agent: Any) -> None:
    counted = agent.messages.count_tokens(model="m", messages=ASKED["messages"])
    assert counted.input_tokens == 3
    with pytest.raises(anthropic.AuthenticationError, match="key is missing or wrong"):
        agent.with_options(api_key="wrong").messages.create(**ASKED)
    with pytest.raises(anthropic.BadRequestError, match="container: not supported"):
        agent.messages.create(**ASKED, extra_body={"container": "c"})
