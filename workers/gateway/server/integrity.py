"""Whether a trainer can trust what was recorded, and the recorded tokens with nothing said twice."""

from __future__ import annotations

from typing import Any

from workers.gateway.server.turns import Turn, Turns

_PARTED = {"forked": "new_branch", "new": "new_branch", "edited": "edited_history", "retokenised": "retokenisation"}


def integrity(turns: Turns, failed_calls: int) -> dict[str, Any]:
    """Return what was checked of one rollout.

    ``ok`` is false when something is wrong that ``problems`` names, each with its ``turn`` where it has one:
    ``zero_calls``; ``no_tokens`` (answered calls, but none with token ids); ``missing_tokens``; ``bad_tokens`` (lengths
    of ids and logprobs that differ and the like); ``unreadable``; ``unseen_answer`` (the agent's history holds an
    answer that the gateway did not give: a call went past it); ``retokenised`` (the same conversation came back as
    other tokens: a trainer that joins the turns would train on what was never sampled).

    ``partings`` are the turns whose prompt does not begin with the whole turn before it, with the ``reason``
    (``retokenisation``, ``edited_history`` or ``new_branch``), the ``parent`` turn if there is one, and where they
    part: ``message`` and, where ids are known, ``token``. ``branches`` are the turns' indices, chain by chain.
    ``unchecked`` counts the turns whose prompt's ids the model's server does not tell.
    """
    problems = _of_all(turns, failed_calls)
    for index, turn in enumerate(turns.settled):
        problems += [{"turn": index} | problem for problem in _of_turn(turn, turns)]
    partings = [
        {
            "turn": index,
            "reason": _PARTED[turn.relation],
            "parent": turn.parent,
            "message": turn.shared,
            "token": turn.agreed,
        }
        for index, turn in enumerate(turns.settled)
        if turn.relation in _PARTED
    ]
    return {
        "ok": not problems,
        "problems": problems,
        "partings": partings,
        "branches": turns.branches,
        "unchecked": sum(turn.span is not None and not turn.span.prompt_end for turn in turns.settled),
    }


def compact(turns: Turns, max_seq_len: int | None) -> dict[str, Any]:
    """Return all turns with each message and each token once.

    ``messages`` are all that occur. A stream's ``ids`` follow the first ``shared`` ids of the stream ``parent``. A
    turn's prompt is its stream's ids up to ``prompt_end``, its completion those from there to ``end`` with
    ``logprobs``; ``prompt`` and ``completion`` are indices of ``messages``. Nothing is cut to ``max_seq_len``.
    """
    messages: list[dict[str, Any]] = []
    places: dict[int, int] = {}

    def place(message: dict[str, Any]) -> int:
        if id(message) not in places:
            places[id(message)] = len(messages)
            messages.append(message)
        return places[id(message)]

    found = [
        {
            "prompt": [place(message) for message in turn.messages],
            "completion": place(turn.completion),
            "branch": turn.branch,
            "parent": turn.parent,
            "relation": turn.relation,
            "finish_reason": turn.finish_reason,
            "is_truncated": turn.is_truncated(max_seq_len),
            "extras": turn.extras,
            "tokens": _span(turn),
        }
        for turn in turns.settled
    ]
    streams = [
        {"parent": stream.parent.index if stream.parent else None, "shared": stream.shared, "ids": stream.own.tolist()}
        for stream in turns.tokens.streams
    ]
    return {"messages": messages, "streams": streams, "turns": found}


def _of_all(turns: Turns, failed_calls: int) -> list[dict[str, Any]]:
    if not turns.settled:
        return [{"kind": "zero_calls", "failed_calls": failed_calls}]
    return [] if any(turn.span for turn in turns.settled) else [{"kind": "no_tokens"}]


def _of_turn(turn: Turn, turns: Turns) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "record_error" in turn.extras:
        found.append({"kind": "unreadable", "detail": turn.extras["record_error"]})
    elif "token_error" in turn.extras:
        found.append({"kind": "bad_tokens", "detail": turn.extras["token_error"]})
    elif turn.span is None and any(other.span for other in turns.settled):
        found.append({"kind": "missing_tokens"})
    if turn.unseen:
        found.append({"kind": "unseen_answer", "count": turn.unseen})
    if turn.relation == "retokenised":
        found.append({"kind": "retokenised", "token": turn.agreed})
    return found


def _span(turn: Turn) -> dict[str, Any] | None:
    if turn.span is None:
        return None
    return {
        "stream": turn.span.stream.index,
        "prompt_end": turn.span.prompt_end,
        "end": turn.span.end,
        "prompt_length": turn.span.prompt_length,
        "logprobs": turn.span.logprobs.tolist(),
        "routed_experts": turn.span.tokens().routed_experts if turn.span.experts else None,
    }
