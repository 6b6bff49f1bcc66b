"""Our own results as verifiers' traces: what its classes make of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verifiers")

from hypothesis import given
from hypothesis import strategies as st
from verifiers.v1 import WireTrace

from producer import RolloutResult, to_verifiers_trace

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
SEES = {
    "role": "user",
    "content": [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ],
}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"/"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "bin"}]}
SAYS = {"role": "assistant", "content": "done"}


def step(prompt: list[dict[str, Any]], ids: list[int], made: list[int], answer: Any = SAYS) -> dict[str, Any]:
    experts = [[[token, 0]] for token in [*ids, *made][:-1]]  # one layer, two experts: the first tells the token
    tokens = {
        "prompt_ids": ids,
        "prompt_mask": [0] * len(ids),
        "completion_ids": made,
        "completion_mask": [1] * len(made),
        "completion_logprobs": [-float(token) for token in made],
        "routed_experts": experts,
    }
    return {"prompt": prompt, "completion": [answer], "tokens": tokens, "trajectory_id": "t"}


def validated(*steps: dict[str, Any], **fields: Any) -> WireTrace:
    given = {"rollout_id": "r", "stop_condition": "completed", "trajectory": list(steps), "environment": "e"}
    return WireTrace.model_validate(
        to_verifiers_trace(RolloutResult.parse(given | {"example_id": 7, "model": "m"} | fields))
    )


def test_a_run_with_a_tool_is_one_branch_with_all_tokens_and_experts() -> None:
    first = step([SYSTEM, USER], [1, 2], [3], CALLS)
    trace = validated(first, step([SYSTEM, USER, CALLS, TOLD], [1, 2, 3, 4], [5, 6]), reward=0.5)
    [branch] = trace.branches
    assert branch.token_ids == [1, 2, 3, 4, 5, 6]
    assert [node.message.role for node in branch.nodes] == ["system", "user", "assistant", "tool", "assistant"]
    assert branch.nodes[2].message.tool_calls[0].name == "ls"
    # The third token's row is the one of the second turn, the last token's is a copy of the one before.
    assert branch.routed_experts[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 5]
    assert (trace.reward, trace.is_completed, trace.ok) == (0.5, True, True)


def test_a_rewritten_history_is_several_branches() -> None:
    turns = [step([USER], [1], [2]), step([SYSTEM, USER], [8, 1], [2]), step([USER, SAYS, TOLD], [1, 9, 3], [4])]
    trace = validated(*turns)
    assert sorted(branch.token_ids for branch in trace.branches) == [[1, 2], [1, 9, 3, 4], [8, 1, 2]]
    assert all(branch.routed_experts is not None for branch in trace.branches)


def test_pictures_failures_and_cut_off_runs_are_read() -> None:
    error = {"kind": "sandbox", "message": "it broke", "type": "SandboxError"}
    failed = {"attempt": 1, "error": error}
    trace = validated(step([SEES], [1], [2]), stop_condition="has_error", error=error, failed_attempts=[failed])
    assert trace.nodes[0].message.content[1].image_url.url.startswith("data:image/png")
    assert [found.type for found in trace.errors] == ["SandboxError"] * 2
    assert not trace.ok
    assert validated(stop_condition="agent_timeout").is_timeout
    assert validated(is_truncated=True).stop_condition == "max_total_tokens"


MESSAGES = st.sampled_from([SYSTEM, USER, SAYS, CALLS, TOLD, SEES])
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(turns=st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=4), IDS, IDS), max_size=5))
def test_every_trajectory_is_a_trace_whose_branches_end_in_what_the_model_saw(turns: Any) -> None:
    trace = validated(*(step(*turn) for turn in turns))
    seen = [[*ids, *made] for _, ids, made in turns]
    for branch in trace.branches:
        assert branch.token_ids in seen
        assert len(branch.routed_experts) == len(branch.token_ids)
