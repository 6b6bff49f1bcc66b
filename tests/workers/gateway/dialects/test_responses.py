"""OpenAI's Responses dialect: what is read, what is answered and streamed, also to OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from starlette.responses import Response

from workers.gateway.server.dialects.responses import Responses
from workers.gateway.server.errors import GatewayRefusal

CALL = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
Read = Callable[..., Any]


@pytest.fixture
def read() -> Read:
    def read(earlier: Any = lambda _: None, **body: Any) -> Any:
        return Responses().read(json.dumps({"input": "hi", "model": "m"} | body).encode(), earlier)

    return read


@pytest.fixture
def agent(gateway: Any) -> Iterator[openai.OpenAI]:
    gateway.register("r-responses", key="agent-key")
    base = str(gateway.base_url.join("/v1/rollouts/r-responses"))
    with openai.OpenAI(base_url=base, api_key="agent-key", max_retries=0, timeout=20) as client:
        yield client
    gateway.post("/v1/rollouts/r-responses/unregister")


def messages(call: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call.chat["messages"]
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


def test_instructions_and_leading_developer_messages_are_one_system_message(read: Read) -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]}
    call = read(instructions="A", input=[developer, {"role": "user", "content": "hi"}, developer])
    assert messages(call) == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "B"},
    ]


def test_an_answers_items_are_one_message_again(read: Read) -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":  1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}", "namespace": "math"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"role": "assistant", "content": "done"},
    ]
    user, answer, first, second, last = messages(read(input=items))
    assert user["content"] == "go"
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "I add")
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "add", "arguments": '{"a":  1}'},
        {"name": "math__add", "arguments": "{}"},
    ]
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert (second["tool_call_id"], second["content"]) == ("c2", "2")
    assert last == {"role": "assistant", "content": "done"}


def test_images_pass_and_those_of_tools_follow_them(read: Read) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, image]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image | {"detail": "original"}]},
    ]
    user, _, tool, shown = messages(read(input=items))
    url = {"url": "data:image/png;base64,AA"}
    assert user["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": url | {"detail": "low"}},
    ]
    assert tool["content"] == "(see the image below)"
    assert shown["role"] == "user"
    assert shown["content"][1] == {"type": "image_url", "image_url": url}


def test_tools_and_parameters_have_chats_names(read: Read) -> None:
    schema = {"type": "json_schema", "name": "out", "schema": {"type": "object"}, "strict": True}
    call = read(
        tools=[FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "patch", "description": "P"}],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        max_output_tokens=7,
        temperature=0.5,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": schema, "verbosity": "low"},
        store=False,
        include=["reasoning.encrypted_content"],
        client_metadata={"x": "y"},
        metadata={"k": "v"},
        stream=True,
    )
    chat = dict(call.chat)
    add, patch = chat.pop("tools")
    assert add == {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
    assert patch["function"]["parameters"]["required"] == ["input"]
    assert chat.pop("messages")
    assert chat == {
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "max_tokens": 7,
        "temperature": 0.5,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "out", "schema": {"type": "object"}, "strict": True},
        },
    }
    assert call.stream
    assert call.notes == {"tools_left_out": ["web_search"], "metadata": {"k": "v"}}


def test_allowed_tools_take_the_others_away(read: Read) -> None:
    other = FUNCTION | {"name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    call = read(tools=[FUNCTION, other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in call.chat["tools"]] == ["add"]
    assert call.chat["tool_choice"] == "required"


def test_without_tools_nothing_is_said_of_them(read: Read) -> None:
    assert set(read(tool_choice="auto", parallel_tool_calls=True, tools=[]).chat) == {"messages"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"colour": "red"}, "colour"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call", "name": "a", "call_id": 5, "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input[0].content.text"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]}, "tools[0].tools[0].type"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": []}, None),
        ({"previous_response_id": "resp_nobodys"}, "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(read: Read, body: dict[str, Any], param: str | None) -> None:
    if param is None:
        assert read(**body).chat
        return
    with pytest.raises(GatewayRefusal) as caught:
        read(**body)
    assert caught.value.status_code == 400
    assert caught.value.error is not None
    assert caught.value.error["param"] == param
    assert Responses().error(caught.value)["error"]["param"] == param


# -- through the gateway -----------------------------------------------------------------------------------------------


def test_an_answer(agent: openai.OpenAI, model: Any, gateway: Any, answer_of: Callable[..., Any]) -> None:
    model.will(answer_of("sum", message={"reasoning_content": "think", "tool_calls": [CALL]}))
    answer = agent.responses.create(model="mine", input="hi", instructions="Be", tools=[FUNCTION], metadata={"a": "b"})  # type: ignore[list-item]
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert (answer.status, answer.output_text, answer.instructions, answer.metadata) == (
        "completed",
        "sum",
        "Be",
        {"a": "b"},
    )
    assert answer.output[2].to_dict() | {"id": ""} == {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_9",
        "name": "add",
        "arguments": '{"a": 1}',
    }
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 3, 6)
    step = gateway.trajectory("r-responses")["trajectory"][0]
    assert step["extras"]["dialect"] == "responses"
    assert step["completion"][0]["reasoning_content"] == "think"
    assert step["tokens"]["completion_ids"] == [ord(c) for c in "sum"]


@pytest.mark.parametrize(("reason", "said"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_is_incomplete(
    agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any], reason: str, said: str
) -> None:
    cut = answer_of("ab", choice={"finish_reason": reason})
    model.will(cut, cut)
    answer = agent.responses.create(model="m", input="hi")
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == said
    assert list(agent.responses.create(model="m", input="hi", stream=True))[-1].type == "response.incomplete"


def test_a_stream_has_every_event_in_order(agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any]) -> None:
    second = CALL | {"id": "call_10", "function": {"name": "add", "arguments": '{"b": 22}'}}
    model.will(answer_of("ab", message={"reasoning_content": "r", "tool_calls": [CALL, second]}))
    events = list(agent.responses.create(model="m", input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta"]
    closed = ["function_call_arguments.done", "output_item.done"]
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.done", *done),
        *(*item, "output_text.delta", "output_text.delta", "output_text.done", *done),
        *(*call, "function_call_arguments.delta", *closed),
        *(*call, *closed),
        "completed",
    ]
    last: Any = events[-1]
    assert [each.type for each in last.response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert last.response.output[3].arguments == '{"b": 22}'
    assert last.response.usage.output_tokens == 2
    finished = [each.item for each in events if each.type == "response.output_item.done"]
    assert finished == last.response.output
    assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1, 2, 3]


def test_the_clients_own_stream_helper_reads_it(
    agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any]
) -> None:
    model.will(answer_of("abc", message={"tool_calls": [CALL]}))
    with agent.responses.stream(model="m", input="hi") as stream:
        stream.until_done()
        answer = stream.get_final_response()
    assert (answer.output_text, [item.type for item in answer.output]) == ("abc", ["message", "function_call"])


def test_a_custom_tool_and_a_namespace_get_their_own_kind_of_call(
    agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any]
) -> None:
    patch = {"id": "c1", "type": "function", "function": {"name": "patch", "arguments": '{"input": "*** x"}'}}
    spawn = {"id": "c2", "type": "function", "function": {"name": "crew__spawn", "arguments": "{}"}}
    tools: Any = [{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "crew", "tools": [
        {"type": "function", "name": "spawn", "parameters": {"type": "object"}}], "description": "d"}]  # fmt: skip
    answer = answer_of(None, message={"tool_calls": [patch, spawn]})
    model.will(answer, answer)
    whole: Any = agent.responses.create(model="m", input="hi", tools=tools).output
    events: Any = list(agent.responses.create(model="m", input="hi", tools=tools, stream=True))
    for items in (whole, events[-1].response.output):
        assert (items[0].type, items[0].name, items[0].input) == ("custom_tool_call", "patch", "*** x")
        assert (items[1].type, items[1].name, items[1].namespace) == ("function_call", "spawn", "crew")
    assert [e.input for e in events if e.type == "response.custom_tool_call_input.done"] == ["*** x"]
    history: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in whole)]
    agent.responses.create(model="m", input=history, tools=tools)
    sent = model.requests[-1]["messages"][1]["tool_calls"]
    assert [call["function"] for call in sent] == [patch["function"], spawn["function"]]


def test_a_history_of_items_continues_the_conversation(
    agent: openai.OpenAI, model: Any, gateway: Any, answer_of: Callable[..., Any]
) -> None:
    model.will(answer_of("sum", message={"reasoning_content": "think", "tool_calls": [CALL]}))
    first = agent.responses.create(model="m", input="hi", include=["reasoning.encrypted_content"])
    items: Any = [item.to_dict() for item in first.output]
    del items[0]["content"]  # as codex does
    output = {"type": "function_call_output", "call_id": "call_9", "output": "2"}
    agent.responses.create(model="m", input=[{"role": "user", "content": "hi"}, *items, output])
    assert model.requests[1]["messages"][1] == {
        "role": "assistant",
        "content": "sum",
        "reasoning_content": "think",
        "tool_calls": [CALL],
    }
    assert len(gateway.trajectory("r-responses")["trajectory"]) == 2


def test_previous_response_id_takes_up_an_answer_without_its_instructions(
    agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any]
) -> None:
    model.will(answer_of("one"))
    given: Any = [{"role": "developer", "content": "D"}, {"role": "user", "content": "hi"}]
    first = agent.responses.create(model="m", input=given, instructions="Old")
    for extra, system in (({"instructions": "New"}, "New\n\nD"), ({}, "D")):
        answer = agent.responses.create(model="m", input="more", previous_response_id=first.id, **extra)  # type: ignore[call-overload]
        assert [message["content"] for message in model.requests[-1]["messages"]] == [system, "hi", "one", "more"]
        assert answer.previous_response_id == first.id
    again = agent.responses.create(model="m", input="last", previous_response_id=answer.id, stream=True)
    assert [event.type for event in again][-1] == "response.completed"
    assert [message["content"] for message in model.requests[-1]["messages"]][-2:] == ["hello", "last"]
    with pytest.raises(openai.BadRequestError) as caught:
        agent.responses.create(model="m", input="more", previous_response_id="resp_unknown")
    assert caught.value.code == "previous_response_not_found"


def test_errors_are_openais(agent: openai.OpenAI, model: Any) -> None:
    too_long = b'{"error": {"message": "maximum context length is 10", "code": "context_length_exceeded"}}'
    model.will(Response(too_long, 400), Response(b"{}", 429), Response(b"{}", 500))
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        agent.responses.create(model="m", input="hi")
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.RateLimitError):
        agent.responses.create(model="m", input="hi")
    with pytest.raises(openai.InternalServerError):
        agent.responses.create(model="m", input="hi", stream=True)
    with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
        agent.with_options(api_key="wrong").responses.create(model="m", input="hi")


def test_a_stream_that_breaks_ends_with_response_failed(
    agent: openai.OpenAI, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    model.will(lambda _: model.events(events_of(answer_of("abc"))[:3]))
    last: Any = list(agent.responses.create(model="m", input="hi", stream=True))[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "ended its stream early" in last.response.error.message


def test_a_stream_that_fails_before_it_began_is_still_a_stream(read: Read) -> None:
    stream = Responses().translator(read())
    said = stream.fail(GatewayRefusal(503, "gone"))
    assert [line for line in said.decode().splitlines() if line.startswith("event:")] == [
        "event: response.created",
        "event: response.in_progress",
        "event: response.failed",
    ]
