"""The demo's agent: a program of its own that works on one task with a calculator, model call by model call.

It reads ``task.json`` (``{"messages": [...], "max_turns": N}``) in its working directory and where its model is from
``OPENAI_BASE_URL``, ``OPENAI_MODEL``, ``OPENAI_API_KEY`` and ``OPENAI_TIMEOUT``. Each turn is one chat completion,
streamed when ``DEMO_STREAM=1``; tool calls are carried out here and their results are sent with the next turn. The
last answer goes to ``answer.txt``. Exit status: 0 with an answer, 1 when the model cannot be had, 2 on a bad start.

It runs inside the sandbox, so it is one file that imports the standard library only, and of that only what starts
fast: hundreds of agents start at once (``python -I -S agent.py``).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    Message = dict[str, Any]

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

TRIES = 5
#: Seconds before the second try of a model call; doubled each time.
BACKOFF = 0.2
#: Too many requests, a gateway without its upstream, a gateway that is switched off: all may pass.
PASSING_STATUS = frozenset({429, 500, 502, 503, 504})
#: The rollout has had its turns, or was cancelled.
NO_MORE_TURNS = 409

_WRITTEN_CALL = re.compile(r"^\s*CALL:[ \t]*(\S.*?)\s*$", re.MULTILINE)


class ModelError(Exception):
    """The model cannot be had: unreachable after several tries, or it refuses the request."""


class NoMoreTurns(Exception):  # noqa: N818 - an end, not an error
    """The gateway takes no more calls of this rollout."""


# -- the loop ----------------------------------------------------------------------------------------------------------


def solve(model: ChatModel, task: Mapping[str, Any]) -> str:
    """Work on ``task`` until the model answers without a tool call, or its turns are spent; returns the last words."""
    messages: list[Message] = list(task["messages"])
    answer = ""
    for _ in range(int(task["max_turns"])):
        try:
            message = model.complete(messages, [CALCULATOR])
        except NoMoreTurns as end:
            print(f"agent: {end}", file=sys.stderr)
            break
        answer = message["content"] or answer
        messages.append(message)
        results = tool_results(message)
        if not results:
            break
        messages += results
    return answer


def tool_results(message: Message) -> list[Message]:
    """Carry out the tool calls of the assistant's ``message``.

    A model that knows no tool calls may write one as a line ``CALL: expression``; it is answered in kind.
    """
    calls = message.get("tool_calls")
    if calls:
        return [{"role": "tool", "tool_call_id": call["id"], "content": run_tool(call["function"])} for call in calls]
    written = _WRITTEN_CALL.search(message["content"])
    if written and "ANSWER:" not in message["content"]:
        return [{"role": "user", "content": f"RESULT: {evaluate(written.group(1))}"}]
    return []


def run_tool(function: Mapping[str, Any]) -> str:
    """Run one tool call; whatever the model got wrong becomes an error that it can read."""
    if function["name"] != "calculator":
        return f"error: there is no tool {function['name']!r}"
    arguments = json.loads(function["arguments"])
    expression = arguments.get("expression")
    return evaluate(expression) if isinstance(expression, str) else "error: give the expression as a string"


# -- the calculator ----------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(\d+\.\d*|\.\d+|\d+|//|[-+*/%()])")
_LONGEST = 200


def evaluate(expression: str) -> str:
    """Return the value of an arithmetic expression (``+ - * / // %`` and parentheses), or ``error: ...``."""
    if len(expression) > _LONGEST:
        return f"error: the expression is longer than {_LONGEST} characters"
    try:
        calculation = _Calculation(expression)
        value = calculation.sum()
        calculation.expect_end()
        return _shown(value)
    except ArithmeticError as error:
        return f"error: {error}"
    except ValueError as error:
        return f"error: {error}"


def _shown(value: float) -> str:
    if isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) < 1e15 else round(value, 10)
    return str(value)


class _Calculation:
    """A recursive descent over the tokens of one expression; nothing of it is ever run as code."""

    def __init__(self, expression: str) -> None:
        self.tokens: list[str] = []
        text = expression.replace("\u00d7", "*").replace("\u00f7", "/").rstrip().rstrip("=").rstrip()
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if not match:
                raise ValueError(f"cannot read {text[position:].strip()!r}")
            self.tokens.append(match.group(1))
            position = match.end()
        self.tokens.reverse()

    def take(self, *wanted: str) -> str | None:
        """Take the next token if it is one of ``wanted``."""
        return self.tokens.pop() if self.tokens and self.tokens[-1] in wanted else None

    def expect_end(self) -> None:
        """Raise ValueError if anything is left over."""
        if self.tokens:
            raise ValueError(f"did not expect {self.tokens[-1]!r}")

    def sum(self) -> float:
        """Read terms that are added and subtracted."""
        value = self.product()
        while operator := self.take("+", "-"):
            other = self.product()
            value = value + other if operator == "+" else value - other
        return value

    def product(self) -> float:
        """Read factors that are multiplied and divided."""
        value = self.factor()
        while operator := self.take("*", "/", "//", "%"):
            other = self.factor()
            if operator == "*":
                value = value * other
            elif operator == "/":
                value = value / other
            else:
                value = value // other if operator == "//" else value % other
        return value

    def factor(self) -> float:
        """Read a number, a negated factor, or a sum in parentheses."""
        if self.take("-"):
            return -self.factor()
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        if not self.tokens or self.tokens[-1] in "+*///%)":
            raise ValueError("a number is missing")
        token = self.tokens.pop()
        return float(token) if "." in token else int(token)


