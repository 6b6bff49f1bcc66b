"""Calls an environment's hooks: coroutines on the loop, plain functions in a thread, failures as typed errors."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workers.environment import Environment
from workers.errors import EnvironmentHookError, RolloutError
from workers.state import Rollout


async def call_hook(environment: Environment, name: str, rollout: Rollout) -> Any:
    """Call ``environment.NAME(rollout)``; raises `EnvironmentHookError` naming the hook when it raises anything."""
    hook = getattr(environment, name)
    if inspect.iscoroutinefunction(hook):
        with _naming(environment, name):
            return await hook(rollout)
    # Named in the thread: the future between takes no StopIteration, and whoever waits for it would wait for ever.
    return await asyncio.to_thread(_naming(environment, name)(hook), rollout)


def derive(environment: Environment, name: str, *args: object) -> Any:
    """Call one of the methods that only derive something from the request; they must not block."""
    with _naming(environment, name):
        return getattr(environment, name)(*args)


@contextmanager
def _naming(environment: Environment, name: str) -> Iterator[None]:
    try:
        yield
    except RolloutError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # a hook must not end the worker either
        what = f"{type(environment).__name__}.{name} raised {type(error).__name__}: {error}"
        raise EnvironmentHookError(what, detail=traceback.format_exc(limit=-6)) from error
