"""A small agent: a model with a shell, until the task is done. One file, Python 3.8 or newer, standard library only.

    python3 shell_agent.py INSTRUCTION_FILE

It talks OpenAI's chat completions, one call a turn, to ``OPENAI_BASE_URL`` with ``OPENAI_API_KEY`` and
``OPENAI_MODEL``. The model has two tools: ``shell`` runs a command in the working directory, and ``done`` ends. It also
ends when the model calls no tool, after ``SHELL_AGENT_TURNS`` turns (200), or when the rollout's turns are spent (409).
A command has ``SHELL_AGENT_COMMAND_TIMEOUT`` seconds (300; the model may ask for less), and what the model gets of its
output is ``SHELL_AGENT_OUTPUT`` bytes (16,384), half head and half tail. Calls that fail for a reason that may pass are
made again for ``SHELL_AGENT_PATIENCE`` seconds (600): a tunnel or a gateway may be restarting.

Exit status: 0 at the end, 1 when the model cannot be had, 2 on a bad start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO, Any

    Message = dict[str, Any]

SYSTEM = (
    "You work on a task in a Linux sandbox. Use the tool `shell` to run commands: each one starts anew in the working "
    "directory, without a terminal and without input. Look before you change something, and check your work. "
    "Nobody answers questions. When the task is done, call `done`."
)


def _tool(name: str, description: str, required: list[str], **properties: Mapping[str, Any]) -> Message:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool(
        "shell",
        "Runs a shell command and returns its exit status and output.",
        ["command"],
        command={"type": "string", "description": "The command, for bash."},
        timeout={"type": "number", "description": "Seconds after which it is killed."},
    ),
    _tool("done", "Ends the work on the task.", [], summary={"type": "string", "description": "What was done."}),
]

#: Requests that took too long or were too many, and servers in trouble or on their way back.
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
#: The rollout has had its turns, or was cancelled.
NO_MORE_TURNS = 409
FIRST_DELAY, LONGEST_DELAY = 0.25, 15.0
#: How many bytes of a failed call's answer are shown.
SHOWN = 500
#: Seconds in which a command that was told to end may do so.
GRACE = 2.0


class ModelError(Exception):
    """The model cannot be had: out of reach for too long, or it refuses the request."""


class NoMoreTurns(Exception):  # noqa: N818 - an end, not an error
    """The gateway takes no more calls of this rollout."""


class PassingError(Exception):
    """A call failed for a reason that may pass."""


class Settings:
    """What the environment says; see the module."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.url = environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
        self.model = environ["OPENAI_MODEL"]
        self.key = environ.get("OPENAI_API_KEY", "")
        self.call_timeout = float(environ.get("OPENAI_TIMEOUT", "600"))
        self.turns = int(environ.get("SHELL_AGENT_TURNS", "200"))
        self.command_timeout = float(environ.get("SHELL_AGENT_COMMAND_TIMEOUT", "300"))
        self.output = int(environ.get("SHELL_AGENT_OUTPUT", "16384"))
        self.patience = float(environ.get("SHELL_AGENT_PATIENCE", "600"))


# -- the loop ----------------------------------------------------------------------------------------------------------


