"""Draws the README's pictures from a fleet that runs: the terminal view, and the plots of the report.

    make pictures

Nothing in them is made up: they show one run of the demo's tasks on this machine, a few agents that fail among them.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, RenderableType

from producer import Producer, ProducerSettings, RolloutRequest
from producer.connection import FleetConnection
from producer.files.output import prepare_results
from producer.files.read import ResultsReader
from producer.report import ReportOptions, write_report
from producer.report.page import HERE as REPORT
from producer.report.plots import WIDTH
from producer.status import read_status
from producer.watch import Rates
from workers.demo.environment import demo_requests
from workers.local import LocalStack, StackOptions

PICTURES = Path(__file__).parents[1] / ".pictures"
SAMPLES = 24
DRAWN_AT = 0.6  #: the part of the results that is there when the terminal is drawn

#: rich's own picture fetches its font from elsewhere.
_TERMINAL = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.{unique_id}-title {{ font: 600 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_OWN_STYLE = """\
.card { fill: var(--card); stroke: var(--line); }
svg .title { font-size: 15px; font-weight: 600; fill: var(--ink); }
"""
_FIGURE = re.compile(r'<figure>.*?<h2>(.*?)</h2><p>(.*?)</p></figcaption>(<svg viewBox="0 0 \S+ (\S+?)".*?</svg>)')
_FACT = re.compile(r"<dt>(.*?)</dt><dd>(.*?)</dd>")
_COLUMNS, _GAP, _HEAD, _FACTS = 3, 14, 56, 64


def requests(model: str) -> list[RolloutRequest]:
    """The demo's tasks, and some whose agent fails or takes too long."""
    failing = [("echo 'no such tool' >&2; exit 3", 60)] * 9 + [("sleep 30", 2)] * 4
    return [
        *(
            RolloutRequest(model=model, run_command=command, example_id=f"fails-{n}", deadlines={"agent": deadline})
            for n, (command, deadline) in enumerate(failing)
        ),
        *demo_requests(SAMPLES, model_name=model),
    ]


async def run(stack: LocalStack, results: Path) -> str:
    """Run all, with their results in a file; returns the terminal as it was meanwhile, as SVG."""
    asked = requests(stack.model)
    rates, seen, drawn = Rates(), 0, ""
    connection = FleetConnection(stack.redis_url)
    async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer:
        with prepare_results(results) as file:
            async for result in await producer.submit_many(asked):
                file.write(result)
                seen += 1
                if not drawn and seen % 16 == 0:
                    status = await read_status(connection)
                    view = status.view(rates.of(status))
                    drawn = terminal(view) if seen >= DRAWN_AT * len(asked) else ""
    await connection.close()
    return drawn


def terminal(view: RenderableType) -> str:
    """Return what is shown in a terminal as SVG."""
    console = Console(record=True, width=116, file=io.StringIO(), force_terminal=True)
    console.print(view)
    return console.export_svg(title="rollouts status --watch", code_format=_TERMINAL, unique_id="t")


def plots(page: str) -> str:
    """Return the facts and plots of a report's page as one SVG, in the page's own style."""
    style = (REPORT / "style.css").read_text() + _OWN_STYLE
    facts, figures = _FACT.findall(page), _FIGURE.findall(page)
    width = _COLUMNS * (WIDTH + 2 * _GAP) + (_COLUMNS - 1) * _GAP
    shapes, top = list(_facts(facts, width)), _FACTS + _GAP
    for start in range(0, len(figures), _COLUMNS):
        row = figures[start : start + _COLUMNS]
        height = _HEAD + _GAP + max(float(figure[3]) for figure in row)
        for place, (title, caption, picture, tall) in enumerate(row):
            x = place * (WIDTH + 3 * _GAP)
            shapes += [
                _card(x, top, WIDTH + 2 * _GAP, height),
                f'<text class="title" x="{x + _GAP}" y="{top + 24}">{title}</text>',
                f'<text x="{x + _GAP}" y="{top + 43}">{caption}</text>',
                f'<svg x="{x + _GAP}" y="{top + _HEAD}" width="{WIDTH}" height="{tall}"' + picture[len("<svg") :],
            ]
        top += int(height) + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {width + 16} {top + 2}">\n<style>\n{style}\n</style>'
    )
    page_itself = '<rect x="-8" y="-8" width="100%" height="100%" style="fill: var(--page)"/>'
    return "\n".join([head, page_itself, *shapes, "</svg>\n"])


def _facts(facts: list[tuple[str, str]], width: int) -> Iterator[str]:
    wide = (width - (len(facts) - 1) * _GAP / 2) / len(facts)
    for place, (name, value) in enumerate(facts):
        x = place * (wide + _GAP / 2)
        yield _card(x, 0, wide, _FACTS)
        yield f'<text x="{x + 10:.1f}" y="24">{name}</text>'
        yield f'<text class="title" x="{x + 10:.1f}" y="47">{value}</text>'


def _card(x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="card" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8"/>'


def main() -> None:
    """Run the fleet and write the pictures."""
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as directory, LocalStack(StackOptions(workers=2, concurrency=24)) as stack:
        results, report = Path(directory) / "results.jsonl", Path(directory) / "report.html"
        (PICTURES / "status.svg").write_text(asyncio.run(run(stack, results)))
        write_report(ResultsReader(results), report, ReportOptions())
        (PICTURES / "report.svg").write_text(plots(report.read_text()))


if __name__ == "__main__":
    main()
