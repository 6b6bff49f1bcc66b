"""A deterministic stand-in for a model server: OpenAI's chat API with vLLM's token data. It is no language model.

It finds the arithmetic in the last user message, works it out one operation per tool call when it is offered a tool
that takes an ``expression``, and then answers ``ANSWER: number``. The same request gets the same answer. With a
temperature above 0, about three in ten answers are wrong, chosen by a hash of the task and the request's ``seed``, so
that the samples of a task differ in reward.

Its tokens are the bytes of the text in a simple chat template, and 256 ends a message; a turn's prompt continues the
ids of the turn before it, prompt and completion, exactly. Where vLLM puts them: ``prompt_token_ids`` at the top (in
the first chunk of a stream), ``token_ids`` and ``logprobs`` in each choice.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from workers.demo import STAND_IN
from workers.demo.agent import evaluate

OWNER = "rollout-fleet stand-in (not a language model)"
END = 256  #: the token that ends a message
#: Of ten answers, how many are wrong.
MISTAKES_IN_TEN = 3

Message = dict[str, Any]
Tools = list[dict[str, Any]]


class BadRequest(Exception):  # noqa: N818 - named after the status it becomes
    """The body does not fit; answered with status 400 in OpenAI's form."""


# -- tokens ------------------------------------------------------------------------------------------------------------


def render_prompt(messages: Sequence[Message], tools: Tools) -> list[int]:
    """Return the token ids of a request: the tools, each message, and the head of the answer."""
    ids = [*list(b"<|tools|>" + orjson.dumps(tools)), END] if tools else []
    for message in messages:
        ids += f"<|{message['role']}|>".encode()
        ids += _text(message.get("content")).encode()
        for call in message.get("tool_calls") or []:
            ids += "".join(_call_text(call.get("function") or call)).encode()
        ids.append(END)
    ids += b"<|assistant|>"
    return ids


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _call_text(function: dict[str, Any]) -> tuple[str, str, str]:
    """Return a tool call as text: what is before its arguments, they themselves, what is after."""
    name, arguments = function.get("name", ""), str(function.get("arguments", ""))
    return f'<tool_call>{{"name": "{name}", "arguments": ', arguments, "}</tool_call>"


def logprob_entry(position: int, token: int, top: int) -> dict[str, Any]:
    """Return one entry of ``logprobs.content``; the value depends on the token and its place only."""
    entry = {
        "token": "<|end|>" if token == END else chr(token),
        "logprob": -0.001 - (token * 31 + position * 17) % 100 / 1000,
        "bytes": [] if token == END else [token],
    }
    return entry | {"top_logprobs": [dict(entry)] if top else []}


# -- the answer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A part of the answer, as a stream sends it: the message's delta and the tokens that it stands for."""

    delta: dict[str, Any]
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """One completion, whole and in pieces."""

    message: Message
    pieces: list[Piece]
    finish_reason: str

    @property
    def ids(self) -> list[int]:
        """The completion's token ids."""
        return [token for piece in self.pieces for token in piece.ids]


def answer(body: dict[str, Any]) -> Answer:
    """Work out the answer to a chat request, cut to its ``max_completion_tokens`` or ``max_tokens``."""
    content, call = _think(body)
    message: Message = {"role": "assistant", "content": content, "tool_calls": [call] if call else None}
    pieces = [Piece({"content": word}, list(word.encode())) for word in _words(content)]
    if call:
        pieces += _call_pieces(call)
    pieces.append(Piece({}, [END]))
    whole = Answer(message, pieces, "tool_calls" if call else "stop")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return _cut(whole, limit) if limit and len(whole.ids) > limit else whole


def _cut(whole: Answer, limit: int) -> Answer:
    """End the answer after ``limit`` tokens; a tool call that is not complete is left as text."""
    text = bytes(token for token in whole.ids[:limit] if token != END).decode()
    pieces = [Piece({"content": word}, list(word.encode())) for word in _words(text)]
    return Answer({"role": "assistant", "content": text, "tool_calls": None}, pieces, "length")


def _words(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text)


def _call_pieces(call: dict[str, Any]) -> Iterator[Piece]:
    before, arguments, after = _call_text(call["function"])
    head = call | {"function": {"name": call["function"]["name"], "arguments": ""}}
    yield Piece({"tool_calls": [{"index": 0} | head]}, list(before.encode()))
    for word in _words(arguments):
        yield Piece({"tool_calls": [{"index": 0, "function": {"arguments": word}}]}, list(word.encode()))
    yield Piece({}, list(after.encode()))


def _think(body: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the next message's content and its tool call, if it makes one."""
    messages: list[Message] = body["messages"]
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    task = _text(messages[last].get("content")) if last >= 0 else ""
    expression = find_expression(task)
    if expression is None:
        return f"This stand-in knows arithmetic only. [{_digest(body['messages']).hex()[:8]}]", None

    results = [_text(message.get("content")) for message in messages[last + 1 :] if message["role"] == "tool"]
    tool = _calculator_of(body.get("tools") or [])
    step = next_operation(expression, results) if tool else None
    if tool and step:
        arguments = orjson.dumps({"expression": step}).decode().replace('":"', '": "')
        call_id = f"call_{_digest([task, results]).hex()[:12]}"
        call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}
        return f"I need {step}. ", call
    return _conclusion(body, task, results[-1] if tool and results else evaluate(expression)), None


def _conclusion(body: dict[str, Any], task: str, value: str) -> str:
    temperature = body.get("temperature")
    luck = _digest([task, body.get("seed")])
    if temperature != 0 and luck[0] % 10 < MISTAKES_IN_TEN and not value.startswith("error"):
        if luck[1] % 3 == 0:
            return f"I make it {value}."
        value = evaluate(f"{value} + {1 + luck[1] % 9}")
    return f"The calculation gives {value}.\nANSWER: {value}"