def work(settings: Settings, instruction: str) -> None:
    """Let the model work on ``instruction`` until it is done; raises `ModelError`."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    for turn in range(1, settings.turns + 1):
        try:
            message = complete(settings, messages)
        except NoMoreTurns as end:
            say(f"[{turn}] the gateway takes no more calls: {end}")
            return
        if message.get("content"):
            say(f"[{turn}] {message['content']}")
        calls = message.get("tool_calls") or []
        messages.append(message)
        results = [result_of(settings, turn, call) for call in calls]
        messages += results
        if not calls or any(call["function"].get("name") == "done" for call in calls):
            return
    say(f"ended after {settings.turns} turns")


def result_of(settings: Settings, turn: int, call: Mapping[str, Any]) -> Message:
    """Carry out one tool call; what the model got wrong becomes an error that it can read."""
    function = call["function"]
    name = function.get("name")
    try:
        content = run_tool(settings, turn, name, dict(json.loads(function.get("arguments") or "{}")))
    except (ValueError, TypeError) as error:
        content = f"error: the arguments of {name!r} do not fit: {error}"
    return {"role": "tool", "tool_call_id": call.get("id"), "content": content}


def run_tool(settings: Settings, turn: int, name: object, arguments: Mapping[str, Any]) -> str:
    """Run the tool ``name``; raises ValueError when its arguments are wrong."""
    if name == "done":
        say(f"[{turn}] done: {arguments.get('summary') or ''}")
        return "ended"
    if name != "shell":
        return f"error: there is no tool {name!r}; there are shell and done"
    command = arguments.get("command")
    if not isinstance(command, str) or not command.strip() or "\0" in command:
        raise ValueError("command: expected a non-empty string")
    timeout = min(float(arguments.get("timeout") or settings.command_timeout), settings.command_timeout)
    say(f"[{turn}] $ {command}")
    answer = run_command(command, timeout, settings.output)
    say(answer)
    return answer


def say(text: str) -> None:
    """Print a step."""
    print(text, flush=True)


# -- the shell ---------------------------------------------------------------------------------------------------------


def run_command(command: str, timeout: float, limit: int) -> str:
    """Return the exit status and the output of ``command``, cut to ``limit`` bytes.

    The output goes to a file: a pipe would wait for whatever the command leaves running in the background.
    """
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - what it is for
                [shell, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # longer than the kernel takes
            return f"error: the command cannot be started: {error.strerror}"
        try:
            status = f"exit status {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            end_group(process)
            status = f"killed after {timeout:g} seconds"
        return f"{status}\n{ends_of(output, limit)}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process group of a command, gently at first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    process.wait()


def ends_of(output: IO[bytes], limit: int) -> str:
    """Return the text of ``output``, or its head and its tail with the cut marked."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= limit:
        return output.read(limit).decode("utf-8", "replace")
    half = limit // 2
    head = output.read(half).decode("utf-8", "replace")
    output.seek(size - half)
    tail = output.read(half).decode("utf-8", "replace")
    return f"{head}\n... [{size - 2 * half} bytes cut] ...\n{tail}"


# -- the model ---------------------------------------------------------------------------------------------------------


def complete(settings: Settings, messages: list[Message]) -> Message:
    """Return the model's next message; raises `ModelError` and `NoMoreTurns`."""
    body = json.dumps({"model": settings.model, "messages": messages, "tools": TOOLS}).encode()
    delay = FIRST_DELAY
    deadline = time.monotonic() + settings.patience
    while True:
        try:
            return message_in(call(settings, body))
        except PassingError as error:
            if time.monotonic() + delay > deadline:
                raise ModelError(f"{error}; no more tries after {settings.patience:g} s") from error
            print(f"shell_agent: {error}; trying again in {delay:g} s", file=sys.stderr, flush=True)
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)


def call(settings: Settings, body: bytes) -> bytes:
    """Make one call and return the answer's body; raises `PassingError`, `ModelError` and `NoMoreTurns`."""
    headers = {"Authorization": "Bearer " + settings.key, "Content-Type": "application/json"}
    request = urllib.request.Request(settings.url, body, headers)  # noqa: S310 - the URL is the operator's
    try:
        with urllib.request.urlopen(request, timeout=settings.call_timeout) as response:  # noqa: S310
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            raise refusal(error.code, error.headers.get_content_type(), error.read(SHOWN)) from None
    except (OSError, HTTPException) as error:  # URLError is an OSError
        raise PassingError(f"the call failed: {type(error).__name__}: {error}") from None


def refusal(status: int, content_type: str, body: bytes) -> Exception:
    """Return what an answer with an error's status amounts to."""
    text = f"HTTP {status}: {body.decode('utf-8', 'replace').strip()}"
    if status == NO_MORE_TURNS:
        return NoMoreTurns(text)
    # A tunnel that is being restarted answers 404 with a page of its own; the gateway's is JSON.
    if status in PASSING_STATUS or (status == 404 and "json" not in content_type):
        return PassingError(text)
    return ModelError(text)


def message_in(content: bytes) -> Message:
    """Return the assistant's message in an answer, with what the next request needs of it."""
    try:
        found = json.loads(content)["choices"][0]["message"]
        message: Message = {"role": "assistant", "content": found.get("content") or ""}
        if found.get("tool_calls"):
            message["tool_calls"] = [dict(call, function=dict(call["function"])) for call in found["tool_calls"]]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise PassingError(f"the answer is no chat completion: {content[:SHOWN]!r}") from None
    return message


def main(arguments: list[str]) -> int:
    """Work on the task in the file that is named; returns the exit status."""
    try:
        with open(arguments[0], encoding="utf-8") as file:
            instruction = file.read()
        settings = Settings(os.environ)
    except (OSError, ValueError, LookupError) as error:
        print(f"shell_agent: cannot start: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    try:
        work(settings, instruction)
    except ModelError as error:
        print(f"shell_agent: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
