"""Token ids and logprobs: read from what the upstream gives, cut as registered, and never invented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from workers.gateway.server.tokens import TokenError, read_tokens


def test_vllms_ids_and_logprobs(answer_of: Callable[..., Any]) -> None:
    tokens = read_tokens(answer_of("ab", prompt=4))
    assert tokens is not None
    assert tokens.as_dict(None) == {
        "prompt_ids": [0, 1, 2, 3],
        "prompt_mask": [0, 0, 0, 0],
        "completion_ids": [97, 98],
        "completion_mask": [1, 1],
        "completion_logprobs": [-0.097, -0.098],
        "overlong_prompt": False,
        "is_truncated": False,
        "routed_experts": None,
    }


def test_prompt_ids_in_the_choice_are_found(answer_of: Callable[..., Any]) -> None:
    tokens = read_tokens(answer_of(choice={"prompt_token_ids": [5, 6]}, prompt_token_ids=None))
    assert tokens is not None
    assert tokens.prompt_ids.tolist() == [5, 6]


def test_llama_cpps_ids_are_real_and_the_prompts_stay_unknown(answer_of: Callable[..., Any]) -> None:
    entries = [{"id": 7, "logprob": -0.5}, {"id": 8, "logprob": -0.25}]
    choice = {"token_ids": None, "logprobs": {"content": entries}}
    tokens = read_tokens(answer_of("ok", prompt=9, choice=choice, prompt_token_ids=None))
    assert tokens is not None
    whole = tokens.as_dict(None)
    assert (whole["prompt_ids"], whole["completion_ids"], whole["completion_logprobs"]) == ([], [7, 8], [-0.5, -0.25])
    cut = tokens.as_dict(10)  # the 9 tokens of the prompt count, though their ids are unknown
    assert (cut["completion_ids"], cut["is_truncated"], cut["overlong_prompt"]) == ([7], True, False)
    assert tokens.as_dict(8)["overlong_prompt"] is True


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"token_ids": [1, 2, 3]}, "3 token ids, but 2 logprobs"),
        ({"logprobs": None}, "2 token ids without logprobs"),
        ({"token_ids": ["a", "b"]}, "no token id"),
        ({"logprobs": {"content": [{"logprob": None}, {"logprob": 0.0}]}}, "no logprob"),
        ({"token_ids": None, "logprobs": {"content": [{"id": 1, "logprob": 0.0}, {"logprob": 0.0}]}}, "no token id"),
        ({"logprobs": {"content": [1, 2]}}, "not a list of objects"),
        ({"logprobs": {"content": 5}}, "not a list of objects"),
        ({"token_ids": 5}, "token_ids is not a list"),
        ({"token_ids": "ab"}, "token_ids is not a list"),
    ],
)
def test_inconsistent_tokens_are_an_error(answer_of: Callable[..., Any], choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(TokenError, match=reason):
        read_tokens(answer_of("ab", choice=choice))


def test_prompt_ids_that_are_no_list_are_an_error(answer_of: Callable[..., Any]) -> None:
    with pytest.raises(TokenError, match="prompt_token_ids is not a list"):
        read_tokens(answer_of("ab", prompt_token_ids=5))


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_no_list_leave_the_call_a_success(
    gateway: Any, model: Any, answer_of: Callable[..., Any], stream: bool
) -> None:
    rollout, chunk = gateway.register(), {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    broken = chunk | {"token_ids": 5, "logprobs": {"content": 5}}
    events = [b"data: " + orjson.dumps({"choices": [entry]}) + b"\n\n" for entry in (chunk, broken)]
    whole = answer_of("ab", choice={"token_ids": 5})
    model.will((lambda _: model.events([*events, b"data: [DONE]\n\n"])) if stream else whole)
    assert gateway.chat(rollout, stream=stream).status_code == 200
    step = gateway.trajectory(rollout)["trajectory"][0]
    assert step["tokens"] is None
    assert "not a list" in step["extras"]["token_error"]


def test_inconsistent_tokens_are_recorded_as_null_with_the_reason(
    gateway: Any, model: Any, answer_of: Callable[..., Any]
) -> None:
    rollout = gateway.register()
    model.will(answer_of("ab", choice={"token_ids": [1, 2, 3]}))
    gateway.chat(rollout)
    step = gateway.trajectory(rollout)["trajectory"][0]
    assert step["tokens"] is None
    assert step["extras"] == {"token_error": "3 token ids, but 2 logprobs"}


def test_a_server_that_refuses_unknown_fields_need_not_be_asked(
    gateway_with: Callable[..., Any], model: Any, model_url: str
) -> None:
    gateway = gateway_with(upstream=model_url, ask_tokens=False)
    gateway.chat(gateway.register())
    assert model.requests[0].keys() == {"model", "messages"}


def test_sglangs_meta_info(gateway: Any, model: Any, answer_of: Callable[..., Any]) -> None:
    rollout = gateway.register(sampling_params={"extra_body": {"return_meta_info": True}})
    meta = {"output_token_logprobs": [[-0.5, 7, "o"], [-0.25, 8, "k"]], "routed_experts": [[1]], "id": "x"}
    choice = {"token_ids": None, "prompt_token_ids": [1, 2], "meta_info": meta}
    model.will(answer_of("ok", choice=choice, prompt_token_ids=None))
    assert gateway.chat(rollout).status_code == 200
    assert model.requests[0]["return_meta_info"] is True
    tokens = gateway.trajectory(rollout)["trajectory"][0]["tokens"]
    assert (tokens["prompt_ids"], tokens["completion_ids"]) == ([1, 2], [7, 8])
    assert (tokens["completion_logprobs"], tokens["routed_experts"]) == ([-0.5, -0.25], [[1]])


@pytest.mark.parametrize("sampled", [5, [5], [[]], [[-0.5]], ["ab"]])
def test_sglangs_meta_info_that_is_none_is_an_error(answer_of: Callable[..., Any], sampled: Any) -> None:
    choice = {"token_ids": None, "logprobs": None, "meta_info": {"output_token_logprobs": sampled}}
    with pytest.raises(TokenError):
        read_tokens(answer_of("ok", choice=choice))
