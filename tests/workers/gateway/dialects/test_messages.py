"""Anthropic's Messages dialect: what is read, what is answered and streamed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.gateway.server.dialects.messages import Messages
from workers.gateway.server.errors import GatewayRefusal

CALL = {"id": "call:9", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}
TOOL = {
    "name": "add",
    "description": "Adds",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
Read = Callable[..., Any]


@pytest.fixture
def read() -> Read:
    def read(earlier: Any = lambda _: None, **body: Any) -> Any:
        whole = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | body
        return Messages().read(json.dumps(whole).encode(), earlier)

    return read


class Agent:
    """Speaks as an agent of one rollout."""

    def __init__(self, gateway: Any) -> None:
        self.gateway = gateway
        self.rollout = gateway.register(key="agent-key")

    def ask(self, *messages: Any, path: str = "/v1/messages?beta=true", key: str = "agent-key", **body: Any) -> Any:
        body = {"model": "mine", "max_tokens": 100, "messages": list(messages) or [user("hi")]} | body
        url = f"/v1/rollouts/{self.rollout}{path}"
        return self.gateway.post(url, json=body, headers={"x-api-key": key, "anthropic-version": "2023-06-01"})

    def events(self, *messages: Any, **body: Any) -> list[dict[str, Any]]:
        answer = self.ask(*messages, stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        pairs = [event.split("\n") for event in answer.text.split("\n\n") if event]
        read = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
        assert [name.removeprefix("event: ") for name, _ in pairs] == [event["type"] for event in read]
        return read


@pytest.fixture
def agent(gateway: Any) -> Agent:
    return Agent(gateway)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# -- requests ----------------------------------------------------------------------------------------------------------


def test_system_blocks_are_one_message_without_the_billing_line(read: Read) -> None:
    blocks = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}]
    blocks += [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("A", "B")]
    later = [user("hi"), {"role": "system", "content": "C"}]
    assert [m["content"] for m in read(system=blocks, messages=later).chat["messages"]] == ["A\n\nB", "hi", "C"]
    assert read(system="S").chat["messages"][0] == {"role": "system", "content": "S"}


def test_blocks_become_messages(read: Read) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://x.test/y.png"}}
    history = [
        user([{"type": "text", "text": "see"}, image]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "I add"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        user(
            [
                {"type": "text", "text": "go on"},
                {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "2"}, linked]},
            ]
        ),
    ]
    asked, answer, first, second, more = read(messages=history).chat["messages"]
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert asked["content"] == [{"type": "text", "text": "see"}, data]
    assert (answer["content"], answer["reasoning_content"]) == ("I add", "hm")
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == ['{"a": 1}', "{}"]
    assert first == {"role": "tool", "tool_call_id": "t1", "content": "Error: no"}
    assert second == {"role": "tool", "tool_call_id": "t2", "content": "2"}
    assert [part.get("text") or part["image_url"]["url"] for part in more["content"]] == [
        "Output of the tool call t2:",
        "https://x.test/y.png",
        "go on",
    ]


def test_parameters_have_chats_names(read: Read) -> None:
    call = read(
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        context_management={"edits": []},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        stream=True,
    )
    chat = dict(call.chat)
    assert chat.pop("messages")
    assert chat == {
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 3,
        "tools": [
            {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
    }
    assert call.stream


@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tool_choice(read: Read, choice: Any, chats: Any) -> None:
    assert read(tools=[TOOL], tool_choice=choice).chat["tool_choice"] == chats
    assert "tool_choice" not in read(tool_choice=choice).chat, "there is nothing to choose from"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "judge", "content": ""}]}, "messages[0].role"),
        ({"messages": [user(5)]}, "messages[0].content"),
        ({"messages": [user([{"type": "search_result"}])]}, "messages[0].content[0].type"),
        ({"messages": [user([{"type": "document", "source": {"type": "base64"}}])]}, "messages[0].content[0].type"),
        ({"messages": [user([{"type": "image", "source": {"type": "file"}}])]}, "messages[0].content[0].source.type"),
        ({"messages": [user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": 1, "name": "a", "input": {}}]}]},
            "messages[0].content[0].id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "most"}}, "tool_choice.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"colour": "red"}, "colour"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(read: Read, body: dict[str, Any], field: str) -> None:
    with pytest.raises(GatewayRefusal) as caught:
        read(**body)
    assert caught.value.status_code == 400
    said = Messages().error(caught.value)
    assert said["error"]["type"] == "invalid_request_error"
    assert said["error"]["message"].startswith(f"{field}: ")


# -- through the gateway -----------------------------------------------------------------------------------------------


def test_an_answer(agent: Agent, gateway: Any, model: Any, answer_of: Callable[..., Any]) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    message = {"reasoning_content": "think", "tool_calls": [CALL]}
    model.will(answer_of("sum", message=message, usage=usage, choice={"finish_reason": "tool_calls"}))
    answer = agent.ask(tools=[TOOL]).json()
    thinking, text, use = answer["content"]
    assert (thinking["type"], thinking["thinking"], bool(thinking["signature"])) == ("thinking", "think", True)
    assert text == {"type": "text", "text": "sum"}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 1})
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "m")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    step = gateway.trajectory(agent.rollout)["trajectory"][0]
    assert step["extras"]["dialect"] == "messages"
    assert step["completion"][0]["tool_calls"] == [{"id": "call:9", "name": "add", "arguments": '{"a":  1}'}]


@pytest.mark.parametrize(
    ("choice", "stopped"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": 151645}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
    ],
)
def test_stop_reasons(agent: Agent, model: Any, answer_of: Callable[..., Any], choice: Any, stopped: Any) -> None:
    model.will(answer_of(choice=choice))
    answer = agent.ask().json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == stopped


def test_both_paths_answer_and_the_base_says_that_somebody_is_there(agent: Agent, gateway: Any) -> None:
    assert agent.ask(path="/messages").status_code == 200
    assert gateway.head(f"/v1/rollouts/{agent.rollout}").status_code == 200


def test_a_stream_has_every_event_in_order(agent: Agent, model: Any, answer_of: Callable[..., Any]) -> None:
    second = CALL | {"id": "b", "function": {"name": "add", "arguments": '{"b": 22}'}}
    message = {"reasoning_content": "r", "tool_calls": [CALL, second]}
    model.will(answer_of("ab", message=message, choice={"finish_reason": "tool_calls"}))
    events = agent.events()
    named = [event.get("delta", {}).get("type") or event["type"] for event in events]
    assert named == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "input_json_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2, 3]
    json_of = ["".join(e["delta"]["partial_json"] for e in events if named[events.index(e)] == "input_json_delta"
                       and e["index"] == index) for index in (2, 3)]  # fmt: skip
    assert json_of == ['{"a":  1}', '{"b": 22}']
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (events[-2]["usage"]["input_tokens"], events[-2]["usage"]["output_tokens"]) == (3, 2)
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[2]["id"] != starts[3]["id"]
    assert (starts[2]["input"], starts[0]["thinking"], starts[1]["text"]) == ({}, "", "")


def test_calls_that_come_mixed_end_up_whole(agent: Agent, model: Any) -> None:
    def chunk(finish: Any = None, **delta: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"

    def part(index: int, arguments: str = "", **more: Any) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments} | more}

    parts = [
        chunk(tool_calls=[{"id": "x"} | part(0, name="ad"), {"id": "y"} | part(1, name="sub")]),
        chunk(tool_calls=[part(0, name="d")]),
        chunk(tool_calls=[part(1, '{"b"'), part(0, '{"a"')]),
        chunk(content="late"),
        chunk(tool_calls=[part(0, ": 1}"), part(1, ": 2}"), part(2, name="none")]),
        chunk(finish="stop"),
    ]
    model.will(lambda _: model.events(parts))
    events = agent.events()
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block.get("name") for block in blocks] == ["add", "sub", "none", None]
    said = ["".join(e["delta"].get("partial_json") or e["delta"].get("text") or "" for e in events
                    if e["type"] == "content_block_delta" and e["index"] == index) for index in range(4)]  # fmt: skip
    assert said == ['{"a": 1}', '{"b": 2}', "", "late"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("arguments", ['{"a":  1}', '{"a": ', ""])
def test_the_model_gets_its_own_words_back(
    agent: Agent, gateway: Any, model: Any, answer_of: Callable[..., Any], arguments: str
) -> None:
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    model.will(*[answer_of("I add.  ", message={"tool_calls": [call]}, choice={"finish_reason": "tool_calls"})] * 2)
    history = [user("hi")]
    for _ in range(2):
        content = agent.ask(*history).json()["content"]
        content[0]["text"] = content[0]["text"].strip()  # as some agents do
        result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "2"}
        history += [{"role": "assistant", "content": content}, user([result])]
    agent.ask(*history)
    sent = model.requests[2]["messages"]
    for answer, result in ((1, 2), (3, 4)):
        assert (sent[answer]["content"], sent[answer]["tool_calls"]) == ("I add.  ", [call])
        assert sent[result]["tool_call_id"] == "call:9"
    trajectory = gateway.trajectory(agent.rollout)
    prompts = [step["prompt"] for step in trajectory["trajectory"]]
    assert prompts[2][:3] == prompts[1]


def test_an_edited_history_is_left_as_the_agent_has_it(read: Read) -> None:
    known = [user("hi"), {"role": "assistant", "content": "x", "tool_calls": [CALL]}]
    use = {"type": "tool_use", "id": f"toolu_{'0' * 24}_0", "name": "add", "input": {"a": 2}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "2"}
    history = [user("hi"), {"role": "assistant", "content": [{"type": "text", "text": "x"}, use]}, user([result])]
    for earlier in (lambda _: (known, {}), lambda _: None, lambda _: ([], {})):
        sent = read(earlier, messages=history).chat["messages"]
        assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'
        assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == use["id"]


@pytest.mark.parametrize(
    ("status", "answered", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (413, 413, "request_too_large"),
        (429, 429, "rate_limit_error"),
        (500, 502, "api_error"),
    ],
)
def test_errors_have_anthropics_types(agent: Agent, model: Any, status: int, answered: int, kind: str) -> None:
    for stream in (False, True):
        model.will(Response(b'{"error": {"message": "the reason"}}', status))
        answer = agent.ask(stream=stream)
        assert answer.status_code == answered
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert "the reason" in body["error"]["message"]


def test_a_wrong_key_and_a_cancelled_rollout(agent: Agent, gateway: Any) -> None:
    answer = agent.ask(key="wrong")
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    gateway.post(f"/v1/rollouts/{agent.rollout}/cancel")
    answer = agent.ask()
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "invalid_request_error")
    gateway.post(f"/v1/rollouts/{agent.rollout}/unregister")
    answer = agent.ask()
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_a_stream_that_breaks_ends_with_an_error(
    agent: Agent, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    model.will(lambda _: model.events(events_of(answer_of("abc"))[:3]))
    last = agent.events()[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "ended its stream early" in last["error"]["message"]


def test_a_silent_upstream_is_bridged_by_pings(
    gateway_with: Callable[..., Any],
    model: Any,
    model_url: str,
    answer_of: Callable[..., Any],
    events_of: Callable[..., list[bytes]],
) -> None:
    gate = threading.Event()
    agent = Agent(gateway_with(upstream=model_url, keep_alive=0.02))
    events = events_of(answer_of("a"))
    model.will(lambda _: model.events([*events[:2], lambda: gate.wait(20), *events[2:]]))
    url = f"/v1/rollouts/{agent.rollout}/v1/messages"
    body = {"model": "m", "messages": [user("hi")], "stream": True}
    whole = ""
    with agent.gateway.stream("POST", url, json=body, headers={"x-api-key": "agent-key"}) as answer:
        for text in answer.iter_text():
            whole += text
            if 'event: ping\ndata: {"type":"ping"}\n\n' in whole:
                gate.set()
    assert whole.rstrip().endswith('data: {"type":"message_stop"}')


def test_tokens_are_counted_by_the_models_server(
    serve: Callable[[Any], Any], gateway_with: Callable[..., Any], model: Any
) -> None:
    own = type(model)()
    asked: list[Any] = []

    async def tokenize(request: Request) -> Response:
        asked.append(await request.json())
        return Response(b'{"count": 41}', media_type="application/json")

    own.app.router.routes.append(Route("/tokenize", tokenize, methods=["POST"]))
    agent = Agent(gateway_with(upstream=serve(own.app).url))
    for path in ("/v1/messages/count_tokens?beta=true", "/messages/count_tokens"):
        assert agent.ask(path=path, system="S", tools=[TOOL]).json() == {"input_tokens": 41}
    assert [message["content"] for message in asked[0]["messages"]] == ["S", "hi"]
    assert (asked[0]["model"], asked[0]["tools"][0]["function"]["name"]) == ("m", "add")
    assert agent.ask(path="/messages/count_tokens", messages=5).json()["error"]["type"] == "invalid_request_error"


def test_tokens_are_counted_by_a_call_where_the_server_cannot(agent: Agent, gateway: Any, model: Any) -> None:
    assert agent.ask(path="/v1/messages/count_tokens").json() == {"input_tokens": 3}
    assert (model.requests[0]["max_tokens"], model.requests[0]["messages"]) == (1, [user("hi")])
    assert gateway.trajectory(agent.rollout)["num_turns"] == 0
    model.will(Response(b"{}", 500))
    answer = agent.ask(path="/v1/messages/count_tokens")
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "api_error")
