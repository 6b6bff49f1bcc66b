"""The columns of results in Parquet: one row for each rollout, and back.

What a trainer computes with has columns of its own. Token columns have one inner list for each step of the trajectory
(null for a step without tokens, as long as the trajectory is): ``prompt_ids``, ``prompt_mask``, ``completion_ids``,
``completion_mask``, ``completion_logprobs``. What has no fixed form is JSON, in columns that end in ``_json``:
``trajectory_json`` holds the steps without those lists. ``rest_json`` has the fields without a column. So a row read
back is the whole result; only logprobs are rounded, to the 32 bits in which model servers compute them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from producer.contract import Phase
from producer.files.errors import ResultsFileError, arrow

VERSION = b"1"
VERSION_KEY = b"rollout_fleet.schema_version"

_PLAIN = {
    "rollout_id": "string",
    "batch_id": "string",
    "example_id": "string",
    "group_id": "string",
    "sample_index": "int32",
    "policy_version": "int64",
    "environment": "string",
    "model": "string",
    "stop_condition": "string",
    "reward": "float64",
    "is_truncated": "bool",
    "agent_completed": "bool",
    "agent_exit_code": "int32",
    "agent_timed_out": "bool",
    "agent_stdout": "string",
    "agent_stderr": "string",
    "attempt": "int32",
    "worker": "string",
}
_TIMING = ("start_time", "generation_ms", "scoring_ms", "total_ms")
_ERROR = ("error_kind", "error_type", "error_message")
_COUNTS = ("num_turns", "prompt_tokens", "completion_tokens")
_TOKENS = {
    "prompt_ids": "int32",
    "prompt_mask": "int8",
    "completion_ids": "int32",
    "completion_mask": "int8",
    "completion_logprobs": "float32",
}
_JSON = ("metrics", "answer", "info", "error", "prompt", "completion", "failed_attempts", "trajectory", "rest")
#: Columns of few distinct values. Others are not encoded so: packed into bits, the tokens that each step repeats from
#: the one before would no longer look alike to the compressor.
DICTIONARY = ["batch_id", "environment", "model", "stop_condition", "worker", *_ERROR[:2]]

#: What a row of a listing is made of.
BRIEF_COLUMNS = [
    *("rollout_id", "example_id", "sample_index", "stop_condition", "reward", "durations", "warnings"),
    *_ERROR,
    *_COUNTS,
    *_TIMING,
]


def arrow_schema() -> Any:
    """Return the schema; raises `ResultsFileError` without pyarrow."""
    pa = arrow("pyarrow", ResultsFileError)
    kinds = {name: pa.type_for_alias(kind) for name, kind in _PLAIN.items()}
    kinds |= dict.fromkeys(_ERROR, pa.string())
    kinds |= dict.fromkeys(_TIMING, pa.float64())
    kinds["durations"] = pa.struct([(phase.value, pa.float64()) for phase in Phase])
    kinds["warnings"] = pa.list_(pa.string())
    kinds |= dict.fromkeys(_COUNTS, pa.int64())
    kinds |= {name: pa.list_(pa.list_(pa.type_for_alias(kind))) for name, kind in _TOKENS.items()}
    kinds |= {f"{name}_json": pa.string() for name in _JSON}
    return pa.schema(list(kinds.items()), metadata={VERSION_KEY: VERSION})


def to_table(lines: Iterable[bytes]) -> Any:
    """Turn results, each as JSON, into a table of the schema."""
    return arrow("pyarrow", ResultsFileError).Table.from_pylist(
        [_to_row(line) for line in lines], schema=arrow_schema()
    )


def from_row(row: dict[str, Any]) -> dict[str, Any]:
    """Turn a row back into a result's fields; raises `ValueError` or `TypeError` for one that we did not write."""
    read = {name: orjson.loads(row[f"{name}_json"]) for name in _JSON if row[f"{name}_json"] is not None}
    rest: dict[str, Any] = read.pop("rest", {})
    result: dict[str, Any] = {name: row[name] for name in _PLAIN} | read
    result["timing"] = {name: row[name] for name in _TIMING if row[name] is not None}
    result["durations"] = {name: value for name, value in (row["durations"] or {}).items() if value is not None}
    result["durations"] |= rest.pop("durations", {})
    result["warnings"] = row["warnings"] or []
    for number, step in enumerate(result.setdefault("trajectory", [])):
        for name in _TOKENS:
            values = (row[name] or [])[number : number + 1]
            if values and values[0] is not None:
                step["tokens"] = (step.get("tokens") or {}) | {name: values[0]}
    return result | rest


def _to_row(line: bytes) -> dict[str, Any]:
    result = orjson.loads(line)
    row = {name: result.pop(name, None) for name in _PLAIN}
    rest: dict[str, Any] = {}
    if not isinstance(row["example_id"], str):
        rest["example_id"], row["example_id"] = row["example_id"], str(row["example_id"])
    timing, durations = result.pop("timing", None) or {}, result.pop("durations", None) or {}
    row |= {name: timing.get(name) for name in _TIMING}
    phases = {phase.value for phase in Phase}
    row["durations"] = {name: seconds for name, seconds in durations.items() if name in phases}
    if other := {name: seconds for name, seconds in durations.items() if name not in phases}:
        rest["durations"] = other
    row["warnings"] = result.pop("warnings", None) or []
    error = result.get("error") or {}
    row |= {name: error.get(name.removeprefix("error_")) for name in _ERROR}
    row |= _tokens(result.get("trajectory") or [])
    for name in _JSON[:-1]:
        value = result.pop(name, None)
        row[f"{name}_json"] = None if value is None else orjson.dumps(value).decode()
    row["rest_json"] = orjson.dumps(rest | result).decode()
    return row


def _tokens(trajectory: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the lists of tokens out of the steps; what is not as it should be stays with them."""
    lists: dict[str, list[Any]] = {name: [] for name in _TOKENS}
    for step in trajectory:
        tokens = step.get("tokens")
        for name, kind in _TOKENS.items():
            fits = isinstance(tokens, dict) and _fits(tokens.get(name), kind)
            lists[name].append(tokens.pop(name) if fits and tokens else None)
    return lists | {
        "num_turns": len(trajectory),
        "prompt_tokens": sum(len(ids or ()) for ids in lists["prompt_ids"]),
        "completion_tokens": sum(len(ids or ()) for ids in lists["completion_ids"]),
    }


def _fits(values: Any, kind: str) -> bool:
    if not isinstance(values, list):
        return False
    if kind.startswith("float"):
        return all(type(value) in (float, int) for value in values)
    limit = 2 ** (int(kind.removeprefix("int")) - 1)
    return all(type(value) is int and -limit <= value < limit for value in values)
