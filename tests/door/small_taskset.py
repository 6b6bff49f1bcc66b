"""A small taskset of verifiers' with a harness that needs no installation: questions to a model, some turns each.

The reward is a number made of what the model said, so that equal rewards mean equal conversations. A task whose data
name a folder notes its start there, and waits between two turns until the folder has a file ``go``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.runtimes import ProgramResult

TURNS = 3


class SmallData(vf.TaskData):
    question: str = ""
    seed: int = 0
    turns: int = TURNS
    gate: str = ""


class SmallTask(vf.Task[SmallData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        words = "".join(str(node.message.content) for node in trace.nodes if node.sampled)
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:3], "big") / 2**24


class SmallTaskset(vf.Taskset[SmallTask, TasksetConfig]):
    def load(self) -> Iterable[SmallTask]:
        for number in range(200):
            yield SmallTask(data(number), self.config.task)


def data(number: int, **fields: object) -> SmallData:
    question = f"What is it?\nFormula: {number} * 7 + {number % 5}"
    return SmallData(idx=number, prompt=question, question=question, seed=number, **fields)


class SmallHarness(vf.Harness[HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **rest) -> ProgramResult:  # type: ignore[no-untyped-def]
        messages = [{"role": "user", "content": data.question}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for turn in range(data.turns):
                if data.gate and turn == 1:
                    await _wait(Path(data.gate))
                body = {"model": ctx.model, "messages": messages, "seed": data.seed, "temperature": 1.0}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
                messages.append({"role": "user", "content": f"{data.question}\nOnce more, please: turn {turn}"})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _wait(gate: Path) -> None:
    with (gate / "started").open("a") as file:
        file.write(f"{os.getpid()}\n")
    try:
        while not (gate / "go").exists():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        (gate / "cancelled").touch()
        raise


__all__ = ["SmallHarness", "SmallTaskset"]