def _calculator_of(tools: Tools) -> str | None:
    for tool in tools:
        function = tool.get("function") or {}
        if "expression" in ((function.get("parameters") or {}).get("properties") or {}):
            return str(function["name"])
    return None


def _digest(value: object) -> bytes:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)).digest()


# -- arithmetic --------------------------------------------------------------------------------------------------------

_ARITHMETIC = re.compile(r"[\d(][\d .+\-*/%()]*[\d)]")
_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}


def find_expression(text: str) -> str | None:
    """Return the longest arithmetic expression in ``text`` that has an operator and a value."""
    found = [m.group() for m in _ARITHMETIC.finditer(text[:20_000]) if re.search(r"[+\-*/%]", m.group())]
    for expression in sorted(found, key=len, reverse=True):
        if not evaluate(expression).startswith("error") and _parses(expression):
            return expression
    return None


def _parses(expression: str) -> bool:
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError:  # a leading zero, for one, which the calculator takes
        return False
    return True


def next_operation(expression: str, results: Sequence[str]) -> str | None:
    """Return the operation that comes after those whose ``results`` are known, such as ``72 + 9``; None at the end."""
    left = list(results)

    def reduce(node: ast.expr) -> str | _Open:
        if isinstance(node, ast.BinOp):
            first = reduce(node.left)
            second = first if isinstance(first, _Open) else reduce(node.right)
            if isinstance(first, _Open) or isinstance(second, _Open):
                return second
            return left.pop(0) if left else _Open(f"{first} {_SIGNS[type(node.op)]} {second}")
        return ast.unparse(node)

    step = reduce(ast.parse(expression.strip(), mode="eval").body)
    return step.operation if isinstance(step, _Open) and not _failed(results) else None


@dataclass(frozen=True)
class _Open:
    """An operation whose result is not known yet."""

    operation: str


def _failed(results: Sequence[str]) -> bool:
    return any(result.startswith("error") for result in results)


# -- the server --------------------------------------------------------------------------------------------------------


def create_model_app(latency: float = 0.0) -> Starlette:
    """Return the stand-in as an ASGI application that answers each chat request after ``latency`` seconds."""

    async def chat(request: Request) -> Response:
        try:
            body = _checked(await request.body())
        except BadRequest as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}, 400)
        if latency:
            await asyncio.sleep(latency)
        if body.get("stream"):
            return StreamingResponse(_stream(body), media_type="text/event-stream")
        return Response(orjson.dumps(completion(body)), media_type="application/json")

    async def models(_: Request) -> Response:
        model = {"id": STAND_IN, "object": "model", "created": 0, "owned_by": OWNER}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


def _checked(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("messages: expected a list with at least one message")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in body["messages"]):
        raise BadRequest("messages: each must be an object with a role")
    if not _are_objects(body.get("tools")) or not all(_are_objects(m.get("tool_calls")) for m in body["messages"]):
        raise BadRequest("tools and tool_calls: expected lists of objects")
    if body.get("n") not in {None, 1}:
        raise BadRequest("n: this server gives one choice")
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None and (not isinstance(body[name], int) or body[name] < 1):
            raise BadRequest(f"{name}: expected a positive number of tokens")
    return body


def _are_objects(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """Return the whole chat completion that answers ``body``."""
    given = answer(body)
    prompt_ids = render_prompt(body["messages"], body.get("tools") or [])
    choice = {"index": 0, "message": given.message, "finish_reason": given.finish_reason, "stop_reason": None}
    reply = _head(body, "chat.completion") | {"choices": [choice | _token_data(body, given.ids, 0)]}
    if body.get("return_token_ids"):
        reply["prompt_token_ids"] = prompt_ids
    return reply | {"usage": _usage(len(prompt_ids), len(given.ids))}


async def _stream(body: dict[str, Any]) -> AsyncIterator[bytes]:
    for chunk in chunks(body):
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks that answer ``body``; together they carry what `completion` returns."""
    given = answer(body)
    prompt_ids = render_prompt(body["messages"], body.get("tools") or [])
    head = _head(body, "chat.completion.chunk")
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    first = head | {"choices": [opening | {"logprobs": None}]}
    yield first | {"prompt_token_ids": prompt_ids} if body.get("return_token_ids") else first
    position = 0
    for number, piece in enumerate(given.pieces, 1):
        finish = given.finish_reason if number == len(given.pieces) else None
        choice = {"index": 0, "delta": piece.delta, "finish_reason": finish}
        yield head | {"choices": [choice | _token_data(body, piece.ids, position)]}
        position += len(piece.ids)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield head | {"choices": [], "usage": _usage(len(prompt_ids), position)}


def _head(body: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields that every answer has; nothing in it depends on the clock."""
    same = {name: value for name, value in body.items() if name not in {"stream", "stream_options"}}
    return {
        "id": f"chatcmpl-{_digest(same).hex()[:24]}",
        "object": kind,
        "created": 0,
        "model": body.get("model") or STAND_IN,
    }


def _token_data(body: dict[str, Any], ids: list[int], position: int) -> dict[str, Any]:
    data: dict[str, Any] = {"logprobs": None}
    if body.get("logprobs"):
        top = body.get("top_logprobs") or 0
        data["logprobs"] = {"content": [logprob_entry(position + i, token, top) for i, token in enumerate(ids)]}
    if body.get("return_token_ids"):
        data["token_ids"] = ids
    return data


def _usage(prompt: int, completed: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the stand-in until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m workers.demo.model", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="time that each chat request takes at least")
    options = parser.parse_args(arguments)
    app = create_model_app(options.latency_ms / 1000)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
