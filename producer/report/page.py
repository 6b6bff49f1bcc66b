"""Puts the page together: plots as SVG, results as data, and a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import orjson

from producer.contract import RolloutResult, StopCondition
from producer.files.errors import ResultsFileError
from producer.files.read import ResultsReader
from producer.report import plots
from producer.report.stats import MAX_ROWS, Stats, mean, percentile
from producer.show import one_line, safe
from producer.trajectory import Said, Turn, integrity_of, turns_of, turns_of_steps
from producer.worker_report import count as counted

HERE = Path(__file__).parent
#: Characters of one text in the page; those of a rollout that is too big are cut shorter, until it fits.
_TEXT_LIMITS = (4000, 1000, 250)
_ROLLOUT_BYTES = 200_000
_TURNS_KEPT = 50
_SHOWN_CLASSES = 12


@dataclass(frozen=True)
class ReportOptions:
    """How a page is made: how many trajectories it holds, and how many bytes of them."""

    title: str = "rollouts"
    trajectories: int = 500
    max_bytes: int = 12_000_000


@dataclass(frozen=True)
class Written:
    """What was made: rollouts that were counted, trajectories that the page holds, its size in bytes."""

    rollouts: int
    trajectories: int
    size: int


def write_report(reader: ResultsReader, out: Path, options: ReportOptions) -> Written:
    """Write the page of all results to ``out``, whole or not at all; raises `ResultsFileError`."""
    stats = Stats.of(reader.briefs(), options.trajectories)
    if not stats.count:
        raise ResultsFileError(f"{reader.path} holds no results")
    details = _details(reader, stats, options)
    page = _page(stats, details, options, cut_short=reader.cut_short).encode()
    other = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        other.write_bytes(page)
        other.replace(out)
    except OSError as error:
        other.unlink(missing_ok=True)
        raise ResultsFileError(f"{out} cannot be written: {error.strerror}") from None
    return Written(stats.count, len(details), len(page))


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(stats: Stats, details: dict[int, bytes], options: ReportOptions, *, cut_short: bool) -> str:
    style, script = (_asset(name) for name in ("style.css", "script.js"))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("page.html")).substitute(
        policy=escape(policy),
        title=escape(safe(options.title)),
        style=style,
        script=script,
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(stats)),
        figures="".join(_figures(stats)),
        note=escape(_note(stats, details, cut_short=cut_short)),
        data=_data(stats, details),
    )


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _facts(stats: Stats) -> Iterator[tuple[str, str]]:
    completed = stats.stops[StopCondition.COMPLETED.value]
    yield "rollouts", f"{stats.count:,}"
    yield "completed", f"{completed:,} ({completed / stats.count:.1%})"
    for stop, count in sorted(stats.stops.items()):
        if stop != StopCondition.COMPLETED.value:
            yield stop.replace("_", " "), f"{count:,}"
    average = mean(stats.rewards)
    yield "mean reward", "-" if average is None else f"{average:.4g} (of {len(stats.rewards):,})"
    yield "turns", f"{sum(stats.turns):,} ({sum(stats.turns) / stats.count:.1f} each)"
    yield "prompt tokens", plots.number(sum(stats.prompt_tokens))
    yield "completion tokens", plots.number(sum(stats.completion_tokens))
    if stats.starts:
        yield "from first to last", plots.duration(max(stats.ends) - min(stats.starts))


def _figures(stats: Stats) -> Iterator[str]:
    if stats.rewards:
        caption = f"mean {mean(stats.rewards):.4g}, median {percentile(sorted(stats.rewards), 0.5):.4g}"
        yield _figure("Reward", caption, plots.histogram(stats.rewards, "Rewards"))
    if stats.latency:
        phases = [(name, stats.latency[name]) for name in stats.phases]
        caption = "line: 5th to 95th percentile; box: the middle half; mark: median"
        yield _figure("Time by phase", caption, plots.latencies(phases, "Time by phase"))
    if stats.starts:
        caption = "by the start and length of each rollout's last attempt"
        yield _figure("In flight", caption, plots.in_flight(stats.starts, stats.ends, "Rollouts in flight"))
    yield _figure("Turns", f"median {_median(stats.turns)}", plots.histogram(stats.turns, "Turns of a rollout"))
    for name, values in (("Completion tokens", stats.completion_tokens), ("Prompt tokens", stats.prompt_tokens)):
        if any(values):
            caption = f"of a rollout, all its turns; median {_median(values)}"
            yield _figure(name, caption, plots.histogram(values, name))
    if stats.failures:
        worst = sorted(stats.failures.items(), key=lambda item: -item[1].count)[:_SHOWN_CLASSES]
        drawn = plots.counted([(one_line(name, 80), seen.count) for name, seen in worst], "Failures by class")
        first = "".join(
            f"<li><b>{escape(one_line(name, 80))}</b> {escape(one_line(seen.first, 300))}</li>" for name, seen in worst
        )
        yield _figure(
            "Failures by class", f"{counted(len(stats.failures), 'kind')}; the first of each below", drawn, first
        )
    if stats.warnings:
        common = [(one_line(text, 120), count) for text, count in stats.warnings.most_common(_SHOWN_CLASSES)]
        words = "".join(f"<li>{escape(text)} <b>{count}</b></li>" for text, count in common)
        yield _figure("Warnings", f"{sum(stats.warnings.values()):,} in all", "", words)


def _figure(title: str, caption: str, picture: str, items: str = "") -> str:
    below = f"<ul>{items}</ul>" if items else ""
    return f"<figure><figcaption><h2>{escape(title)}</h2><p>{escape(caption)}</p></figcaption>{picture}{below}</figure>"


def _median(values: Any) -> str:
    return plots.number(percentile(sorted(values), 0.5))


def _note(stats: Stats, details: dict[int, bytes], *, cut_short: bool) -> str:
    notes = []
    if len(details) < stats.count:
        notes.append(
            f"The page holds {len(details):,} of {stats.count:,} trajectories, half of them of failures if there are, "
            "and cuts long texts; --trajectories N takes more, rollouts show prints any of them whole."
        )
    if stats.count > MAX_ROWS:
        notes.append(f"The list has the first {MAX_ROWS:,} rollouts; the plots count all.")
    if cut_short:
        notes.append("The last line of the results was not whole and is left out.")
    return " ".join(notes)


# -- the data ----------------------------------------------------------------------------------------------------------


def _data(stats: Stats, details: dict[int, bytes]) -> str:
    """Return rows and details as JSON that nothing in it can end, for a ``script`` element."""
    rows = [
        [
            brief.number,
            safe(brief.rollout_id),
            safe(brief.example_id),
            brief.sample_index,
            brief.stop_condition.value,
            None if brief.reward is None else float(f"{brief.reward:.6g}"),
            brief.turns,
            brief.tokens,
            round(brief.seconds, 1),
            one_line(": ".join(filter(None, (brief.error_type or brief.error_kind, brief.error_message))), 160),
        ]
        for brief in stats.rows
    ]
    parts = ",".join(f'"{number}":{detail.decode()}' for number, detail in details.items())
    return in_script(f'{{"rows":{orjson.dumps(rows).decode()},"details":{{{parts}}}}}')


def in_script(data: str) -> str:
    """Return JSON in which no character has a meaning to a reader of HTML; outside of texts it has none of these."""
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def _details(reader: ResultsReader, stats: Stats, options: ReportOptions) -> dict[int, bytes]:
    listed = stats.chosen() if stats.count <= MAX_ROWS else {n for n in stats.chosen() if n < MAX_ROWS}
    details: dict[int, bytes] = {}
    size = 0
    for number, result in reader.results(listed):
        detail = _fitting(result)
        if size + len(detail) > options.max_bytes:
            continue  # a smaller one may still fit
        size += len(detail)
        details[number] = detail
    return details


def _fitting(result: RolloutResult) -> bytes:
    for limit in _TEXT_LIMITS:
        detail = orjson.dumps(_detail(result, limit, None))
        if len(detail) <= _ROLLOUT_BYTES:
            return detail
    return orjson.dumps(_detail(result, _TEXT_LIMITS[-1], _TURNS_KEPT))


def _detail(result: RolloutResult, limit: int, keep: int | None) -> dict[str, Any]:
    turns = turns_of(result)
    left_out = len(turns) - 2 * keep if keep and len(turns) > 2 * keep else 0
    shown = [_turn(turn, number, limit) for number, turn in enumerate(turns, start=1)]
    if keep and left_out:
        shown = shown[:keep] + shown[-keep:]
    error = result.error
    return {
        "facts": [[safe(name), _cut(str(value), 1000)] for name, value in _result_facts(result)],
        "error": _cut(f"{error}\n{error.detail or ''}".strip(), limit) if error else "",
        "turns": shown,
        "left": left_out,
        "attempts": [
            {
                "title": f"attempt {attempt.attempt}: {attempt.turns} turns",
                "error": _cut(f"{attempt.error}\n{attempt.error.detail or ''}".strip(), limit),
                "turns": [_turn(t, n, limit) for n, t in enumerate(turns_of_steps(attempt.trajectory[:keep]), start=1)],
            }
            for attempt in result.failed_attempts[-10:]
        ],
        "stdout": safe(result.agent_stdout[-limit:]),
        "stderr": safe(result.agent_stderr[-limit:]),
    }


def _result_facts(result: RolloutResult) -> Iterator[tuple[str, Any]]:
    yield "environment", result.environment or "-"
    yield "model", result.model or "-"
    yield "reward", "-" if result.reward is None else f"{result.reward:.6g}"
    for name, value in list(result.metrics.items())[:30]:
        yield name[:60], f"{value:.6g}"
    if result.answer is not None:
        yield "answer", result.answer
    yield "attempt", f"{result.attempt} on {result.worker or '-'}"
    if result.agent_exit_code is not None:
        yield "exit code", result.agent_exit_code
    if result.is_truncated:
        yield "truncated", "yes"
    if integrity := integrity_of(result):
        yield "integrity", integrity
    for name, seconds in list(result.durations.items())[:20]:
        yield name[:60], plots.duration(seconds) if seconds >= 0 else seconds
    for warning in result.warnings[:10]:
        yield "warning", warning


def _turn(turn: Turn, number: int, limit: int) -> dict[str, Any]:
    return {
        "n": number,
        "p": turn.prompt_tokens,
        "c": turn.completion_tokens,
        "cut": turn.is_truncated,
        "new": turn.rewritten,
        "says": [_said(message, limit) for message in (*turn.asked, *turn.answered)],
    }


def _said(message: Said, limit: int) -> dict[str, Any]:
    return {
        "role": _cut(message.role, 100),
        "text": _cut(message.text, limit),
        "why": _cut(message.reasoning, limit),
        "calls": [[_cut(call.name, 200), _cut(call.arguments, limit)] for call in message.calls[:50]],
    }


def _cut(text: str, limit: int) -> str:
    more = len(text) - limit
    return safe(text) if more <= 0 else f"{safe(text[:limit])}\n… {more} more characters"
