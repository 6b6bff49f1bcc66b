"""Whatever the agent speaks, whole or streamed, the same conversation is the same steps, to the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def chat(history: list[Any]) -> tuple[str, dict[str, Any]]:
    return "/chat/completions", {"messages": [{"role": "system", "content": "S"}, *history], "tools": [FUNCTION]}


def responses(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS}
    return "/responses", {"instructions": "S", "input": history, "tools": [tool]}


def messages(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tool = {"name": "add", "input_schema": PARAMETERS}
    return "/v1/messages", {"system": "S", "messages": history, "tools": [tool], "max_tokens": 9}


def chats_turn(answer: dict[str, Any]) -> list[Any]:
    message = answer["choices"][0]["message"]
    return [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}]


def responses_turn(answer: dict[str, Any]) -> list[Any]:
    output = answer["output"]
    return [*output, {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "2"}]


def messages_turn(answer: dict[str, Any]) -> list[Any]:
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": "2"}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


DIALECTS = {"chat": (chat, chats_turn), "responses": (responses, responses_turn), "messages": (messages, messages_turn)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool_is_recorded_the_same(
    gateway: Any, model: Any, answer_of: Callable[..., Any], stream: bool
) -> None:
    recorded = {}
    for name, (request, turn) in DIALECTS.items():
        first = answer_of("I add", message={"reasoning_content": "hm", "tool_calls": [CALL]})
        ids = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"], 900]
        second = answer_of("2", message={"reasoning_content": "so", "tool_calls": [CALL]}, prompt_token_ids=ids)
        model.will(first, second)
        rollout = gateway.register()
        history: list[Any] = [{"role": "user", "content": "go"}]
        path, body = request(history)
        answer = gateway.post(f"/v1/rollouts/{rollout}{path}", json=body).json()
        path, body = request([*history, *turn(answer)])
        assert gateway.post(f"/v1/rollouts/{rollout}{path}", json=body | {"stream": stream}).status_code == 200
        whole = gateway.trajectory(rollout)
        assert whole["integrity"]["ok"], whole["integrity"]
        assert whole["integrity"]["branches"] == [[0, 1]]
        recorded[name] = [
            {key: step[key] for key in ("prompt", "completion", "tokens", "is_truncated")}
            for step in whole["trajectory"]
        ]
    assert recorded["responses"] == recorded["chat"]
    assert recorded["messages"] == recorded["chat"]
