"""Results in verifiers' forms."""

from __future__ import annotations

from array import array
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import ErrorInfo, ErrorKind, RolloutResult, Timing, to_verifiers, to_verifiers_trace
from producer.contract import FailedAttempt

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"/"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "bin"}]}
SAYS = {"role": "assistant", "content": "done"}


def step(prompt: Any, completion: Any, ids: tuple[list[int], list[int]] | None = None, **more: Any) -> dict[str, Any]:
    tokens = None
    if ids:
        logprobs = [-float(n) for n in ids[1]]
        tokens = {"prompt_ids": ids[0], "completion_ids": ids[1], "completion_logprobs": logprobs}
        tokens |= {"prompt_mask": [0] * len(ids[0]), "completion_mask": [1] * len(ids[1])}
    return {"prompt": prompt, "completion": completion, "tokens": tokens, "trajectory_id": "t"} | more


def result(*steps: dict[str, Any], **fields: Any) -> RolloutResult:
    given = {"rollout_id": "r", "stop_condition": "completed", "trajectory": list(steps), "environment": "e"}
    return RolloutResult.parse(given | {"example_id": 7, "model": "m"} | fields)


def ways(trace: dict[str, Any]) -> list[list[int]]:
    """The tokens along the way to each of the turns' answers."""
    found = []
    for call in trace["calls"]:
        ids: list[int] = []
        node = call["node"]
        while node is not None:
            ids = trace["nodes"][node]["token_ids"] + ids
            node = trace["nodes"][node].get("parent")
        found.append(ids)
    return found


def test_the_state_has_what_verifiers_0_1_has() -> None:
    turn = step([USER], [SAYS], ([1, 2], [3]), reward=0.5, advantage=None, is_truncated=False, extras={"n": 1})
    given = result(turn, reward=0.5, metrics={"x": 1.0}, answer="42", timing=Timing(total_ms=9.0).model_dump())
    state = to_verifiers(given)
    assert state["trajectory"] == [turn | {"response": None}]
    assert state["input"] == {"prompt": [], "answer": "42", "info": {}, "example_id": 7, "task": "e"}
    assert (state["reward"], state["metrics"], state["stop_condition"]) == (0.5, {"x": 1.0}, "completed")
    assert (state["is_completed"], state["error"], state["timing"]["total_ms"]) == (True, None, 9.0)
    assert state["usage"] == {"input_tokens": 2.0, "output_tokens": 1.0}
    state["trajectory"][0]["extras"]["n"] = 2
    assert given.trajectory[0]["extras"]["n"] == 1


def test_a_failed_rollout_says_why_in_both() -> None:
    first = FailedAttempt(attempt=1, error=ErrorInfo(kind=ErrorKind.TUNNEL, message="cut"), worker="w")
    error = ErrorInfo(kind=ErrorKind.SANDBOX, type="SandboxError", message="it died", detail="words")
    failed = result(stop_condition="has_error", error=error.model_dump(), failed_attempts=[first.model_dump()])
    assert "it died" in to_verifiers(failed)["error"]
    trace = to_verifiers_trace(failed)
    assert [e["type"] for e in trace["errors"]] == ["tunnel", "SandboxError"]
    assert (trace["ok"], trace["is_completed"], trace["rewards"], trace["nodes"]) == (False, True, {}, [])


