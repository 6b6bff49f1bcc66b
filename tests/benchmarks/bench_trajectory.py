"""What a long trajectory takes in Redis, of its JSON's bytes, and how long it takes to encode and to decode."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import orjson
from harness import finish, report

from producer import RolloutRequest, RolloutResult, StopCondition, broker

TURNS, TOKENS, ROUNDS = 50, 32_000, 9


def trajectory() -> list[dict[str, Any]]:
    """Return 50 turns whose prompt grows to 32k tokens: random ids, random log-probabilities, words for the text."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(4000)]
    grown: list[int] = []
    messages: list[dict[str, Any]] = []
    steps = []
    for turn in range(TURNS):
        fresh = TOKENS // TURNS // 2
        grown += chance.choices(range(150_000), k=fresh)
        messages = [*messages, {"role": "user", "content": " ".join(chance.choices(words, k=fresh))}]
        completion = chance.choices(range(150_000), k=fresh)
        answer = {"role": "assistant", "content": " ".join(chance.choices(words, k=fresh))}
        tokens = {
            "prompt_ids": list(grown),
            "prompt_mask": [0] * len(grown),
            "completion_ids": completion,
            "completion_mask": [1] * fresh,
            "completion_logprobs": [-chance.expovariate(2) for _ in range(fresh)],
            "overlong_prompt": False,
            "is_truncated": False,
            "routed_experts": None,
        }
        steps.append(
            {
                **{
                    "prompt": list(messages),
                    "completion": [answer],
                    "tokens": tokens,
                    "reward": None,
                    "advantage": None,
                },
                **{"is_truncated": False, "trajectory_id": "t", "extras": {"turn": turn}},
            }
        )
        grown += completion
        messages = [*messages, answer]
    return steps


def main() -> None:
    """Encode it as a worker's result backend does."""
    request = RolloutRequest(model="m", rollout_id="r")
    result = RolloutResult.for_request(request, StopCondition.COMPLETED, trajectory=trajectory())
    meta = {"status": "SUCCESS", "result": result, "traceback": None, "children": [], "task_id": "r"}
    plain = orjson.dumps(meta | {"result": result.model_dump(mode="json")})
    encoding, decoding = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        data = broker.encode_result(meta)
        encoding.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert len(broker.decode_result(data)["result"]["trajectory"]) == TURNS
        decoding.append(time.perf_counter() - began)
    report(
        "trajectory",
        required={"percent": ("<=", 6), "encode_ms": ("<=", 40)},
        turns=TURNS,
        tokens=TOKENS,
        json_bytes=len(plain),
        stored_bytes=len(data),
        percent=100 * len(data) / len(plain),
        encode_ms=1000 * statistics.median(encoding),
        encode_ms_min=1000 * min(encoding),
        decode_ms=1000 * statistics.median(decoding),
    )


if __name__ == "__main__":
    main()
    finish()
