"""The demo's environment: small calculations told as stories, set up in the sandbox, scored by the answer."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import orjson

from producer.contract import Deadlines, RolloutRequest
from workers.demo import STAND_IN, agent, llm
from workers.environment import Environment
from workers.errors import InvalidRolloutError
from workers.state import Rollout

ENVIRONMENT_NAME = "demo"
#: The entry of the worker's allow-list that makes this environment known.
ENVIRONMENT_TARGET = "workers.demo.environment:DemoEnvironment"
#: Model calls that the agent makes at most; the longest task needs five.
AGENT_TURNS = 8

INSTRUCTIONS = (
    "Work out the formula. Use the calculator tool for each operation, one at a time. "
    "End with a line of the form ANSWER: number"
)

#: Stories and the formulas that answer them.
TASKS = (
    ("A baker fills 12 boxes with 6 rolls each and has 9 rolls left. How many rolls are there?", "12 * 6 + 9"),
    ("Anna had 25 apples, gave away 7 and bought 18. How many has she now?", "25 - 7 + 18"),
    ("A train of 8 coaches has 54 seats in each; 37 are taken. How many are free?", "8 * 54 - 37"),
    ("Three friends share a bill of 96 and each adds 4 for the waiter. What does each pay?", "96 / 3 + 4"),
    ("A garden is 14 long and 9 wide. How long is the fence around it?", "(14 + 9) * 2"),
    ("A library lends 45 books on each of 6 days and gets 198 back. How many are out?", "45 * 6 - 198"),
    ("A tank of 500 loses 35 an hour. How much is in it after 7 hours?", "500 - 35 * 7"),
    ("Two classes of 28 and 31 pupils form teams, and 4 stay out. How many play?", "28 + 31 - 4"),
    (
        "A film of 134 minutes starts 15 minutes late, with a break of 20. How long does the evening take?",
        "134 + 15 + 20",
    ),
    ("A farmer packs 144 eggs in cartons of 12 and sells each for 5. What does she earn?", "144 / 12 * 5"),
    ("A runner does 4 laps of 400 and then 250 more. How far is that?", "4 * 400 + 250"),
    ("Of 90 tickets 17 are free; the others cost 8. What comes in?", "(90 - 17) * 8"),
    ("A shelf holds 7 rows of 15 jars; 3 rows are empty. How many jars stand on it?", "(7 - 3) * 15"),
    ("A worker earns 21 an hour for 38 hours, less 120 of tax. What is left?", "21 * 38 - 120"),
    ("A hiker walks 16 on each of 5 days and takes a bus for 33. How far does he get?", "16 * 5 + 33"),
    ("A shop sells 23 pens at 3 and 11 books at 14. What does it take in?", "23 * 3 + 11 * 14"),
)

_ANSWER = re.compile(r"ANSWER:\s*(-?[\d,]*\.?\d+)")
_AGENT_SOURCE = Path(agent.__file__)


class DemoEnvironment(Environment):
    """Gives the demo's agent its task, and compares the number that it answers with the right one."""

    def run_command(self, request: RolloutRequest) -> str:
        """Return the line that starts the agent: this worker's Python if the sandbox has it, else the sandbox's own."""
        if request.run_command:
            return request.run_command
        return f'exec "$(command -v {shlex.quote(sys.executable)} || command -v python3)" -I -S agent.py'

    async def setup(self, rollout: Rollout) -> None:
        """Upload the agent, its task, and an empty answer, so that a missing answer is a low score and no error."""
        if rollout.sandbox is None:
            raise InvalidRolloutError("the demo's environment needs a sandbox")
        task = {"messages": rollout.request.messages, "max_turns": AGENT_TURNS}
        await rollout.sandbox.upload_bytes("task.json", orjson.dumps(task))
        await rollout.sandbox.upload_bytes("answer.txt", b"")
        await rollout.sandbox.upload_file("agent.py", _AGENT_SOURCE)

    async def score(self, rollout: Rollout) -> dict[str, float]:
        """Return ``reward`` 1 for the right number, else 0, and ``format`` 1 when an answer has the asked-for form."""
        if rollout.sandbox is None:
            raise InvalidRolloutError("the demo's environment needs a sandbox")
        written = await rollout.sandbox.download("answer.txt")
        return grade(written.decode(errors="replace"), rollout.request.answer)


def grade(written: str, expected: Any) -> dict[str, float]:
    """Compare the last ``ANSWER: number`` in ``written`` with ``expected``, a number or its text."""
    found = _ANSWER.findall(written)
    if not found:
        return {"reward": 0.0, "format": 0.0}
    right = abs(float(found[-1].replace(",", "")) - float(expected)) < 1e-6
    return {"reward": float(right), "format": 1.0}


def demo_requests(
    samples: int = 4,
    *,
    model_name: str = STAND_IN,
    sampling_params: dict[str, Any] | None = None,
    stream: bool | None = None,
    **fields: Any,
) -> list[RolloutRequest]:
    """Return ``samples`` requests for each of the 16 tasks, the same ones each time but for their rollout ids.

    Each sample has another ``seed``, and every other one streams unless ``stream`` says which. ``fields`` are set on
    every request, such as ``batch_id`` or ``gateway_url``.
    """
    requests = []
    for number, (story, formula) in enumerate(TASKS):
        for sample in range(samples):
            streams = sample % 2 == 1 if stream is None else stream
            common: dict[str, Any] = {
                "environment": ENVIRONMENT_NAME,
                "example_id": f"demo-{number:02}",
                "group_id": f"demo-{number:02}",
                "sample_index": sample,
                "prompt": [
                    {"role": "system", "content": INSTRUCTIONS},
                    {"role": "user", "content": f"{story}\nFormula: {formula}"},
                ],
                "answer": agent.evaluate(formula),
                "model": model_name,
                "sampling_params": {"temperature": 1.0, "seed": sample} | (sampling_params or {}),
                "env": {"DEMO_STREAM": "1"} if streams else {},
                "deadlines": Deadlines(agent=300),
            }
            requests.append(RolloutRequest.parse(common | fields))
    return requests


def llm_requests(samples: int = 4, **fields: Any) -> list[RolloutRequest]:
    """Return the demo's requests for the small real model: short answers of one line, not streamed.

    llama.cpp refuses ``logprobs`` together with tools and a stream.
    """
    return demo_requests(
        samples, model_name=llm.MODEL_NAME, sampling_params=llm.SAMPLING_PARAMS, stream=False, **fields
    )
