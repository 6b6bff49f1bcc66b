"""What is checked of a recorded rollout, how its turns form branches, and its tokens said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

USER = {"role": "user", "content": "start"}


def ask(gateway: Any, rollout: str, messages: list[dict[str, Any]]) -> None:
    answer = gateway.chat(rollout, messages=messages)
    assert answer.status_code == 200, answer.text


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


class Talk:
    """An upstream that answers with given tokens, and a rollout that is asked."""

    def __init__(self, gateway: Any, model: Any, answer_of: Callable[..., Any]) -> None:
        self.gateway, self.model, self.answer_of = gateway, model, answer_of
        self.rollout = gateway.register()

    def turn(self, messages: list[dict[str, Any]], content: str, prompt: list[int], **fields: Any) -> None:
        self.model.will(self.answer_of(content, prompt_token_ids=prompt, **fields))
        ask(self.gateway, self.rollout, messages)

    def integrity(self) -> dict[str, Any]:
        found: dict[str, Any] = self.gateway.trajectory(self.rollout)["integrity"]
        return found


@pytest.fixture
def talk(gateway: Any, model: Any, answer_of: Callable[..., Any]) -> Talk:
    return Talk(gateway, model, answer_of)


def two_turns(talk: Talk, second_prompt: list[int]) -> None:
    """A conversation of two turns; the first has the ids 1, 2 and the answer 97, 98."""
    talk.turn([USER], "ab", [1, 2])
    talk.turn([USER, said("ab"), {"role": "user", "content": "on"}], "c", second_prompt)


def test_turns_that_continue_each_other_are_one_branch_and_fine(talk: Talk) -> None:
    two_turns(talk, [1, 2, 97, 98, 7])
    assert talk.integrity() == {
        "ok": True,
        "problems": [],
        "partings": [],
        "branches": [[0, 1]],
        "unchecked": 0,
    }


def test_other_tokens_for_the_same_conversation_are_a_retokenisation(talk: Talk) -> None:
    two_turns(talk, [1, 2, 97, 55, 7])
    found = talk.integrity()
    assert not found["ok"]
    assert found["problems"] == [{"turn": 1, "kind": "retokenised", "token": 3}]
    assert found["partings"] == [{"turn": 1, "reason": "retokenisation", "parent": 0, "message": 2, "token": 3}]
    assert found["branches"] == [[0], [1]]


def test_reasoning_that_the_agent_dropped_is_an_edited_history(talk: Talk) -> None:
    talk.turn([USER], "ab", [1, 2], message={"reasoning_content": "hm"})
    talk.turn([USER, said("ab"), {"role": "user", "content": "on"}], "c", [1, 2, 98, 7])
    found = talk.integrity()
    assert found["ok"]
    assert found["partings"] == [{"turn": 1, "reason": "edited_history", "parent": 0, "message": 2, "token": 2}]
    assert found["branches"] == [[0], [1]]


def test_a_compacted_history_is_edited_and_a_conversation_of_its_own_is_new(talk: Talk) -> None:
    talk.turn([{"role": "system", "content": "s"}, USER], "ab", [9, 1, 2])
    talk.turn([{"role": "system", "content": "s"}, USER, {"role": "user", "content": "summary"}], "c", [9, 1, 2, 50])
    talk.turn([{"role": "system", "content": "s"}, {"role": "user", "content": "sub-agent"}], "d", [9, 60])
    found = talk.integrity()
    assert [(each["turn"], each["reason"], each["parent"]) for each in found["partings"]] == [
        (1, "edited_history", 0),
        (2, "new_branch", None),
    ]
    assert found["branches"] == [[0], [1], [2]]
    assert found["ok"]


def test_an_earlier_point_that_is_taken_up_again_is_a_branch(talk: Talk) -> None:
    two_turns(talk, [1, 2, 97, 98, 7])
    talk.turn([USER, said("ab"), {"role": "user", "content": "otherwise"}], "d", [1, 2, 97, 98, 8])
    talk.turn([USER, said("ab"), {"role": "user", "content": "on"}, said("c"), USER], "e", [1, 2, 97, 98, 7, 99, 1])
    talk.turn([USER], "again", [1, 2])
    found = talk.integrity()
    assert found["branches"] == [[0, 1, 3], [2], [4]]
    assert [(each["turn"], each["reason"], each["parent"]) for each in found["partings"]] == [
        (2, "new_branch", 0),
        (4, "new_branch", 0),
    ]
    assert found["ok"]


def test_an_answer_that_the_gateway_did_not_give_is_a_call_past_it(talk: Talk) -> None:
    talk.turn([USER], "ab", [1, 2])
    more = [{"role": "user", "content": "on"}, said("from elsewhere"), {"role": "user", "content": "and"}]
    talk.turn([USER, said("ab"), *more], "c", [1, 2, 97, 98, 3])
    assert talk.integrity()["problems"] == [{"turn": 1, "kind": "unseen_answer", "count": 1}]


def test_few_shot_answers_in_the_first_prompt_are_no_calls(talk: Talk) -> None:
    talk.turn([USER, said("an example"), {"role": "user", "content": "now you"}], "ab", [1, 2])
    assert talk.integrity()["ok"]


def test_zero_calls_no_tokens_missing_and_bad_tokens_are_told(
    gateway: Any, model: Any, answer_of: Callable[..., Any]
) -> None:
    nothing = {"choice": {"token_ids": None, "logprobs": None}, "prompt_token_ids": None}
    rollout = gateway.register()
    kinds = lambda: [each["kind"] for each in gateway.trajectory(rollout)["integrity"]["problems"]]  # noqa: E731
    assert kinds() == ["zero_calls"]
    model.will(answer_of("ab", **nothing))
    gateway.chat(rollout, "one")
    assert kinds() == ["no_tokens"]
    model.will(answer_of("cd"), answer_of("ef", choice={"token_ids": [1, 2, 3]}))
    gateway.chat(rollout, "two")
    gateway.chat(rollout, "three")
    assert kinds() == ["missing_tokens", "bad_tokens"]


def test_a_server_that_does_not_tell_the_prompts_ids_leaves_turns_unchecked(talk: Talk) -> None:
    entries = [{"id": 7, "logprob": -0.5}]
    choice = {"token_ids": None, "logprobs": {"content": entries}}
    talk.model.will(talk.answer_of("a", choice=choice, prompt_token_ids=None))
    ask(talk.gateway, talk.rollout, [USER])
    found = talk.integrity()
    assert (found["ok"], found["unchecked"]) == (True, 1)


def rebuilt(body: dict[str, Any], turn: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Put a turn's ids together from the compact form, as its documentation says."""

    def ids(index: int, end: int) -> list[int]:
        stream = body["streams"][index]
        shared = min(stream["shared"], end)
        before = ids(stream["parent"], shared) if stream["parent"] is not None else []
        return before + stream["ids"][: end - shared]

    at = turn["tokens"]
    whole = ids(at["stream"], at["end"])
    return whole[: at["prompt_end"]], whole[at["prompt_end"] :]