# -- the model ---------------------------------------------------------------------------------------------------------


class ChatModel:
    """An OpenAI-compatible chat endpoint, asked over one kept-alive connection."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        base = urlsplit(environment["OPENAI_BASE_URL"].rstrip("/"))
        if base.scheme not in {"http", "https"} or not base.hostname:
            raise ValueError(f"OPENAI_BASE_URL is {base.geturl()!r}; expected an http(s) URL")
        self.path = base.path + "/chat/completions"
        self.where = f"{base.scheme}://{base.netloc}{self.path}"
        self.model = environment["OPENAI_MODEL"]
        self.stream = environment.get("DEMO_STREAM") == "1"
        self.backoff = float(environment.get("DEMO_BACKOFF", BACKOFF))
        self.headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {environment.get('OPENAI_API_KEY', '')}",
        }
        timeout = float(environment.get("OPENAI_TIMEOUT", "600"))
        kind = HTTPSConnection if base.scheme == "https" else HTTPConnection
        self.connection = kind(base.hostname, base.port, timeout=timeout)

    def complete(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Return the assistant's next message.

        Raises `NoMoreTurns` when the rollout has had its turns, `ModelError` when the model refuses or stays away.
        """
        body = {"model": self.model, "messages": messages, "tools": tools, "stream": self.stream}
        payload = json.dumps(body).encode()
        trouble = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                return self._ask(payload)
            except (OSError, HTTPException) as error:
                trouble = f"{type(error).__name__}: {error}"
                self.connection.close()
        raise ModelError(f"cannot reach the model at {self.where} in {TRIES} tries: {trouble}")

    def _ask(self, payload: bytes) -> Message:
        self.connection.request("POST", self.path, payload, self.headers)
        response = self.connection.getresponse()
        if response.status != 200:
            self._refuse(response.status, response.read(4000).decode(errors="replace"))
        if "text/event-stream" in response.headers.get("Content-Type", ""):
            return clean_message(join_stream(response))
        return clean_message(json.loads(response.read())["choices"][0]["message"])

    def _refuse(self, status: int, words: str) -> None:
        self.connection.close()
        if status == NO_MORE_TURNS:
            raise NoMoreTurns(f"the model takes no more calls (409): {words}")
        if status in PASSING_STATUS:
            raise HTTPException(f"HTTP {status}: {words}")
        raise ModelError(f"{self.where} refuses the request with HTTP {status}: {words}")


def clean_message(message: Message) -> Message:
    """Keep what may be sent back of an assistant's message; arguments that are no JSON object become an empty one."""
    clean: Message = {"role": "assistant", "content": message.get("content") or ""}
    calls = []
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        arguments = function.get("arguments") or "{}"
        kept = {"name": function.get("name") or "unknown", "arguments": arguments if _is_object(arguments) else "{}"}
        calls.append({"id": call.get("id") or f"call_{number}", "type": "function", "function": kept})
    return clean | {"tool_calls": calls} if calls else clean


def _is_object(text: object) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        return False


def join_stream(response: HTTPResponse) -> Message:
    """Put a streamed message together; raises `HTTPException` when the stream breaks off or carries an error."""
    content = ""
    calls: dict[int, Message] = {}
    for event in _events(response):
        if "error" in event:
            raise HTTPException(f"the stream carries an error: {json.dumps(event['error'])[:500]}")
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                _add_call(calls, part)
    return {"content": content, "tool_calls": [calls[index] for index in sorted(calls)]}


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            response.read()  # to the end, so that the connection can be used again
            return
        yield json.loads(data)
    raise HTTPException("the stream broke off before [DONE]")


def _add_call(calls: dict[int, Message], part: Mapping[str, Any]) -> None:
    call = calls.setdefault(part.get("index") or 0, {"id": None, "function": {"name": "", "arguments": ""}})
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def main() -> int:
    """Work on the task in the working directory; returns the exit status."""
    try:
        with open("task.json", encoding="utf-8") as file:
            task = json.load(file)
        model = ChatModel(os.environ)
    except (OSError, ValueError, KeyError) as error:
        print(f"agent: cannot start: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    try:
        answer = solve(model, task)
    except (ModelError, ValueError, LookupError) as error:
        print(f"agent: {error or type(error).__name__}", file=sys.stderr)
        return 1
    with open("answer.txt", "w", encoding="utf-8") as file:
        file.write(answer)
    print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
