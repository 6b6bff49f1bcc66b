"""Runs the demo: an embedded stack, the demo's tasks through the ordinary producer, and their results in a file."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from producer.files.output import ResultsOutput, prepare_results
from producer.runner import RunOptions, run_batch_async
from producer.settings import ProducerSettings
from producer.summary import Summary
from workers.demo.environment import demo_requests, llm_requests
from workers.local import LocalStack, Progress, StackOptions


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demo runs; with ``upstream``, ``model`` is the name of that server's model."""

    out: Path
    workers: int = 1
    samples: int = 4
    upstream: str | None = None
    model: str | None = None
    llm: bool = False
    overwrite: bool = False


def run_demo(options: DemoOptions, on_progress: Progress) -> Summary:
    """Run the demo's tasks on a stack of their own; raises `StackError` when a part of it dies meanwhile.

    Raises `ResultsFileError` before anything is started when ``options.out`` cannot be written.
    """
    file = prepare_results(options.out, overwrite=options.overwrite)
    # The real model answers four at a time on two cores: more agents would only wait for each other.
    concurrency = 4 if options.llm else 16
    stack_options = StackOptions(
        workers=options.workers, concurrency=concurrency, upstream=options.upstream, llm=options.llm
    )
    with LocalStack(stack_options, on_progress) as stack:
        on_progress("demo", _described(options, stack))
        return asyncio.run(_run(options, stack, file))


async def _run(options: DemoOptions, stack: LocalStack, file: ResultsOutput) -> Summary:
    if options.llm:
        requests = llm_requests(options.samples)
    else:
        requests = demo_requests(options.samples, model_name=options.model or stack.model)
    run_options = RunOptions(settings=ProducerSettings(redis_url=stack.redis_url), total=len(requests))
    run = asyncio.ensure_future(run_batch_async(requests, file, run_options))
    watch = asyncio.ensure_future(stack.watch())
    try:
        await asyncio.wait({run, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            watch.result()
        return await run
    finally:
        for task in (run, watch):
            task.cancel()
        await asyncio.gather(run, watch, return_exceptions=True)


def _described(options: DemoOptions, stack: LocalStack) -> str:
    if options.upstream:
        return f"model {options.model} at {options.upstream}"
    if options.llm:
        return f"model {stack.model}, a small real one on the CPU: expect low rewards"
    return (
        f"model '{stack.model}', a deterministic stand-in and not a language model; --llm or --upstream for a real one"
    )