def test_the_compact_form_says_each_token_and_message_once_and_loses_nothing(talk: Talk) -> None:
    two_turns(talk, [1, 2, 97, 98, 7])
    talk.turn([USER, said("ab"), {"role": "user", "content": "otherwise"}], "d", [1, 2, 97, 98, 8])
    full = talk.gateway.trajectory(talk.rollout)
    body = talk.gateway.trajectory(talk.rollout, format="compact")
    assert [(stream["parent"], stream["shared"], stream["ids"]) for stream in body["streams"]] == [
        (None, 0, [1, 2, 97, 98, 7, 99]),
        (0, 4, [8, 100]),
    ]
    assert len(body["messages"]) == 6
    assert body["integrity"] == full["integrity"]
    for step, turn in zip(full["trajectory"], body["turns"], strict=True):
        assert rebuilt(body, turn) == (step["tokens"]["prompt_ids"], step["tokens"]["completion_ids"])
        assert turn["tokens"]["logprobs"] == step["tokens"]["completion_logprobs"]
        assert [body["messages"][index] for index in turn["prompt"]] == step["prompt"]
        assert [body["messages"][turn["completion"]]] == step["completion"]


def test_an_unknown_format_is_refused(gateway: Any) -> None:
    answer = gateway.get(f"/v1/rollouts/{gateway.register()}/trajectory", params={"format": "xml"})
    assert answer.status_code == 400


def test_routed_experts_are_recorded_as_given(talk: Talk) -> None:
    experts = [[[0, 3], [1, 2]], [[5, 1], [0, 0]], [[1, 1], [2, 2]]]
    talk.turn([USER], "a", [1, 2], choice={"routed_experts": experts})
    full = talk.gateway.trajectory(talk.rollout)["trajectory"][0]
    assert full["tokens"]["routed_experts"] == experts
    compact = talk.gateway.trajectory(talk.rollout, format="compact")["turns"][0]
    assert compact["tokens"]["routed_experts"] == experts
