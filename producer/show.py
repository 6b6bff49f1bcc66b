"""Prints results for a person at a terminal: a table of them, or one rollout's trajectory.

What agents and models wrote is printed as text and nothing else: control characters, with which it could move the
cursor or pretend to be the terminal, are shown as escapes, and rich's markup is not read in it.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from producer.contract import ErrorInfo, RolloutResult, StopCondition
from producer.files.errors import ResultsFileError
from producer.files.read import Brief, ResultsReader, token_counts
from producer.trajectory import Said, Turn, integrity_of, turns_of, turns_of_steps

#: What tables can be sorted by.
SORTS: dict[str, Callable[[Brief], Any]] = {
    "id": lambda brief: brief.rollout_id,
    "reward": lambda brief: brief.reward,
    "turns": lambda brief: brief.turns,
    "tokens": lambda brief: brief.tokens,
    "time": lambda brief: brief.seconds,
    "start": lambda brief: brief.started,
}
SHOWN_CHARACTERS = 2000
_TAIL_CHARACTERS = 2000
_ERROR_CHARACTERS = 120
_SHOWN_IDS = 10
#: In fewer columns than this a table leaves out the example, which ids usually name.
_NARROW = 100

#: All but tab and newline of C0, DEL and C1, what turns the direction of writing, and what cannot be seen.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_STOP_STYLES = {
    StopCondition.COMPLETED: "green",
    StopCondition.AGENT_TIMEOUT: "yellow",
    StopCondition.HAS_ERROR: "red",
    StopCondition.CANCELLED: "dim",
}
_ROLE_STYLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


@dataclass(frozen=True)
class Listing:
    """Which results a table shows: ``limit`` 0 means all, ``sort`` is one of `SORTS`."""

    failed: bool = False
    sort: str | None = None
    reverse: bool = False
    limit: int = 50


def safe(text: object) -> str:
    """Return a text in which nothing is taken for more than a text: such characters become ``\\x1b`` and the like."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], str(text).replace("\r\n", "\n"))