def test_the_trace_has_each_message_once_and_all_tokens() -> None:
    first, second = ([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])
    again = CALLS | {"tool_calls": [CALL | {"function": {"name": "ls", "arguments": '{"path": "/"}'}}], "content": ""}
    trace = to_verifiers_trace(
        result(step([SYSTEM, USER], [CALLS], first), step([SYSTEM, USER, again, TOLD], [SAYS], second), reward=1.0)
    )
    roles = [node["message"]["role"] for node in trace["nodes"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert [node.get("parent") for node in trace["nodes"]] == [None, 0, 1, 2, 3]
    assert [node["sampled"] for node in trace["nodes"]] == [False, False, True, False, True]
    assert ways(trace) == [[*ids, *made] for ids, made in (first, second)]
    assert trace["nodes"][4] | {"message": 0} == trace["nodes"][4] | {
        "message": 0,
        "token_ids": [5, 6],
        "mask": [False, True],
        "logprobs": [-6.0],
    }
    assert trace["nodes"][2]["message"]["tool_calls"] == [{"id": "c1", "name": "ls", "arguments": '{"path":"/"}'}]
    assert trace["nodes"][3]["message"] == {"role": "tool", "tool_call_id": "c1", "content": "bin"}
    assert trace["rewards"] == {"reward": {"score": 1.0, "weight": 1.0}}


def test_a_rewritten_history_and_other_tokens_make_branches() -> None:
    turns = [
        step([USER], [SAYS], ([1], [2])),
        step([SYSTEM, USER], [SAYS], ([8, 1], [2])),  # another conversation
        step([USER, SAYS, TOLD], [SAYS], ([1, 9, 3], [4])),  # the answer was tokenized in another way
    ]
    trace = to_verifiers_trace(result(*turns))
    assert ways(trace) == [[1, 2], [8, 1, 2], [1, 9, 3, 4]]
    parents = {node.get("parent") for node in trace["nodes"]}
    assert len([n for n in range(len(trace["nodes"])) if n not in parents]) == 3
    assert sum(node["sampled"] for node in trace["nodes"]) == 3


EXPERTS = [[[n, n + 1]] for n in range(8)]  # for each token one layer, of which two experts


def test_each_node_has_the_experts_of_its_own_tokens() -> None:
    first, second = step([USER], [CALLS], ([1, 2], [3])), step([USER, CALLS, TOLD], [SAYS], ([1, 2, 3, 4], [5, 6]))
    first["tokens"]["routed_experts"] = EXPERTS[:2]  # the last token went through no model yet
    packed = bytes(value for token in EXPERTS[1:6] for value in token[0])
    second["tokens"]["routed_experts"] = {"data": b64encode(packed).decode(), "shape": [5, 1, 2], "start": 1}
    nodes = to_verifiers_trace(result(first, second))["nodes"]
    found = {n: node["routed_experts"] for n, node in enumerate(nodes) if "routed_experts" in node}
    assert sorted(found) == [1, 3]
    assert found[1] == {"__nd__": True, "dtype": "uint8", "shape": [3, 1, 2], "data": bytes([0, 1, 1, 2, 2, 3])}
    assert (found[3]["shape"], found[3]["data"]) == ([3, 1, 2], bytes([3, 4, 4, 5, 5, 6]))


def test_wide_numbers_of_experts_widen_what_they_correct() -> None:
    first, second = step([USER], [SAYS], ([1], [2])), step([USER, SAYS, TOLD], [SAYS], ([1, 2, 3], [4]))
    first["tokens"]["routed_experts"] = [[[1]]]
    second["tokens"]["routed_experts"] = [[[1]], [[300]], [[2]]]
    nodes = to_verifiers_trace(result(first, second))["nodes"]
    assert {nodes[n]["routed_experts"]["dtype"] for n in (1, 3)} == {"uint16"}
    assert array("H", nodes[1]["routed_experts"]["data"]).tolist() == [1, 300]
    assert array("H", nodes[3]["routed_experts"]["data"]).tolist() == [2, 2]


@pytest.mark.parametrize(
    "given",
    [
        *([], [[]], [[[]]], [[[-1]]], [[[70000]]], [[[1]], [[1, 2]]], [[["a"]]], "x", 7, {}),
        *({"data": "AA==", "shape": [2, 1, 1]}, {"data": "!", "shape": [1, 1, 1]}, {"data": "AA==", "shape": []}),
        {"data": "AA==", "shape": [1, 1, 1], "dtype": "float64"},
        {"data": "AA==", "shape": [1, 1, 1], "start": 5},
        {"data": "", "shape": [0, 1, 1]},
    ],
)
def test_experts_that_do_not_fit_are_left_out(given: Any) -> None:
    turn = step([USER], [SAYS], ([1], [2]))
    turn["tokens"]["routed_experts"] = given
    assert not any("routed_experts" in node for node in to_verifiers_trace(result(turn))["nodes"])
    assert to_verifiers(result(turn))["trajectory"][0]["tokens"]["routed_experts"] == given


def test_phases_are_laid_one_behind_the_other() -> None:
    durations = {"register": 1.0, "tunnel": 2.0, "sandbox": 3.0, "agent": 4.0, "score": 5.0}
    timed = result(durations=durations, timing={"start_time": 100.0})
    timing = to_verifiers_trace(timed)["timing"]
    assert timing["boot"] == {"start": 100.0, "end": 106.0}
    assert (timing["setup"], timing["agent"]["end"]) == ({}, 110.0)
    assert timing["scoring"] == {"start": 110.0, "end": 115.0}


MESSAGES = st.sampled_from([SYSTEM, USER, SAYS, CALLS, TOLD])
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(turns=st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=4), IDS, IDS), max_size=6))
def test_the_tokens_along_the_way_to_an_answer_are_those_that_the_model_saw(turns: Any) -> None:
    trace = to_verifiers_trace(result(*(step(prompt, [SAYS], (ids, made)) for prompt, ids, made in turns)))
    assert ways(trace) == [[*ids, *made] for _, ids, made in turns]
    for node in trace["nodes"]:
        assert len(node["mask"]) == len(node["token_ids"])
        assert len(node["logprobs"]) == sum(node["mask"])
        assert node.get("parent", -1) < trace["nodes"].index(node) or node.get("parent") is None


JUNK = st.recursive(st.none() | st.integers(0, 9) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3))


@given(junk=JUNK)
def test_whatever_an_agent_wrote_is_turned_into_messages(junk: Any) -> None:
    odd = [{"role": junk, "content": junk}, {"content": [junk]}]
    odd.append({"role": "assistant", "tool_calls": [{"function": junk}]})
    nodes = to_verifiers_trace(result(step(odd, [{"content": junk, "reasoning": junk}])))["nodes"]
    assert len(nodes) == 4
    for node in nodes:
        assert isinstance(node["message"].get("content"), str | None)
