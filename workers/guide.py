"""``rollouts guide``: what the packages say about themselves, for who has the command and not the source at hand."""

from __future__ import annotations

import inspect
from importlib import import_module

#: What can be read, by its name on the command line: the module that says it, and what it is about.
GUIDES = {
    "trainer": ("producer", "groups, staleness, delivery, flow control, and what a result holds"),
    "files": ("producer.files", "tasks from files, results in files, resuming, exit status"),
    "environment": ("workers.environment", "an environment of one's own, and secrets"),
    "harbor": ("workers.harbor", "tasks in Harbor's format, and the agents that can work on them"),
    "prime": ("workers.sandboxes", "sandboxes and tunnels of the Prime platform, and rollouts without a gateway"),
    "gateway": ("workers.gateway", "the bundled gateway in production"),
    "prime-rl": ("producer.door", "the door for prime-rl and others that speak to verifiers' environment server"),
    "failures": ("workers.errors", "the errors, and what happens when something fails"),
    "architecture": ("workers", "what is where, and where everything of verifiers' gateway mixin is"),
}


def guide(name: str) -> str:
    """Return a guide's text; raises `KeyError` for a name that is not in `GUIDES`."""
    return inspect.getdoc(import_module(GUIDES[name][0])) or ""
