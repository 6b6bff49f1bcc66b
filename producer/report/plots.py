"""Draws plots as SVG: a few shapes with classes, whose colours the page's style gives them for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from producer.report.stats import percentile

WIDTH = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 34
_PLOT = 195
_BINS = 24
_COLUMNS = 360
_TIME_STEPS = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
)

Bin = tuple[str, str, int]  # what stands below it, what it says when it is pointed at, how many


def svg(height: float, title: str, shapes: list[str]) -> str:
    """Return a picture of `WIDTH` by ``height``."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(shapes)}</svg>"
    )


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "tick") -> str:
    """Return a text that begins, ends or is centred at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def number(value: float) -> str:
    """Return a number as an axis shows it: 1.5k, 20M, 0.25."""
    if value and not 1e-3 <= abs(value) < 1e15:
        return f"{value:.2g}"
    for size, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{mark}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time as a person says it: 120 ms, 3.2 s, 4:05 min, 2:03 h."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02} min" if seconds % 60 else f"{int(seconds) // 60} min"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02} h"


# -- histograms --------------------------------------------------------------------------------------------------------


def histogram(values: Sequence[float], title: str) -> str:
    """Draw how often which value comes: one bar for each where they are few, else for each range."""
    return _bars(bins(values), title)


def bins(values: Sequence[float]) -> list[Bin]:
    """Put values into bins; those that reach over several sizes go into bins of doubled width."""
    distinct = sorted(set(values))
    if len(distinct) <= 2 or _few_whole_numbers(distinct):
        return _one_each(values, distinct)
    low, high = distinct[0], distinct[-1]
    middle = percentile(sorted(values), 0.5)
    if low >= 0 and middle > 0 and high > 20 * middle:
        return _doubling(values, high)
    whole = all(float(value).is_integer() for value in distinct)
    step = nice((high - low) / _BINS)
    step = max(1.0, math.ceil(step)) if whole else step
    first = math.floor(low / step)
    counts = [0] * (math.floor(high / step) - first + 1)
    for value in values:
        counts[min(len(counts) - 1, math.floor(value / step) - first)] += 1
    edges = [(first + place) * step for place in range(len(counts) + 1)]
    return [
        (number(edge), f"{number(edge)} to {number(after)}", count)
        for edge, after, count in zip(edges, edges[1:], counts, strict=False)
    ]


def _few_whole_numbers(distinct: Sequence[float]) -> bool:
    return all(float(v).is_integer() for v in distinct) and distinct[-1] - distinct[0] < _BINS


def _one_each(values: Sequence[float], distinct: Sequence[float]) -> list[Bin]:
    counts: dict[float, int] = {}
    if _few_whole_numbers(distinct):
        counts = {float(value): 0 for value in range(int(distinct[0]), int(distinct[-1]) + 1)} if distinct else {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return [(number(value), number(value), counts[value]) for value in sorted(counts)]


def _doubling(values: Sequence[float], high: float) -> list[Bin]:
    top = max(1, math.ceil(math.log2(high + 1)))
    counts = [0] * (top + 1)
    for value in values:
        counts[0 if value < 1 else 1 + min(top - 1, int(math.log2(value)))] += 1
    edges = [0.0, *(2.0**power for power in range(top + 1))]
    first = next(place for place, count in enumerate(counts) if count)
    return [
        (number(edges[place]), f"{number(edges[place])} to {number(edges[place + 1])}", count)
        for place, count in enumerate(counts)
        if place >= first
    ]


def nice(step: float) -> float:
    """Return the next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= step * (1 - 1e-9))


def _bars(found: list[Bin], title: str) -> str:
    top = max(count for _, _, count in found)
    shapes = _grid(top)
    width = (WIDTH - _LEFT - _RIGHT) / len(found)
    bar = min(width * 0.86, 56)
    every = max(1, math.ceil(len(found) * 46 / (WIDTH - _LEFT - _RIGHT)))
    base = _TOP + _PLOT
    for place, (below, said, count) in enumerate(found):
        x = _LEFT + place * width + (width - bar) / 2
        # A bar that stands for something can be seen, however few it counts.
        height = max(1.5, count / top * _PLOT) if count else 0
        shapes.append(
            f'<rect class="bar" x="{x:.1f}" y="{base - height:.1f}" width="{bar:.1f}" height="{height:.1f}" rx="1">'
            f"<title>{escape(said)}: {count}</title></rect>"
        )
        if place % every == 0:
            shapes.append(text(x + bar / 2, base + 15, below, "middle"))
    shapes.append(_line(_LEFT, base, WIDTH - _RIGHT, base, "axis"))
    return svg(base + _BOTTOM - 8, title, shapes)


def _grid(top: float, *, whole: bool = True) -> list[str]:
    """Return lines and numbers for 0 to ``top``, from bottom to top."""
    step = nice(top / 4) if top > 0 else 1
    step = max(1.0, step) if whole else step
    shapes = []
    for place in range(int(top / step) + 1):
        y = _TOP + _PLOT - place * step / top * _PLOT if top else _TOP + _PLOT
        shapes += [_line(_LEFT, y, WIDTH - _RIGHT, y, "grid"), text(_LEFT - 6, y + 4, number(place * step), "end")]
    return shapes


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


