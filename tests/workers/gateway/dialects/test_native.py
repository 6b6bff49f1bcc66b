"""Dialects that the model server speaks itself: its bytes pass, and the record is what translation would have made.

Where the answers' words do not matter, the model server is another gateway, which translates.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import orjson
import pytest
from starlette.responses import Response
from starlette.routing import Route
from support import wait_until

from workers.gateway.server import create_app

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@dataclass
class Api:
    """How a dialect is spoken by hand: a first request, and one that goes on with an answer and a tool's result."""

    path: str
    fields: dict[str, Any]
    history: Callable[[dict[str, Any]], list[dict[str, Any]]]
    messages: str

    def first(self, **more: Any) -> dict[str, Any]:
        return {"model": "agents", self.messages: [{"role": "user", "content": "go"}]} | self.fields | more

    def second(self, answer: dict[str, Any], **more: Any) -> dict[str, Any]:
        return self.first(**{self.messages: [{"role": "user", "content": "go"}, *self.history(answer)]} | more)


def responses_history(answer: dict[str, Any]) -> list[dict[str, Any]]:
    call_id = answer["output"][-1]["call_id"]
    return [*answer["output"], {"type": "function_call_output", "call_id": call_id, "output": "2"}]


def messages_history(answer: dict[str, Any]) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": "2"}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


APIS = {
    "responses": Api(
        "/responses",
        {"instructions": "be brief", "tools": [{"type": "function", "name": "add", "parameters": ADD}]},
        responses_history,
        "input",
    ),
    "messages": Api(
        "/v1/messages",
        {"system": "be brief", "max_tokens": 99, "tools": [{"name": "add", "input_schema": ADD}]},
        messages_history,
        "messages",
    ),
}


@pytest.fixture(params=sorted(APIS))
def api(request: pytest.FixtureRequest) -> Api:
    return APIS[request.param]


@pytest.fixture
def inner(gateway: Any) -> str:
    """The base URL of a model server that speaks every dialect."""
    return str(gateway.base_url.join(f"/v1/rollouts/{gateway.register()}"))


@pytest.fixture
def passing(gateway_with: Callable[..., Any], inner: str) -> Any:
    return gateway_with(upstream=inner, native=["responses", "messages"], ask_tokens=False)


class Speaker:
    """A model server that answers with bytes, whatever it is asked."""

    def __init__(self, model: Any) -> None:
        self.model = type(model)()
        self.answer: Any = b""
        self.before: Callable[[], object] = lambda: None
        for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
            self.model.app.router.routes.append(Route(path, self._answer, methods=["POST"]))

    async def _answer(self, request: Any) -> Response:
        body = await request.json()
        self.model.requests.append(body)
        self.model.headers.append(dict(request.headers))
        await asyncio.to_thread(self.before)
        if isinstance(self.answer, list):
            return self.model.events(self.answer)
        return Response(self.answer, media_type="application/json")


@pytest.fixture
def speaker(model: Any) -> Speaker:
    return Speaker(model)


@pytest.fixture
def scripted(speaker: Speaker, serve: Callable[[Any], Any], gateway_with: Callable[..., Any]) -> Any:
    return gateway_with(
        upstream=serve(speaker.model.app).url,
        upstream_api_key="up-key",
        native=["responses", "messages"],
    )


def call(gateway: Any, rollout: str, api: Api, body: dict[str, Any]) -> httpx.Response:
    answer: httpx.Response = gateway.post(f"/v1/rollouts/{rollout}{api.path}", json=body)
    return answer


def events(*data: dict[str, Any]) -> list[bytes]:
    return [f"event: {each['type']}\ndata: ".encode() + orjson.dumps(each) + b"\n\n" for each in data]


