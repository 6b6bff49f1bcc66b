"""Joining the small real model's file, and, where its extra is installed, the agent working with it."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import free_port, wait_until

from workers.demo import llm


def write_parts(folder: Path) -> tuple[list[Path], str]:
    parts = [folder / f"model.part{number}" for number in range(4)]
    for number, part in enumerate(parts):
        part.write_bytes(bytes([number]) * 1000)
    return parts, hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    parts, digest = write_parts(tmp_path)

    llm.join_parts(parts, tmp_path / "model.gguf", digest)

    assert (tmp_path / "model.gguf").read_bytes() == b"".join(part.read_bytes() for part in parts)


def test_damaged_parts_leave_no_file(tmp_path: Path) -> None:
    parts, digest = write_parts(tmp_path)
    parts[2].write_bytes(b"x" * 1000)

    with pytest.raises(llm.LlmUnavailableError, match="damaged"):
        llm.join_parts(parts, tmp_path / "model.gguf", digest)

    assert sorted(tmp_path.iterdir()) == parts


@pytest.mark.skipif(find_spec("xllamacpp") is not None, reason="the extra llm is installed")
def test_a_missing_extra_is_named_with_what_to_install() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "workers.demo.llm", "--port", "1"], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert "pip install 'rollout-fleet[llm]'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the extra llm is not installed")
def test_the_real_model_gives_tokens_and_the_agent_copes_with_it(run_agent: Any) -> None:
    port = free_port()
    base, key = f"http://127.0.0.1:{port}", "secret"
    command = [sys.executable, "-m", "workers.demo.llm", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"LLAMA_API_KEY": key})

    def answers() -> bool:
        assert process.poll() is None, "the model's server has ended"
        try:
            return httpx.get(f"{base}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, 60, "the model")
        body = {"messages": [{"role": "user", "content": "Formula: 2 + 3"}], "logprobs": True, "seed": 1}
        refused = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=20)
        reply = httpx.post(
            f"{base}/v1/chat/completions",
            json=body | llm.SAMPLING_PARAMS,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        ).json()
        ran = run_agent(f"{base}/v1", "How many? Formula: 12 * 6 + 9", OPENAI_API_KEY=key, max_turns=2)
    finally:
        process.terminate()

    assert refused.status_code == 401
    entries = reply["choices"][0]["logprobs"]["content"]
    assert entries
    assert all(isinstance(entry["id"], int) and math.isfinite(entry["logprob"]) for entry in entries)
    assert ran.code == 0
    assert process.wait(20) == 0
