"""The names of the agents that tasks in Harbor's format may run with; `workers.harbor.agents` says what they are."""

from __future__ import annotations

#: The agent that runs the task's own solution, and the only one whose sandbox is given it.
ORACLE = "oracle"
AGENTS = ("shell", "mini-swe-agent", "opencode", "codex", "claude-code", ORACLE, "nop")