def last_answer(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(content.strip().rpartition(b"data: ")[2])
    return found


# -- the same record ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_step_is_the_one_that_translation_makes(
    passing: Any, gateway: Any, model: Any, api: Api, answer_of: Callable[..., Any], stream: bool
) -> None:
    steps = []
    for served in (passing, gateway):
        message = {"reasoning_content": "hm", "tool_calls": [CALL]}
        model.will(answer_of("I add", message=message, choice={"finish_reason": "tool_calls"}))
        rollout = served.register(sampling_params={"temperature": 0.5})
        assert call(served, rollout, api, api.first(stream=stream)).status_code == 200
        recorded = served.trajectory(rollout)
        steps.append(recorded["trajectory"][0])
    native, translated = steps
    assert native["extras"].pop("native") is True
    for each in (native, translated):
        each["extras"].pop("sent_params", None)  # the passing gateway asks for no tokens here
    assert native["extras"] == translated["extras"]
    assert native["prompt"] == translated["prompt"]
    was, now = native["completion"][0], translated["completion"][0]
    for each in (was, now):  # Anthropic's ids of calls are made by whoever answers
        each["tool_calls"][0].pop("id")
    assert was == now
    assert model.requests[0]["temperature"] == 0.5


def test_a_conversation_with_a_tool_goes_on(passing: Any, model: Any, api: Api, answer_of: Callable[..., Any]) -> None:
    model.will(answer_of("I add", message={"tool_calls": [CALL]}), answer_of("2"))
    rollout = passing.register()
    first = call(passing, rollout, api, api.first()).json()
    assert call(passing, rollout, api, api.second(first)).status_code == 200
    recorded = passing.trajectory(rollout)
    assert recorded["integrity"]["branches"] == [[0, 1]]
    assert [problem["kind"] for problem in recorded["integrity"]["problems"]] == ["no_tokens"]
    assert [message["role"] for message in model.requests[1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert model.requests[1]["messages"][2]["tool_calls"] == [CALL]


def test_an_answer_is_the_upstreams_to_the_byte(scripted: Any, speaker: Speaker, api: Api) -> None:
    said = {"output": [], "content": [], "status": "completed", "more": [1, 2]}
    speaker.answer = b" " + json.dumps(said).encode()
    rollout = scripted.register()
    assert call(scripted, rollout, api, api.first()).content == speaker.answer
    assert scripted.trajectory(rollout)["trajectory"][0]["completion"][0]["content"] == ""
    assert speaker.model.requests[0]["model"] == "m"


def test_previous_response_id_is_the_gateways_to_keep(
    passing: Any, model: Any, answer_of: Callable[..., Any], model_url: str
) -> None:
    rollout = passing.register("r-previous")
    base = str(passing.base_url.join("/v1/rollouts/r-previous"))
    shell = {"type": "custom", "name": "shell", "description": "runs"}
    ran = {"id": "call_9", "type": "function", "function": {"name": "shell", "arguments": '{"input": "ls"}'}}
    model.will(answer_of(None, message={"reasoning_content": "hm", "tool_calls": [ran]}), answer_of("done"))
    with openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=20) as agent:
        image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
        said = {"role": "user", "content": [{"type": "input_text", "text": "go"}, image]}
        first = agent.responses.create(model="a", instructions="A", input=[said], tools=[shell])  # type: ignore[list-item]
        result = {"type": "custom_tool_call_output", "call_id": "call_9", "output": "a.txt"}
        second = agent.responses.create(
            model="a",
            previous_response_id=first.id,
            instructions="B",
            input=[result],
            tools=[shell],  # type: ignore[list-item]
        )
        assert second.output_text == "done"
    messages = model.requests[1]["messages"]
    assert messages[0] == {"role": "system", "content": "B"}
    assert messages[1]["content"][1]["image_url"]["url"] == "data:image/png;base64,AA"
    assert messages[2]["tool_calls"] == [ran]
    assert messages[2]["reasoning_content"] == "hm"
    assert messages[3] == {"role": "tool", "tool_call_id": "call_9", "content": "a.txt"}
    steps = passing.trajectory(rollout)["trajectory"]
    assert [step["extras"]["native"] for step in steps] == [True, True]
    assert steps[1]["prompt"][0]["content"] == "B"


# -- tokens ------------------------------------------------------------------------------------------------------------


def vllms_response(**more: Any) -> dict[str, Any]:
    logprobs = [
        {"token": "a", "logprob": -0.1, "top_logprobs": []},
        {"token": "b", "logprob": -0.2, "top_logprobs": []},
    ]
    part = {"type": "output_text", "text": "ab", "annotations": [], "logprobs": logprobs}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "resp_upstreams",
        "object": "response",
        "model": "served",
        "status": "completed",
        "output": [item],
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
        "input_messages": [{"type": "raw_message_tokens", "message": "<go>", "tokens": [1, 2, 3]}],
        "output_messages": [{"type": "raw_message_tokens", "message": "ab", "tokens": [97, 98]}],
    } | more


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_logprobs_of_vllms_responses_are_recorded(scripted: Any, speaker: Speaker, stream: bool) -> None:
    whole = vllms_response()
    done = events({"type": "response.created", "response": {}}, {"type": "response.completed", "response": whole})
    speaker.answer = done if stream else orjson.dumps(whole)
    rollout = scripted.register(sampling_params={"max_tokens": 7, "logprobs": True, "extra_body": {"top_k": 4}})
    assert call(scripted, rollout, APIS["responses"], {"input": "go", "stream": stream}).status_code == 200
    recorded = scripted.trajectory(rollout)
    assert recorded["integrity"]["ok"], recorded["integrity"]
    tokens = recorded["trajectory"][0]["tokens"]
    assert (tokens["prompt_ids"], tokens["completion_ids"]) == ([1, 2, 3], [97, 98])
    assert tokens["completion_logprobs"] == [-0.1, -0.2]
    asked = speaker.model.requests[0]
    assert asked["include"] == ["message.output_text.logprobs"]
    assert (asked["enable_response_messages"], asked["max_output_tokens"], asked["top_k"]) == (True, 7, 4)
    assert not asked.keys() & {"max_tokens", "logprobs"}


