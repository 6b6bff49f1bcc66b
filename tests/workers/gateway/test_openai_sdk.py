"""The official OpenAI client as an agent: whole and streamed answers, tool calls, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from starlette.responses import Response

TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
MESSAGES: Any = [{"role": "user", "content": "list files"}]


@pytest.fixture
def agent(gateway: Any) -> Iterator[openai.OpenAI]:
    rollout = gateway.register("r-sdk", key="agent-key")
    with openai.OpenAI(base_url=f"{gateway.base_url}/v1/rollouts/{rollout}", api_key="agent-key", max_retries=0) as sdk:
        yield sdk
    gateway.post(f"/v1/rollouts/{rollout}/unregister")


def test_a_conversation_with_a_tool_call(
    agent: openai.OpenAI, gateway: Any, model: Any, answer_of: Callable[..., Any]
) -> None:
    model.will(answer_of(None, message={"tool_calls": [TOOL_CALL]}, choice={"finish_reason": "tool_calls"}))
    first = agent.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS).choices[0].message
    assert first.tool_calls is not None
    assert first.tool_calls[0].id == "call_1"
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "a.py"}
    messages: Any = [*MESSAGES, first.model_dump(exclude_none=True), tool]
    assert (
        agent.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message.content == "hello"
    )
    flat = [{"id": "call_1", "name": "bash", "arguments": '{"command": "ls"}'}]
    assert [m.get("tool_calls") for m in gateway.trajectory("r-sdk")["completion"]] == [flat, None, None]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream(agent: openai.OpenAI, gateway: Any, usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(agent.chat.completions.create(model="m", messages=MESSAGES, stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello"
    assert (chunks[-1].usage is not None) is usage
    assert all(chunk.choices for chunk in chunks) is not usage
    assert gateway.trajectory("r-sdk")["completion"][0]["content"] == "hello"


def test_a_streamed_tool_call(agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any]) -> None:
    model.will(answer_of(None, message={"tool_calls": [TOOL_CALL]}, choice={"finish_reason": "tool_calls"}))
    with agent.chat.completions.stream(model="m", messages=MESSAGES, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"command": "ls"}'


def test_errors_have_the_clients_own_types_and_the_upstreams_words(agent: openai.OpenAI, model: Any) -> None:
    too_long = b'{"error": {"message": "maximum context length is 10", "code": "context_length_exceeded"}}'
    model.will(Response(too_long, 400), Response(b"{}", 429), Response(b"{}", 500))
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        agent.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.RateLimitError):
        agent.chat.completions.create(model="m", messages=MESSAGES)
    with pytest.raises(openai.InternalServerError):
        agent.chat.completions.create(model="m", messages=MESSAGES)


def test_a_failure_in_mid_stream_is_raised(
    agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    model.will(lambda _: model.events(events_of(answer_of("abc"))[:3]))
    with pytest.raises(openai.APIError, match="ended its stream early"):
        list(agent.chat.completions.create(model="m", messages=MESSAGES, stream=True))


def test_a_wrong_key_and_a_cancelled_rollout(agent: openai.OpenAI, gateway: Any) -> None:
    with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
        agent.with_options(api_key="wrong").chat.completions.create(model="m", messages=MESSAGES)
    gateway.post("/v1/rollouts/r-sdk/cancel")
    with pytest.raises(openai.ConflictError, match="Rollout cancelled"):
        agent.with_options(max_retries=2).chat.completions.create(model="m", messages=MESSAGES)


def test_models(agent: openai.OpenAI) -> None:
    assert [entry.id for entry in agent.models.list()] == ["m"]
