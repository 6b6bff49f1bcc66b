"""The core's side of the seam: a small dialect of the test's own, translated, and spoken natively."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson
import pytest
from starlette.responses import Response
from starlette.routing import Route
from support import wait_until

from workers.gateway.protocol import Registration
from workers.gateway.server import create_app
from workers.gateway.server.dialects import Call, Earlier, JsonObject, Side, SideCall
from workers.gateway.server.errors import GatewayRefusal, UpstreamError
from workers.gateway.server.jsonio import parse_object


class ShoutStream:
    """Events ``data: {"shout": ...}``, framed by ``begin`` and ``end``."""

    def begin(self) -> bytes:
        return event("begin")

    def feed(self, chunk: JsonObject) -> bytes:
        return b"".join(event(choice["delta"].get("content", "").upper()) for choice in chunk["choices"])

    def end(self, completion: JsonObject) -> bytes:
        return event(f"end {completion['usage']['completion_tokens']}")

    def fail(self, refusal: GatewayRefusal) -> bytes:
        return event(f"fail {refusal.status_code}")


class ShoutNative:
    """An upstream that shouts by itself."""

    path = "/shout"

    def headers(self, key: str | None) -> dict[str, str]:
        return {"x-volume": "11"}

    def body(self, call: Call, registration: Registration, *, ask_tokens: bool) -> JsonObject | None:
        return None if call.state.get("whisper") else call.state | {"model": registration.model}

    def is_last(self, data: bytes) -> bool:
        return data == b'{"shout":"!"}'

    def completion(self, answer: JsonObject) -> JsonObject:
        if "shout" not in answer:
            raise UpstreamError(502, "no shout in it", "upstream_malformed")
        message = {"role": "assistant", "content": answer["shout"]}
        return {"id": "shout-native", "choices": [{"message": message, "finish_reason": "stop"}]}

    def assembled(self, events: Sequence[bytes], *, partial: bool = False) -> JsonObject:
        words = [orjson.loads(each)["shout"] for each in events]
        if not words or (words[-1] != "!" and not partial):
            raise UpstreamError(502, "it did not end", "upstream_disconnected")
        return {"shout": "".join(words)}


class Shout:
    """Asks with ``{"say": text, "after": id}`` and answers ``{"id", "shout"}`` in capitals."""

    name = "shout"
    paths = ("/shout",)
    keep_alive = b": shh\n\n"
    native = ShoutNative()

    def __init__(self) -> None:
        self.sides: Mapping[str, Side] = {"/shout/count": self.count}

    def read(self, body: bytes, earlier: Earlier) -> Call:
        fields = parse_object(body)
        before = earlier(fields["after"]) if "after" in fields else ([], {})
        if before is None:
            raise GatewayRefusal(400, "nothing was said before")
        messages = [*before[0], {"role": "user", "content": fields["say"]}]
        return Call(
            chat={"messages": messages, "temperature": 0.5},
            stream=bool(fields.get("stream")),
            answer_id=f"shout-{fields['say']}",
            state=fields,
            notes={"volume": 11},
        )

    def answer(self, call: Call, completion: JsonObject) -> JsonObject:
        return {"id": call.answer_id, "shout": completion["choices"][0]["message"]["content"].upper()}

    def translator(self, call: Call) -> ShoutStream:
        return ShoutStream()

    def error(self, refusal: GatewayRefusal) -> JsonObject:
        return {"hush": str(refusal.detail)}

    async def count(self, side: SideCall) -> JsonObject:
        answer = await side.ask("/chat/completions", {"messages": [], "say": side.body["say"]})
        return {"model": side.registration.model, "length": answer["usage"]["total_tokens"]}


def event(word: str) -> bytes:
    return b"data: " + orjson.dumps({"shout": word}) + b"\n\n"


@pytest.fixture(autouse=True)
def shouting(monkeypatch: pytest.MonkeyPatch) -> Shout:
    dialect = Shout()
    from workers.gateway.server import app

    monkeypatch.setattr(app, "DIALECTS", (*app.DIALECTS, dialect))
    return dialect


@pytest.fixture
def shouter(gateway_with: Callable[..., Any], model: Any, model_url: str) -> Any:
    return gateway_with(upstream=model_url, keep_alive=600)


def shout(gateway: Any, rollout: str, say: str, **fields: Any) -> Any:
    return gateway.post(f"/v1/rollouts/{rollout}/shout", json={"say": say} | fields)


def test_an_answer_is_translated_and_recorded_as_a_chat_step(shouter: Any, model: Any) -> None:
    rollout = shouter.register(sampling_params={"temperature": 1.0})
    answer = shout(shouter, rollout, "hi")
    assert (answer.status_code, answer.json()) == (200, {"id": "shout-hi", "shout": "HELLO"})
    assert model.requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert (model.requests[0]["temperature"], model.requests[0]["return_token_ids"]) == (1.0, True)
    step = shouter.trajectory(rollout)["trajectory"][0]
    assert step["tokens"]["completion_ids"] == [ord(c) for c in "hello"]
    assert step["completion"][0]["content"] == "hello"
    assert step["extras"]["dialect"] == "shout"
    assert step["extras"]["volume"] == 11
    assert step["extras"]["agent_params"] == {"temperature": 0.5}


def test_a_stream_is_translated_event_by_event_and_recorded_the_same(shouter: Any, model: Any) -> None:
    whole, streamed = shouter.register(), shouter.register()
    shout(shouter, whole, "hi")
    answer = shout(shouter, streamed, "hi", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event(word) for word in ["begin", "", *"HELLO", "", "end 5"]]
    assert answer.content == b"".join(events)
    one, other = (shouter.trajectory(rollout)["trajectory"] for rollout in (whole, streamed))
    assert one == other
    assert model.requests[1]["stream"] is True


def test_an_earlier_answer_can_be_named_also_after_a_restart(
    serve: Callable[[Any], Any], gateway_with: Callable[..., Any], model: Any, model_url: str, tmp_path: Any
) -> None:
    first = gateway_with(upstream=model_url, journal=tmp_path / "one")
    rollout = first.register("r-earlier")
    shout(first, rollout, "one")
    for path in (tmp_path / "one").glob("*.log"):  # as a killed process leaves it
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / path.name).write_bytes(path.read_bytes())
    for gateway in (first, gateway_with(upstream=model_url, journal=tmp_path / "two")):
        assert shout(gateway, rollout, "two", after="shout-one").status_code == 200
        assert [message["content"] for message in model.requests[-1]["messages"]] == ["one", "hello", "two"]
        answer = shout(gateway, rollout, "three", after="nothing")
        assert (answer.status_code, answer.json()) == (400, {"hush": "nothing was said before"})


def test_failures_have_the_dialects_shape(shouter: Any, model: Any) -> None:
    rollout = shouter.register(key="agent-key")
    assert set(shout(shouter, rollout, "hi").json()) == {"hush"}
    open_one = shouter.register()
    model.will(Response(b"{}", 500), Response(b'{"choices": 5}', 200), Response(b"{}", 500))
    for stream in (False, False, True):
        answer = shout(shouter, open_one, "hi", stream=stream)
        assert answer.status_code == 502
        assert set(answer.json()) == {"hush"}
    assert shouter.post(f"/v1/rollouts/{open_one}/shout", content=b"{").status_code == 422
    assert shouter.get(f"/v1/rollouts/{open_one}/shout").json() == {"hush": "Method Not Allowed"}
    assert shouter.trajectory(open_one)["failed_calls"] == 3


def test_a_stream_that_breaks_ends_in_the_dialects_way(
    shouter: Any, model: Any, answer_of: Callable[..., Any], events_of: Callable[..., list[bytes]]
) -> None:
    rollout = shouter.register()
    events = events_of(answer_of("ab"))
    model.will(lambda _: model.events(events[:2]), lambda _: model.events([*events[:2], b"data: {nope\n\n"]))
    for _ in range(2):
        assert shout(shouter, rollout, "hi", stream=True).content.endswith(event("A") + event("fail 502"))
    assert shouter.trajectory(rollout)["failed_calls"] == 2


def test_an_agent_that_leaves_leaves_a_partial_step(
    gateway_with: Callable[..., Any],
    model: Any,
    model_url: str,
    answer_of: Callable[..., Any],
    events_of: Callable[..., list[bytes]],
) -> None:
    shouter = gateway_with(upstream=model_url, keep_alive=0.05)
    rollout, gate = shouter.register(), threading.Event()
    events = events_of(answer_of("abc"))
    model.will(lambda _: model.events([*events[:3], lambda: gate.wait(20), *events[3:]]))
    body = {"say": "hi", "stream": True}
    with shouter.stream("POST", f"/v1/rollouts/{rollout}/shout", json=body) as answer:
        whole = b""
        for part in answer.iter_raw():
            whole += part
            if event("B") in whole and Shout.keep_alive in whole:
                break
    wait_until(lambda: shouter.trajectory(rollout)["trajectory"])
    step = shouter.trajectory(rollout)["trajectory"][0]
    gate.set()
    assert (step["completion"][0]["content"], step["extras"]["partial"]) == ("ab", True)


def test_a_side_call_asks_the_upstream_and_is_no_turn(shouter: Any, model: Any) -> None:
    rollout = shouter.register()
    answer = shouter.post(f"/v1/rollouts/{rollout}/shout/count", json={"say": "hi"})
    assert answer.json() == {"model": "m", "length": 8}
    model.will(Response(b"{}", 500))
    answer = shouter.post(f"/v1/rollouts/{rollout}/shout/count", json={"say": "hi"})
    assert (answer.status_code, set(answer.json())) == (502, {"hush"})
    assert shouter.trajectory(rollout)["num_turns"] == 0


@pytest.fixture
def native(serve: Callable[[Any], Any], gateway_with: Callable[..., Any], model: Any) -> Iterator[Any]:
    """A gateway whose upstream speaks the dialect; ``words`` are what it streams."""
    own = type(model)()

    async def answer(request: Any) -> Response:
        body = await request.json()
        own.requests.append(body)
        if body.get("stream"):
            return own.events([event(word) for word in own.words])
        return Response(orjson.dumps({"shout": "NATIVE", "extra": 1}), media_type="application/json")

    own.app.router.routes.append(Route("/v1/shout", answer, methods=["POST"]))
    own.words = ["N", "A", "!"]
    gateway = gateway_with(upstream=serve(own.app).url, native=["shout"])
    gateway.own = own
    return gateway


def test_a_native_upstreams_bytes_pass_and_are_recorded(native: Any) -> None:
    rollout = native.register()
    assert shout(native, rollout, "hi").json() == {"shout": "NATIVE", "extra": 1}
    assert shout(native, rollout, "hi", stream=True).content == event("N") + event("A") + event("!")
    assert native.own.requests[0] == {"say": "hi", "model": "m"}
    contents = [step["completion"][0]["content"] for step in native.trajectory(rollout)["trajectory"]]
    assert contents == ["NATIVE", "NA!"]


def test_a_native_stream_without_its_end_is_a_failure(native: Any) -> None:
    rollout = native.register()
    native.own.words = ["N", "A"]
    assert shout(native, rollout, "hi", stream=True).content == event("N") + event("A") + event("fail 502")
    wait_until(lambda: native.trajectory(rollout)["failed_calls"] == 1)


def test_the_base_answers_those_who_look_whether_somebody_is_there(gateway: Any) -> None:
    rollout = gateway.register(key="agent-key")
    for path in ("", "/"):
        for method in ("HEAD", "GET"):
            assert gateway.request(method, f"/v1/rollouts/{rollout}{path}").status_code == 200
    assert gateway.request("DELETE", f"/v1/rollouts/{rollout}").status_code == 405


def test_the_gateway_can_be_made_with_a_journal_that_is_new(tmp_path: Any, model_url: str) -> None:
    app = create_app(upstream=model_url, journal=tmp_path / "deep" / "journal")
    assert app.state.journal is not None
    app.state.journal.close()
