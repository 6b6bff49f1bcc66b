"""What a registered rollout of 50 turns at 32k tokens takes in the gateway's memory."""

from __future__ import annotations

import random
from typing import Any

import orjson
import psutil

from workers.gateway.protocol import Registration
from workers.gateway.server.recorder import Recorder
from workers.gateway.server.turns import Answered, Payload

TURNS, LENGTH = 50, 32_000
SAMPLED = 200


def rollouts(count: int) -> dict[str, Any]:
    """Record ``count`` rollouts and return their bytes, and those that they cannot lack."""
    recorder, process = Recorder(), psutil.Process()
    fill(recorder, "warm", 0)
    recorder.unregister("warm")
    before = process.memory_info().rss
    answers = sum(fill(recorder, f"r-{n}", n) for n in range(count))
    used = process.memory_info().rss - before
    return {
        "rollouts": count,
        "turns": TURNS,
        "tokens_at_end": LENGTH,
        "kb_per_rollout": round(used / count / 1000, 1),
        "kb_of_tokens": round((4 * LENGTH + 8 * TURNS * SAMPLED) / 1000, 1),
        "kb_of_text": round(4 * LENGTH / 1000, 1),
        "kb_of_answers_as_they_came": round(answers / count / 1000, 1),
    }


def fill(recorder: Recorder, rollout_id: str, seed: int) -> int:
    """Record one rollout turn by turn; return the bytes of the answers that were read."""
    numbers = random.Random(seed)
    rollout = recorder.register(rollout_id, Registration(model="m"), None)
    new = LENGTH // TURNS - SAMPLED
    ids: list[int] = []
    messages: list[dict[str, Any]] = []
    size = 0
    for turn in range(TURNS):
        ids += [numbers.randrange(150_000) for _ in range(new)]
        messages.append({"role": "user" if turn else "system", "content": text(numbers, new)})
        sampled = [numbers.randrange(150_000) for _ in range(SAMPLED)]
        message = {"role": "assistant", "content": text(numbers, SAMPLED)}
        entries = [{"token": " t", "logprob": -numbers.random(), "bytes": [32], "top_logprobs": []} for _ in sampled]
        choice = {"index": 0, "message": message, "logprobs": {"content": entries}, "token_ids": sampled}
        answer = orjson.dumps({"choices": [choice | {"finish_reason": "stop"}], "prompt_token_ids": ids})
        size += len(answer)
        parsed = orjson.loads(orjson.dumps(messages))  # as they come: with no object of an earlier call in it
        rollout.record(Answered(parsed, Payload.of(answer), {}, size=len(answer)))
        rollout.settle()
        ids += sampled
        messages.append(message)
    return size


def text(numbers: random.Random, tokens: int) -> str:
    """Return about four characters a token."""
    return "".join(numbers.choices("abcdefgh ", k=4 * tokens))
