"""A trajectory as a person reads it: each turn with the messages that are new in it, instead of all before it again.

Messages come from agents and models and may be anything: nothing here trusts their form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from producer.contract import RolloutResult, Step

_PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it; ``arguments`` is JSON, indented where it can be read as that."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """One message: who said it, and its text with a mark for what is no text."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One model call: the messages that came before it since the last one, and the answer.

    ``kept`` is how many earlier messages the agent sent again, and ``rewritten`` whether it had changed or dropped some
    of them. Token counts are None where the server gave none.
    """

    asked: tuple[Said, ...]
    answered: tuple[Said, ...]
    kept: int = 0
    rewritten: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    is_truncated: bool = False
    reward: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)


def integrity_of(result: RolloutResult) -> str | None:
    """Return in words whether the record can be trained on, and why not; None when no gateway told."""
    told = result.integrity
    if told is None:
        return None
    given, branches = told.get("problems"), told.get("branches")
    problems = [_problem(each) for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    parts = ["ok" if told.get("ok") is True else "not ok"]
    if problems:
        more = f" and {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
        parts.append(", ".join(problems[:_PROBLEMS_SHOWN]) + more)
    if isinstance(branches, list) and len(branches) > 1:
        parts.append(f"{len(branches)} branches")
    return "; ".join(parts)


def _problem(problem: dict[str, Any]) -> str:
    kind = str(problem.get("kind"))[:100].replace("_", " ")
    turn = problem.get("turn")
    where = f" in turn {turn + 1}" if isinstance(turn, int) else ""
    detail = f" ({str(problem['detail'])[:200]})" if problem.get("detail") else ""
    return f"{kind}{where}{detail}"


def turns_of(result: RolloutResult) -> list[Turn]:
    """Return the turns of a result's trajectory."""
    return turns_of_steps(result.trajectory)


def turns_of_steps(steps: Iterable[Step]) -> list[Turn]:
    """Return the turns that steps stand for."""
    turns: list[Turn] = []
    before: list[Any] = []
    for step in steps:
        prompt, completion = _list(step.get("prompt")), _list(step.get("completion"))
        kept = _common(before, prompt)
        turns.append(_turn(step, prompt[kept:], completion, kept, rewritten=kept < len(before)))
        before = prompt + completion
    return turns


def _turn(step: Step, asked: list[Any], answered: list[Any], kept: int, *, rewritten: bool) -> Turn:
    tokens = step.get("tokens")
    reward, extras = step.get("reward"), step.get("extras")
    return Turn(
        asked=tuple(said(message) for message in asked),
        answered=tuple(said(message) for message in answered),
        kept=kept,
        rewritten=rewritten,
        prompt_tokens=_count(tokens, "prompt_ids"),
        completion_tokens=_count(tokens, "completion_ids"),
        is_truncated=bool(step.get("is_truncated")),
        reward=float(reward) if isinstance(reward, int | float) else None,
        extras=extras if isinstance(extras, dict) else {},
    )


def said(message: Any) -> Said:
    """Return a message for reading."""
    if not isinstance(message, dict):
        return Said("?", _text(message))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    role = str(message.get("role") or "?")
    name = message.get("name")
    return Said(
        role=f"{role} {name}" if isinstance(name, str) and name else role,
        text=_content(message.get("content")),
        reasoning=_text(reasoning) if reasoning else "",
        calls=tuple(_call(call) for call in _list(message.get("tool_calls"))),
    )


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part) for part in content) if isinstance(content, list) else _text(content)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and "type" in part:
        return f"[{part['type']}: {len(_text(part))} characters]"
    return _text(part)


def _call(call: Any) -> Call:
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        return Call("?", _text(call))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return Call(str(function.get("name") or "?"), str(arguments))
    return Call(str(function.get("name") or "?"), _text(arguments))


def _common(before: list[Any], now: list[Any]) -> int:
    """Return how many first messages are the same; an agent may leave out what only the server adds to its answers."""
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new and _essence(old) != _essence(new):
            return number
    return min(len(before), len(now))


def _essence(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    calls = [(call.name, call.arguments) for call in said(message).calls]
    return message.get("role"), _content(message.get("content")), calls


def _count(tokens: Any, name: str) -> int | None:
    ids = tokens.get(name) if isinstance(tokens, dict) else None
    return len(ids) if isinstance(ids, list) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except TypeError:
        return repr(value)