def test_tokens_that_cannot_be_one_call_are_not_taken(scripted: Any, speaker: Speaker) -> None:
    twice = [{"type": "raw_message_tokens", "message": "x", "tokens": [1]}] * 2
    speaker.answer = orjson.dumps(vllms_response(input_messages=twice, output_messages=twice))
    rollout = scripted.register()
    call(scripted, rollout, APIS["responses"], {"input": "go"})
    recorded = scripted.trajectory(rollout)
    assert recorded["trajectory"][0]["tokens"] is None
    assert not recorded["integrity"]["ok"]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_messages_server_that_gives_them(scripted: Any, speaker: Speaker, stream: bool) -> None:
    tokens = {"token_ids": [104, 105], "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}}
    usage = {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 2}
    top = {
        "id": "msg_u",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "s",
        "prompt_token_ids": [1, 2, 3],
    }
    if stream:
        speaker.answer = events(
            {"type": "message_start", "message": top | {"usage": usage}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            *(
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
                | {"token_ids": tokens["token_ids"][at : at + 1]}
                | {"logprobs": {"content": tokens["logprobs"]["content"][at : at + 1]}}  # type: ignore[call-overload]
                for at, text in enumerate("hi")
            ),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        )
    else:
        content = [{"type": "text", "text": "hi"}]
        speaker.answer = orjson.dumps(top | tokens | {"content": content, "stop_reason": "end_turn", "usage": usage})
    rollout = scripted.register()
    assert call(scripted, rollout, APIS["messages"], APIS["messages"].first(stream=stream)).status_code == 200
    recorded = scripted.trajectory(rollout)
    assert recorded["integrity"]["ok"], recorded["integrity"]
    assert recorded["trajectory"][0]["tokens"]["prompt_ids"] == [1, 2, 3]
    assert recorded["trajectory"][0]["tokens"]["completion_ids"] == [104, 105]
    assert scripted.get(f"/v1/rollouts/{rollout}/progress").json()["prompt_tokens"] == 3
    assert speaker.model.headers[0]["x-api-key"] == "up-key"
    assert speaker.model.headers[0]["anthropic-version"] == "2023-06-01"


# -- who is asked how --------------------------------------------------------------------------------------------------


def test_each_upstream_is_asked_in_what_it_speaks(
    gateway_with: Callable[..., Any], inner: str, model: Any, model_url: str, api: Api, answer_of: Callable[..., Any]
) -> None:
    name = "messages" if "messages" in api.path else "responses"
    served = gateway_with(upstream=[inner, model_url], native=[f"{name}@{inner}"], ask_tokens=False)
    asked: set[bool] = set()
    gate, rollouts = threading.Event(), [served.register(), served.register()]
    model.will(lambda _: answer_of(str(gate.wait(20))))  # the first holds its server, so that the second gets the other
    answers: list[httpx.Response] = []
    first = threading.Thread(target=lambda: answers.append(call(served, rollouts[0], api, api.first())))
    first.start()
    wait_until(lambda: model.running == 1)
    answers.append(call(served, rollouts[1], api, api.first()))
    gate.set()
    first.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    for rollout in rollouts:
        asked.add("native" in served.trajectory(rollout)["trajectory"][0]["extras"])
    assert asked == {True, False}


def test_a_data_parallel_engine_is_told_the_rank_in_its_own_dialect_too(
    gateway_with: Callable[..., Any], speaker: Speaker, serve: Callable[[Any], Any], api: Api
) -> None:
    url = serve(speaker.model.app).url
    served = gateway_with(upstream=url, native=["responses", "messages"], data_parallel_size=2, ask_tokens=False)
    speaker.answer = orjson.dumps({"output": [], "content": [], "status": "completed"})
    held = threading.Event()
    speaker.before = lambda: held.wait(20)
    rollouts = [served.register(), served.register()]
    threads = [threading.Thread(target=call, args=(served, each, api, api.first())) for each in rollouts]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: len(speaker.model.headers) == number)
    held.set()
    for thread in threads:
        thread.join(20)
    ranks = [each["x-data-parallel-rank"] for each in speaker.model.headers]
    assert sorted(ranks) == ["0", "1"]  # the second rollout's rank is the one with nothing to do
    for rollout in rollouts:
        assert call(served, rollout, api, api.first()).status_code == 200
        assert served.trajectory(rollout)["trajectory"][1]["extras"]["native"] is True
    assert [each["x-data-parallel-rank"] for each in speaker.model.headers[2:]] == ranks  # and stays its own


def test_parameters_in_chats_own_shape_make_it_a_chat_call(passing: Any, model: Any, inner: str, api: Api) -> None:
    rollout = passing.register(sampling_params={"response_format": {"type": "json_object"}})
    assert call(passing, rollout, api, api.first()).status_code == 200
    assert "native" not in passing.trajectory(rollout)["trajectory"][0]["extras"]
    assert model.requests[0]["response_format"] == {"type": "json_object"}


def test_settings_that_name_nothing_are_refused(model_url: str) -> None:
    for entry in ("chat", "nonsense", "responses@http://elsewhere:1"):
        with pytest.raises(ValueError, match="names no"):
            create_app(upstream=model_url, native=[entry])


def test_the_upstream_counts_tokens_itself(scripted: Any, speaker: Speaker) -> None:
    speaker.answer = b'{"input_tokens": 12}'
    rollout = scripted.register()
    body = {"messages": [{"role": "user", "content": "go"}]}
    answer = scripted.post(f"/v1/rollouts/{rollout}/v1/messages/count_tokens", json=body)
    assert answer.json() == {"input_tokens": 12}
    assert speaker.model.requests == [body | {"model": "m"}]


# -- failures ----------------------------------------------------------------------------------------------------------

FAILED = {
    "responses": {"type": "response.failed", "response": {"status": "failed", "error": {"message": "no memory"}}},
    "messages": {"type": "error", "error": {"type": "overloaded_error", "message": "no memory"}},
}
BEGUN = {
    "responses": [
        {"type": "response.created", "response": {"id": "resp_u", "model": "s", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning", "content": []}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "hm"},
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message", "role": "assistant"}},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "ab"},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "c"},
    ],
    "messages": [
        {"type": "message_start", "message": {"id": "msg_u", "role": "assistant", "content": [], "model": "s"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "ab"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "c"}},
    ],
}
NAMES = sorted(APIS)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_fails_says_so_once(scripted: Any, speaker: Speaker, name: str) -> None:
    speaker.answer = events(*BEGUN[name], FAILED[name])
    rollout = scripted.register()
    answer = call(scripted, rollout, APIS[name], APIS[name].first(stream=True))
    assert answer.content == b"".join(speaker.answer)
    recorded = scripted.trajectory(rollout)
    assert (recorded["num_turns"], recorded["failed_calls"]) == (0, 1)
    assert "no memory" in recorded["failures"][0]["message"]


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_is_cut_ends_in_the_dialects_way(scripted: Any, speaker: Speaker, name: str) -> None:
    speaker.answer = events(*BEGUN[name])
    rollout = scripted.register()
    answer = call(scripted, rollout, APIS[name], APIS[name].first(stream=True))
    assert last_answer(answer.content)["type"] == FAILED[name]["type"]
    wait_until(lambda: scripted.trajectory(rollout)["failed_calls"] == 1)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_that_leaves_leaves_a_partial_step(scripted: Any, speaker: Speaker, name: str) -> None:
    gate = threading.Event()
    speaker.answer = [*events(*BEGUN[name]), lambda: gate.wait(20)]
    rollout = scripted.register()
    body = APIS[name].first(stream=True)
    with scripted.stream("POST", f"/v1/rollouts/{rollout}{APIS[name].path}", json=body) as answer:
        parts: Iterator[bytes] = answer.iter_raw()
        whole = b""
        while b'"c"' not in whole:
            whole += next(parts)
    wait_until(lambda: scripted.trajectory(rollout)["trajectory"])
    step = scripted.trajectory(rollout)["trajectory"][0]
    gate.set()
    message = step["completion"][0]
    assert (message["content"], message["reasoning_content"], step["extras"]["partial"]) == ("abc", "hm", True)


@pytest.mark.parametrize("name", NAMES)
def test_the_turn_is_recorded_before_the_agent_has_the_end(scripted: Any, speaker: Speaker, name: str) -> None:
    gate = threading.Event()
    end = {
        "responses": {"type": "response.completed", "response": vllms_response()},
        "messages": {"type": "message_stop"},
    }
    speaker.answer = [*events(*BEGUN[name], end[name]), lambda: gate.wait(20)]  # it keeps its connection open
    rollout = scripted.register()
    body = APIS[name].first(stream=True)
    with scripted.stream("POST", f"/v1/rollouts/{rollout}{APIS[name].path}", json=body) as answer:
        parts: Iterator[bytes] = answer.iter_raw()
        whole = b""
        while str(end[name]["type"]).encode() + b'"' not in whole:
            whole += next(parts)
        assert scripted.trajectory(rollout, wait=0)["num_turns"] == 1
        gate.set()


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"output": 5, "content": "x"}', b'{"output": [{"type": "message", "role": 5}]}']
)
def test_an_answer_that_is_none_is_a_typed_failure(scripted: Any, speaker: Speaker, api: Api, body: bytes) -> None:
    speaker.answer = body
    rollout = scripted.register()
    answer = call(scripted, rollout, api, api.first())
    assert answer.status_code == 502
    assert "cannot be used" in answer.json()["error"]["message"]
    assert scripted.trajectory(rollout)["failed_calls"] == 1


def test_items_that_chat_has_not_are_named(scripted: Any, speaker: Speaker) -> None:
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    speaker.answer = orjson.dumps(vllms_response(output=[searched, *vllms_response()["output"]]))
    rollout = scripted.register()
    call(scripted, rollout, APIS["responses"], {"input": "go"})
    message = scripted.trajectory(rollout)["trajectory"][0]["completion"][0]
    assert (message["content"], message["left_out"]) == ("ab", ["web_search_call"])