def one_line(text: object, limit: int) -> str:
    """Return a text safe, on one line, cut to ``limit`` characters."""
    line = " ".join(safe(str(text)[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


# -- the table ---------------------------------------------------------------------------------------------------------


def show_listing(reader: ResultsReader, listing: Listing, console: Console) -> None:
    """Print a table of results; raises `ResultsFileError`."""
    seen = _Seen(reader, listing.failed)
    narrow = console.width < _NARROW
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column("rollout", overflow="fold", min_width=16)
    if not narrow:
        table.add_column("example", overflow="fold", min_width=7)
    table.add_column("ended", no_wrap=True, min_width=len(StopCondition.AGENT_TIMEOUT))
    for name in ("reward", "turns", "tokens", "time (s)"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("error")
    shown = 0
    for brief in _chosen(seen.matching(), listing):
        shown += 1
        cells = _cells(brief)
        table.add_row(*(cells[:1] + cells[2:] if narrow else cells))
    if seen.failures or not listing.failed:
        console.print(table)
    count = f"{seen.matches} of {seen.count} rollouts" if listing.failed else f"{seen.count} rollouts"
    left_out = f"; {shown} are shown, --limit 0 shows all" if shown < seen.matches else ""
    console.print(Text(f"{count}, {seen.failures} failed{left_out}"), soft_wrap=True)
    if reader.cut_short:
        console.print(Text("the last line is not whole: it is being written, or its run was cut off"), soft_wrap=True)


@dataclass
class _Seen:
    reader: ResultsReader
    failed: bool
    count: int = 0
    matches: int = 0
    failures: int = 0

    def matching(self) -> Iterator[Brief]:
        for brief in self.reader.briefs():
            self.count += 1
            self.failures += brief.failed
            if brief.failed or not self.failed:
                self.matches += 1
                yield brief


def _chosen(briefs: Iterator[Brief], listing: Listing) -> Iterator[Brief]:
    if listing.sort:
        value = SORTS[listing.sort]

        def key(brief: Brief) -> tuple[bool, Any]:  # what has no value comes last, in both directions
            found = value(brief)
            return (found is None) is not listing.reverse, 0.0 if found is None else found

        if not listing.limit:
            yield from sorted(briefs, key=key, reverse=listing.reverse)
        elif listing.reverse:
            yield from heapq.nlargest(listing.limit, briefs, key=key)
        else:
            yield from heapq.nsmallest(listing.limit, briefs, key=key)
        return
    yield from islice(briefs, listing.limit or None)
    for _ in briefs:  # to count them
        pass


def _cells(brief: Brief) -> list[Text]:
    example = f"{brief.example_id} #{brief.sample_index}" if brief.sample_index else brief.example_id
    error = ": ".join(part for part in (brief.error_type or brief.error_kind, brief.error_message) if part)
    return [
        Text(one_line(brief.rollout_id, 128)),
        Text(one_line(example, 40)),
        Text(brief.stop_condition.value, style=_STOP_STYLES[brief.stop_condition]),
        Text("-" if brief.reward is None else f"{brief.reward:.4g}"),
        Text(str(brief.turns)),
        Text(str(brief.tokens)),
        Text(f"{brief.seconds:.1f}"),
        Text(one_line(error, _ERROR_CHARACTERS), no_wrap=True, overflow="ellipsis"),
    ]


def find(reader: ResultsReader, wanted: str) -> RolloutResult:
    """Return the result with this rollout id, or the only one whose id begins so or whose example id it is.

    Raises `ResultsFileError` when there is none, or more than one.
    """
    begins: list[Brief] = []
    for brief in reader.briefs():
        if brief.rollout_id == wanted:
            begins = [brief]
            break
        if brief.rollout_id.startswith(wanted) or brief.example_id == wanted:
            begins.append(brief)
    if not begins:
        raise ResultsFileError(f"{reader.path} has no rollout {wanted!r}; rollouts show {reader.path} lists them")
    if len(begins) > 1:
        ids = ", ".join(one_line(brief.rollout_id, 128) for brief in begins[:_SHOWN_IDS])
        more = f" and {len(begins) - _SHOWN_IDS} more" if len(begins) > _SHOWN_IDS else ""
        raise ResultsFileError(f"{wanted!r} may be {len(begins)} rollouts: {ids}{more}; name one")
    return next(reader.results({begins[0].number}))[1]


# -- one rollout -------------------------------------------------------------------------------------------------------


@dataclass
class _Page:
    console: Console
    full: bool
    cut: bool = field(default=False, init=False)

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(Text(text, style="bold"), align="left", characters="─")

    def fact(self, name: str, value: object) -> None:
        self.console.print(Text.assemble((f"{name:>12}  ", "dim"), safe(value)), soft_wrap=True)

    def text(self, text: str, indent: int = 2, style: str = "", limit: int = SHOWN_CHARACTERS) -> None:
        more = len(text) - limit
        if more > 0 and not self.full:
            text, self.cut = text[:limit], True
        self.console.print(
            Padding(Text(safe(text).rstrip("\n"), style=style, overflow="fold"), (0, 0, 0, indent), expand=False)
        )
        if more > 0 and not self.full:
            self.console.print(
                Padding(Text(f"… {more} more characters", style="dim italic"), (0, 0, 0, indent), expand=False)
            )


def show_result(result: RolloutResult, console: Console, *, full: bool = False) -> None:
    """Print one rollout: how it ended, each turn, what failed and what its agent printed.

    Texts are cut to 2,000 characters each, unless ``full``.
    """
    page = _Page(console, full)
    _show_head(result, page)
    if result.error:
        page.title("error")
        _show_error(result.error, page)
    for number, turn in enumerate(turns_of(result), start=1):
        _show_turn(turn, f"turn {number} of {len(result.trajectory)}", page)
    earlier = result.error
    for attempt in result.failed_attempts:
        counted = "" if attempt.counted else ", handed over"
        page.title(f"attempt {attempt.attempt}, before: {attempt.turns} turns{counted}")
        _show_error(attempt.error, page, before=earlier)
        earlier = attempt.error
        for number, turn in enumerate(turns_of_steps(attempt.trajectory), start=1):
            _show_turn(turn, f"attempt {attempt.attempt}, turn {number}", page)
    for name, text in (("standard output", result.agent_stdout), ("standard error", result.agent_stderr)):
        if text:
            left = max(0, len(text) - _TAIL_CHARACTERS) if not full else 0
            page.title(f"agent's {name}" + (f", without its first {left} characters" if left else ""))
            page.cut = page.cut or bool(left)
            page.text(text[left:], limit=len(text))
    if page.cut:
        console.print(Text("\ntexts are cut; --full shows them whole", style="dim"))


def _show_head(result: RolloutResult, page: _Page) -> None:
    page.title(safe(result.rollout_id))
    page.fact("ended", result.stop_condition.value)
    page.fact("example", f"{result.example_id}, sample {result.sample_index}")
    page.fact("environment", result.environment or "-")
    page.fact("model", result.model or "-")
    page.fact("reward", "-" if result.reward is None else f"{result.reward:.6g}")
    if result.metrics:
        page.fact("metrics", ", ".join(f"{name} {value:.6g}" for name, value in result.metrics.items()))
    if result.answer is not None:
        page.fact("answer", one_line(result.answer, 200))
    prompt, completion = token_counts(result)
    truncated = ", truncated" if result.is_truncated else ""
    page.fact("turns", f"{len(result.trajectory)}{truncated}; {prompt} prompt and {completion} completion tokens")
    if integrity := integrity_of(result):
        page.fact("integrity", integrity)
    page.fact("attempt", f"{result.attempt} on {result.worker or '-'}")
    if result.agent_exit_code is not None:
        page.fact("exit code", result.agent_exit_code)
    timing = result.timing
    if timing.start_time:
        page.fact("started", _moment(timing.start_time))
    page.fact("time", f"{timing.total_ms / 1000:.3f} s")
    if result.durations:
        page.fact("phases", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in result.durations.items()))
    for warning in result.warnings:
        page.fact("warning", one_line(warning, 1000))


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _show_error(error: ErrorInfo, page: _Page, before: ErrorInfo | None = None) -> None:
    """Print an error; its detail only where that is another than the one's ``before``, which stands above it."""
    page.text(str(error), style="red")
    page.fact("type", error.type or "-")
    page.fact("retryable", "yes" if error.retryable else "no")
    if error.detail and before is not None and error.detail == before.detail:
        page.text("(its detail is the same as before)", indent=4, style="dim italic")
    elif error.detail:
        page.text(error.detail, indent=4)


def _show_turn(turn: Turn, title: str, page: _Page) -> None:
    tokens = [
        f"{count} {name}"
        for name, count in (("prompt", turn.prompt_tokens), ("completion", turn.completion_tokens))
        if count is not None
    ]
    notes = [" + ".join(tokens) + " tokens" if tokens else "no tokens"]
    notes += [f"reward {turn.reward:.4g}"] if turn.reward is not None else []
    notes += ["truncated"] if turn.is_truncated else []
    page.title(f"{title}: {', '.join(notes)}")
    if turn.rewritten:
        page.text(f"the agent changed its history; {turn.kept} messages are as before", style="dim italic")
    for message in (*turn.asked, *turn.answered):
        _show_message(message, page)


def _show_message(message: Said, page: _Page) -> None:
    style = _ROLE_STYLES.get(message.role.split(" ")[0], "")
    page.console.print(Text(one_line(message.role, 100), style=f"bold {style}".strip()))
    if message.reasoning:
        page.text(message.reasoning, style="dim italic")
    if message.text:
        page.text(message.text)
    for call in message.calls:
        page.text(f"→ {call.name}", style="bold")
        page.text(call.arguments, indent=4)
