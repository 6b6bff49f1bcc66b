"""The bundled gateway answers the recorded exchanges of the followed gateway as that one did.

`DIFFERENCES` is the whole list of what ours does otherwise on purpose, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.responses import Response

WIRE = Path(__file__).parent / "wire"
INDEX = json.loads((WIRE / "index.json").read_text())

SAMPLING = {"temperature": 0.7, "max_completion_tokens": 64, "n": 1, "extra_body": {"top_k": 20, "min_p": 0.0}}
#: The recording registered these between the exchanges that it kept; their upstream requests show with what.
REGISTRATIONS: dict[str, dict[str, Any]] = {
    "r-eb": {"model": "m", "sampling_params": {"temperature": 0.9, "extra_body": {"temperature": 0.5, "top_k": 3}}},
    "r-turns": {"max_turns": 2},
    "r-seq": {"max_seq_len": 40},
} | {name: {} for name in ("r-chat", "r-err", "r-tools", "r-stream", "r-len", "r-notok", "r-long")}

#: An agent's fields that the followed gateway dropped and ours forwards, because the agent's request is the start.
FORWARDED: dict[str, dict[str, Any]] = {
    # max_tokens is not among them: the registration's max_completion_tokens names the same limit, and wins
    **{f"chat_turn_{n}": {"seed": 1} for n in (1, 2, 3)},
    "chat_tools_call": {"tool_choice": "auto", "parallel_tool_calls": False},
    # ours streams from the upstream, and asks for the usage that the record needs
    "chat_stream": {"stream": True, "stream_options": {"include_usage": True}},
}
#: Steps of agents that sent parameters of their own: ours notes both sides in extras, the followed gateway neither.
OWN_PARAMS = {"trajectory_3_turns": [0, 1, 2], "trajectory_after_cancel": [0, 1, 2], "trajectory_tools": [0]}

DIFFERENCES: dict[str, tuple[int, str]] = {
    "chat_unknown_role": (200, "developer is a legal role of chat completions: forwarded"),
    "chat_null_user_content": (200, "whether null content makes sense is for the model's server to say: forwarded"),
    "chat_missing_role": (422, "a malformed message is named by its place instead of a plain 500"),
    "chat_message_not_object": (422, "a malformed message is named by its place instead of a plain 500"),
    "chat_upstream_500": (502, "a failed upstream is a typed 502 instead of a plain 500"),
    "chat_stream": (200, "the upstream's own chunks as they come instead of two made after the fact"),
}


def exchange(name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((WIRE / f"{name}.json").read_text())
    return recorded


def send(gateway: Any, request: dict[str, Any]) -> Any:
    body = request["body"]
    content = body.encode() if isinstance(body, str) else b"" if body is None else orjson.dumps(body)
    return gateway.request(request["method"], request["path"], content=content, headers=request["headers"])


def prepare(gateway: Any, model: Any, answer_of: Callable[..., Any], name: str, path: str) -> None:
    """Do what the recording did between the exchanges that it kept."""
    rollout_id = path.split("/")[3]
    if rollout_id in REGISTRATIONS and rollout_id not in gateway.app_rollouts:
        gateway.app_rollouts.add(rollout_id)
        gateway.register(
            rollout_id, **({"model": "mock-model", "sampling_params": SAMPLING} | REGISTRATIONS[rollout_id])
        )
    if name == "chat_after_failed_turn":
        model.will(Response(b"{}", 500))
        gateway.chat(rollout_id, "first try")
    if name == "trajectory_no_tokens":
        content = exchange(name)["response"]["body"]["trajectory"][0]["completion"][0]["content"]
        model.will(answer_of(content, choice={"logprobs": None, "token_ids": None}, prompt_token_ids=None))
        gateway.chat(rollout_id, "[[no_tokens]]")
    if name == "unregister_body_null":
        gateway.register(rollout_id)
        gateway.post(f"/v1/rollouts/{rollout_id}/cancel")
    if name == "unregister_active":
        gateway.register(rollout_id)


def check_upstream(model: Any, name: str, recorded: list[dict[str, Any]]) -> None:
    assert len(model.requests) == len(recorded)
    for ours, theirs in zip(model.requests, recorded, strict=True):
        assert ours == theirs["request"] | FORWARDED.get(name, {})
    assert all(headers["authorization"] == "Bearer upstream-key" for headers in model.headers)


def without_added_nulls(body: Any, upstream: list[dict[str, Any]]) -> Any:
    """Drop nulls that the followed gateway's OpenAI client added to the upstream's answer; ours passes bytes on."""
    if upstream and "choices" in body:
        for choice in body["choices"]:
            choice["logprobs"].pop("refusal")
        body["usage"].pop("completion_tokens_details")
    return body


def check_trajectory(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    ours.pop("idle_seconds")
    assert ours.pop("integrity")["branches"] is not None
    assert (ours.pop("failures"), ours.pop("failed_calls"), ours.pop("in_flight")) == ([], 0, False)  # ours has more
    for index in OWN_PARAMS.get(name, []):
        extras = ours["trajectory"][index].pop("extras")
        assert extras["agent_params"]
        assert theirs["trajectory"][index].pop("extras") == {}
    assert ours == theirs


def test_every_recorded_exchange_replays_in_order(
    gateway_with: Callable[..., Any], model: Any, model_url: str, answer_of: Callable[..., Any]
) -> None:
    gateway = gateway_with(upstream=model_url, upstream_api_key="upstream-key")
    gateway.app_rollouts = set()
    replayed = []
    for entry in INDEX:
        name = entry["name"]
        recorded = exchange(name)
        response, upstream = recorded["response"], recorded.get("upstream", [])
        prepare(gateway, model, answer_of, name, recorded["request"]["path"])
        model.reset()
        for call in upstream:
            body = call["response"]
            model.will(body if call["status"] == 200 else Response(orjson.dumps(body), call["status"]))

        answer = send(gateway, recorded["request"])

        replayed.append(name)
        if name in DIFFERENCES:
            assert answer.status_code == DIFFERENCES[name][0], (name, answer.text)
            assert name == "chat_stream" or not upstream or answer.json()["error"]["type"], name
        else:
            assert answer.status_code == response["status"], (name, answer.text)
            check_body(name, answer.json(), without_added_nulls(response["body"], upstream))
        if name not in {"chat_unknown_role", "chat_null_user_content"}:  # forwarded by ours alone
            check_upstream(model, name, upstream)
    assert replayed == [entry["name"] for entry in INDEX]
    assert len(replayed) == 52


def check_body(name: str, ours: Any, theirs: Any) -> None:
    if name.startswith("trajectory_") and "trajectory" in ours:
        check_trajectory(name, ours, theirs)
    elif "error" in ours:  # ours has more for agents: the reason where OpenAI's clients look for it
        assert name.startswith("chat_")
        message = ours.pop("error")["message"]
        assert message == theirs["detail"] or message.endswith(theirs["detail"][0]["msg"])
        assert ours == theirs
    else:
        assert ours == theirs, name


def test_malformed_messages_are_named_by_their_place(gateway: Any) -> None:
    rollout = gateway.register()
    answer = gateway.chat(rollout, messages=[{"role": "user", "content": "x"}, {"content": "y"}])
    assert answer.status_code == 422
    expected = {"type": "missing", "loc": ["body", "messages", 1, "role"], "msg": "Field required"}
    assert answer.json()["detail"] == [expected | {"input": {"content": "y"}}]
    assert answer.json()["error"]["message"] == "body.messages.1.role: Field required"


@pytest.mark.parametrize("body", ["", "[]", "[1"])
def test_a_registration_that_is_no_object_is_422_in_fastapis_shape(gateway: Any, body: str) -> None:
    answer = gateway.post("/v1/rollouts/r-bad/register", content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][0] == "body"


def test_a_failed_first_turn_sets_the_prompt_but_is_no_turn(gateway: Any, model: Any) -> None:
    rollout = gateway.register()
    model.will(Response(b"{}", 500))
    assert gateway.chat(rollout, "first try").status_code == 502
    assert gateway.chat(rollout, "second try").status_code == 200
    recorded = gateway.trajectory(rollout)
    assert recorded["prompt"] == [{"role": "user", "content": "first try"}]
    assert recorded["num_turns"] == 1


def test_a_registered_length_limit_removes_the_agents_other_name_of_it(gateway: Any, model: Any) -> None:
    rollout = gateway.register(sampling_params={"max_tokens": 7})
    gateway.chat(rollout, max_completion_tokens=1000, temperature=0.1)
    assert model.requests[0]["max_tokens"] == 7
    assert "max_completion_tokens" not in model.requests[0]
    extras = gateway.trajectory(rollout)["trajectory"][0]["extras"]
    assert extras["agent_params"] == {"max_completion_tokens": 1000, "temperature": 0.1}
    assert extras["sent_params"] == {"max_tokens": 7, "temperature": 0.1, "logprobs": True, "return_token_ids": True}


def test_a_registration_cannot_change_the_messages_or_whether_the_answer_is_streamed(gateway: Any, model: Any) -> None:
    rollout = gateway.register(sampling_params={"stream": True, "extra_body": {"messages": [], "stream": True}})
    assert gateway.chat(rollout).json()["choices"]
    assert "stream" not in model.requests[0]
    assert model.requests[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_more_choices_than_one_are_noted_and_the_first_is_recorded(
    gateway: Any, model: Any, answer_of: Callable[..., Any]
) -> None:
    rollout = gateway.register()
    answer = answer_of("first")
    answer["choices"].append(answer_of("second")["choices"][0] | {"index": 1})
    model.will(answer)
    assert len(gateway.chat(rollout, n=2).json()["choices"]) == 2
    step = gateway.trajectory(rollout)["trajectory"][0]
    assert step["completion"][0]["content"] == "first"
    assert step["extras"]["choices"] == 2


def test_an_agent_that_compacts_its_conversation_still_has_a_completion(gateway: Any) -> None:
    rollout = gateway.register()
    gateway.chat(rollout, messages=[{"role": "user", "content": str(n)} for n in range(5)])
    gateway.chat(rollout, messages=[{"role": "user", "content": "summary"}])
    recorded = gateway.trajectory(rollout)
    assert len(recorded["prompt"]) == 5
    assert [m["content"] for m in recorded["completion"]] == ["hello"]


def test_turns_share_the_messages_of_their_common_conversation(shared: Any, gateway: Any) -> None:
    rollout = gateway.register()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "start"}]
    for n in range(3):
        assert gateway.chat(rollout, messages=messages).status_code == 200
        messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": str(n)}]
    turns = shared[2].app.state.recorder.get(rollout).turns
    assert turns[2].messages[0] is turns[0].messages[0]
    assert turns[2].messages[1] is turns[0].completion