# -- phases, failures, time --------------------------------------------------------------------------------------------


def latencies(phases: Sequence[tuple[str, Sequence[float]]], title: str) -> str:
    """Draw each phase on a log axis: the 5th to 95th percentile as a line, the middle half as a box, the median."""
    left, right, row = 80, 124, 23
    every = [value for _, values in phases for value in values]
    low = math.floor(math.log10(max(min(every), 1e-4)))
    high = max(low + 1, math.ceil(math.log10(max(every))))

    def at(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return left + share * (WIDTH - left - right)

    bottom = _TOP + row * len(phases)
    shapes = []
    for power in range(low, high + 1):
        shapes.append(_line(at(10.0**power), _TOP, at(10.0**power), bottom, "grid"))
        if (high - low) <= 5 or (power - low) % 2 == 0:
            shapes.append(
                text(
                    at(10.0**power),
                    bottom + 15,
                    f"{10.0**power:g} s" if power >= 0 else f"{10.0 ** (power + 3):g} ms",
                    "middle",
                )
            )
    shapes.append(text(WIDTH - 4, bottom + 15, "p50 / p95", "end"))
    for place, (name, values) in enumerate(phases):
        ordered = sorted(values)
        p5, p25, p50, p75, p95 = (percentile(ordered, share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
        y = _TOP + row * place + row / 2
        box = max(2.0, at(p75) - at(p25))
        said = f"{name}: p5 {duration(p5)}, p25 {duration(p25)}, p50 {duration(p50)}, p75 {duration(p75)}, p95 "
        shapes += [
            f"<g><title>{escape(said + duration(p95))}</title>",
            text(left - 8, y + 4, name[:12], "end", "label"),
            _line(at(p5), y, at(p95), y, "whisker"),
            f'<rect class="bar" x="{at(p25):.1f}" y="{y - 6:.1f}" width="{box:.1f}" height="12" rx="2"/>',
            _line(at(p50), y - 8, at(p50), y + 8, "median"),
            text(WIDTH - 4, y + 4, f"{duration(p50)} / {duration(p95)}", "end"),
            "</g>",
        ]
    return svg(bottom + _BOTTOM - 10, title, shapes)


def counted(names: Sequence[tuple[str, int]], title: str, kind: str = "bad") -> str:
    """Draw a bar for each name, with its count."""
    row, top = 36, max(count for _, count in names)
    shapes = []
    for place, (name, count) in enumerate(names):
        y = _TOP + row * place
        width = max(2.0, count / top * (WIDTH - 60))
        shown = name if len(name) <= 60 else name[:59] + "…"
        shapes += [
            text(2, y + 8, shown, "start", "label"),
            f'<rect class="{kind}" x="2" y="{y + 13}" width="{width:.1f}" height="12" rx="2"/>',
            text(width + 8, y + 23, str(count)),
        ]
    return svg(_TOP + row * len(names), title, shapes)


def in_flight(starts: Sequence[float], ends: Sequence[float], title: str) -> str:
    """Draw how many rollouts ran at each time; of each piece of time it is the most that ran at once."""
    levels = peaks(starts, ends, _COLUMNS)
    top = max(levels)
    span = max(max(ends) - min(starts), 1e-3)
    base = _TOP + _PLOT
    wide = (WIDTH - _LEFT - _RIGHT) / _COLUMNS
    points = "".join(
        f"L{_LEFT + place * wide:.1f} {base - level / top * _PLOT:.1f}h{wide:.2f}" for place, level in enumerate(levels)
    )
    shapes = _grid(top)
    shapes.append(f'<path class="area" d="M{_LEFT} {base}{points}L{WIDTH - _RIGHT} {base}Z"/>')
    shapes.append(_line(_LEFT, base, WIDTH - _RIGHT, base, "axis"))
    step = next(
        (step for step in _TIME_STEPS if span / step <= 6), _TIME_STEPS[-1] * math.ceil(span / 6 / _TIME_STEPS[-1])
    )
    for place in range(int(span / step) + 1):
        x = _LEFT + place * step / span * (WIDTH - _LEFT - _RIGHT)
        shapes.append(text(min(x, WIDTH - 18), base + 15, duration(place * step) if place else "0", "middle"))
    return svg(base + _BOTTOM - 8, title, shapes)


def peaks(starts: Sequence[float], ends: Sequence[float], columns: int) -> list[int]:
    """Return for each of ``columns`` equal pieces of time the most intervals that overlap at one moment of it."""
    first, span = min(starts), max(max(ends) - min(starts), 1e-9)
    changes = sorted([(moment, 1) for moment in starts] + [(moment, -1) for moment in ends])
    levels = [0] * columns
    running, last = 0, 0
    for moment, change in changes:
        column = min(columns - 1, int((moment - first) / span * columns))
        for between in range(last, column + 1):
            levels[between] = max(levels[between], running)
        running += change
        levels[column] = max(levels[column], running)
        last = column
    return levels
