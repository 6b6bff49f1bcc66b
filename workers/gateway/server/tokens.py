"""What the model sampled: token ids and logprobs, read from whatever the upstream gives and never invented.

Sources, in this order: vLLM with ``return_token_ids`` (``prompt_token_ids`` at the top or in the choice, ``token_ids``
in the choice, logprobs in ``logprobs.content[].logprob``); SGLang (the same fields with ``return_token_ids``; with
``return_meta_info``, ``meta_info.output_token_logprobs`` of ``[logprob, id, text]`` in the choice; neither when it
streams); llama.cpp's server (``logprobs.content[].id`` and ``.logprob``). llama.cpp does not tell the prompt's ids:
``prompt_ids`` is then ``[]``, and `Tokens.prompt_length` comes from ``usage.prompt_tokens``, so that ``max_seq_len``
still counts the prompt. Anything inconsistent (numbers of ids and logprobs that differ, an id that is no integer, a
logprob that is not finite) gives no tokens at all and a sentence.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any


class TokenError(ValueError):
    """The upstream gave token data that cannot be right; the message says what."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one model call, as compact arrays: 4 bytes an id, where lists would take 40."""

    prompt_ids: array[int]
    completion_ids: array[int]
    logprobs: array[float]
    prompt_length: int
    routed_experts: Any = None

    def is_cut(self, max_seq_len: int | None) -> bool:
        """Return whether ``max_seq_len`` cuts prompt plus completion."""
        return max_seq_len is not None and self.prompt_length + len(self.completion_ids) > max_seq_len

    def as_dict(self, max_seq_len: int | None) -> dict[str, Any]:
        """Return the tokens as a trajectory's step holds them, cut at the end to ``max_seq_len``."""
        prompt, completion, logprobs = self.prompt_ids, self.completion_ids, self.logprobs
        experts = self.routed_experts
        if max_seq_len is not None and self.is_cut(max_seq_len):
            room = max(0, max_seq_len - self.prompt_length)
            prompt, completion, logprobs = prompt[:max_seq_len], completion[:room], logprobs[:room]
            experts = experts[:max_seq_len] if isinstance(experts, list) else experts
        return {
            "prompt_ids": prompt.tolist(),
            "prompt_mask": [0] * len(prompt),
            "completion_ids": completion.tolist(),
            "completion_mask": [1] * len(completion),
            "completion_logprobs": logprobs.tolist(),
            "overlong_prompt": max_seq_len is not None and self.prompt_length > max_seq_len,
            "is_truncated": self.is_cut(max_seq_len),
            "routed_experts": experts,
        }


def read_tokens(completion: dict[str, Any]) -> Tokens | None:
    """Return the tokens of a chat completion's first choice, or None when the upstream gave none.

    Raises:
        TokenError: there are some, but they cannot be right.
    """
    choice = completion["choices"][0]
    entries = _logprob_entries(choice)
    ids = _list_of("token_ids", choice.get("token_ids"))
    if ids is None and (sampled := _meta_of(choice).get("output_token_logprobs")):
        entries = _sglang_entries(sampled)
    if ids is None:
        ids = [entry.get("id") for entry in entries or ()]
        if not ids or all(value is None for value in ids):
            return None
    if entries is None:
        if not ids:
            return None
        raise TokenError(f"{len(ids)} token ids without logprobs")
    if len(ids) != len(entries):
        raise TokenError(f"{len(ids)} token ids, but {len(entries)} logprobs")

    found = _first_not_none(completion.get("prompt_token_ids"), choice.get("prompt_token_ids"))
    prompt_ids = _list_of("prompt_token_ids", found)
    usage = completion.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Tokens(
        prompt_ids=_ids("prompt_token_ids", prompt_ids or ()),
        completion_ids=_ids("token_ids", ids),
        logprobs=_logprobs(entries),
        prompt_length=len(prompt_ids) if prompt_ids else counted if isinstance(counted, int) else 0,
        routed_experts=_first_not_none(choice.get("routed_experts"), _meta_of(choice).get("routed_experts")),
    )


def counted_tokens(completion: dict[str, Any], tokens: Tokens | None) -> tuple[int, int]:
    """Return how many tokens a call's prompt and completion had: by the upstream's count, else by its token ids."""
    given = completion.get("usage")
    usage: dict[str, Any] = given if isinstance(given, dict) else {}
    known = (tokens.prompt_length, len(tokens.completion_ids)) if tokens else (0, 0)
    names = ("prompt_tokens", "completion_tokens")
    prompt, sampled = (_count(usage.get(name), default) for name, default in zip(names, known, strict=True))
    return prompt, sampled


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _logprob_entries(choice: dict[str, Any]) -> list[dict[str, Any]] | None:
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if entries is None:
        return None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TokenError("logprobs.content is not a list of objects")
    return entries


def _meta_of(choice: dict[str, Any]) -> dict[str, Any]:
    meta = choice.get("meta_info")
    return meta if isinstance(meta, dict) else {}


def _sglang_entries(sampled: Any) -> list[dict[str, Any]]:
    try:
        return [{"logprob": entry[0], "id": entry[1]} for entry in sampled]
    except (TypeError, LookupError):
        raise TokenError("output_token_logprobs is not a list of [logprob, id, text]") from None


def _list_of(name: str, value: Any) -> list[Any] | None:
    if value is not None and not isinstance(value, list):
        raise TokenError(f"{name} is not a list")
    return value


def _ids(name: str, values: Any) -> array[int]:
    try:
        return array("i", values)
    except (TypeError, OverflowError) as error:
        raise TokenError(f"{name} holds something that is no token id: {error}") from None


def _logprobs(entries: list[dict[str, Any]]) -> array[float]:
    try:
        values: Any = [entry.get("logprob") for entry in entries]
        logprobs: array[float] = array("d", values)
    except TypeError as error:
        raise TokenError(f"logprobs.content holds something that is no logprob: {error}") from None
    if not all(map(math.isfinite, logprobs)):
        raise TokenError("a logprob is not finite")
    return logprobs


def _first_not_none(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
