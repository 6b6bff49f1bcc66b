"""Where commands print texts and tables."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_WIDTH = 200


def console() -> Console:
    """Return a console on stdout: as wide as the terminal, and wide enough for whole lines elsewhere."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
