"""The agents that a Harbor task can be given to: how each is installed in a sandbox, and the line that runs it.

Both are shell texts (POSIX sh, in the task's working directory) that find

    AGENT_DIR    a folder of the agent's own, for its installation, settings and logs
    INSTRUCTION  the file with the task: it may be longer than the 128 KiB of one argument

and ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``OPENAI_MODEL``. What an image has already is not installed. HOME stays
the sandbox's, which no other rollout shares, because the commands that an agent runs are to find the task's files
there; each agent's own settings are kept in AGENT_DIR.

``codex`` calls ``/responses`` and ``claude-code`` ``/v1/messages`` (tried with 0.171 and 2.1). The bundled gateway
serves both; a rollout whose gateway does not ends before its agent starts. All others use ``/chat/completions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from producer.agents import ORACLE
from workers.errors import InvalidRolloutError
from workers.harbor import shell_agent

#: What every rollout gateway serves.
CHAT = "chat/completions"


@dataclass(frozen=True)
class Agent:
    """One agent. ``endpoint`` is what it calls below ``OPENAI_BASE_URL``, None if it calls no model.

    ``files`` (name to local file) are uploaded into AGENT_DIR, then ``install`` runs, once, before the agent starts.
    """

    name: str
    command: str
    install: str = ""
    endpoint: str | None = CHAT
    files: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))


_PACKAGES = """\
packages() {
  if command -v apt-get; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"
  elif command -v apk; then apk add --no-cache "$@"
  elif command -v dnf; then dnf install -y -q "$@"
  else echo "the image has none of $*, and no apt-get, apk or dnf to install them" >&2; return 1
  fi
}
"""

_PYTHON = _PACKAGES + "command -v python3 || packages python3\n"

_MINI_INSTALL = (
    _PYTHON
    + """\
command -v mini || {
  python3 -m venv "$AGENT_DIR/venv" || { packages python3-venv && python3 -m venv "$AGENT_DIR/venv"; }
  "$AGENT_DIR/venv/bin/pip" install --quiet --disable-pip-version-check 'mini-swe-agent>=2.4,<3'
}
"""
)

# The task is an argument; one that is too long for that is named instead.
_MINI = """\
task=$(cat "$INSTRUCTION")
if [ "$(wc -c < "$INSTRUCTION")" -gt 100000 ]; then task="Do the task that the file $INSTRUCTION describes."; fi
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_GLOBAL_CONFIG_DIR="$AGENT_DIR/settings"
exec mini -m "openai/$OPENAI_MODEL" -t "$task" -y --exit-immediately -l 0 -o "$AGENT_DIR/trajectory.json"
"""

_CODEX = """\
export CODEX_HOME="$AGENT_DIR/settings"
mkdir -p "$CODEX_HOME"
provider="{name=\\"gateway\\",base_url=\\"$OPENAI_BASE_URL\\",env_key=\\"OPENAI_API_KEY\\",wire_api=\\"responses\\"}"
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --ephemeral -m "$OPENAI_MODEL" \\
  -c analytics.enabled=false -c model_provider=gateway -c "model_providers.gateway=$provider" - < "$INSTRUCTION"
"""

_CLAUDE_CODE = """\
export CLAUDE_CONFIG_DIR="$AGENT_DIR/settings" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
export ANTHROPIC_BASE_URL="$OPENAI_BASE_URL" ANTHROPIC_API_KEY="$OPENAI_API_KEY"
exec claude --bare -p --model "$OPENAI_MODEL" --output-format json \\
  --allowedTools Bash Edit Read Write Glob Grep < "$INSTRUCTION"
"""

# Variables in braces are replaced by opencode itself, so that no key is written to the file. Without a title, it asks
# the model for one.
_OPENCODE = """\
export OPENCODE_CONFIG="$AGENT_DIR/opencode.json" XDG_DATA_HOME="$AGENT_DIR/data" XDG_CONFIG_HOME="$AGENT_DIR/settings"
cat > "$OPENCODE_CONFIG" <<END
{"provider": {"gateway": {"npm": "@ai-sdk/openai-compatible", "name": "gateway",
  "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
  "models": {"$OPENAI_MODEL": {}}}},
 "model": "gateway/$OPENAI_MODEL", "small_model": "gateway/$OPENAI_MODEL", "autoupdate": false, "share": "disabled",
 "permission": {"edit": "allow", "bash": "allow", "webfetch": "allow"}}
END
exec opencode run --title task --model "gateway/$OPENAI_MODEL" < "$INSTRUCTION"
"""


_ORACLE = """\
solution=$(cd "$AGENT_DIR/../../solution" && pwd) && chmod +x "$solution/solve.sh" && exec "$solution/solve.sh"
"""


def _from_npm(command: str, package: str) -> str:
    return (
        f"command -v {command} || {{\n"
        f"{_PACKAGES}"
        "  command -v npm || packages nodejs npm\n"
        f'  npm install --silent --no-fund --no-audit --prefix "$AGENT_DIR" {package}\n'
        "}\n"
    )


_AGENTS = (
    Agent(
        name="shell",
        install=_PYTHON,
        command='exec python3 -I -S "$AGENT_DIR/shell_agent.py" "$INSTRUCTION"',
        files=MappingProxyType({"shell_agent.py": Path(shell_agent.__file__)}),
    ),
    Agent(name="mini-swe-agent", install=_MINI_INSTALL, command=_MINI),
    Agent(name="opencode", install=_from_npm("opencode", "opencode-ai"), command=_OPENCODE),
    Agent(name="codex", install=_from_npm("codex", "@openai/codex"), command=_CODEX, endpoint="responses"),
    Agent(
        name="claude-code",
        install=_from_npm("claude", "@anthropic-ai/claude-code"),
        command=_CLAUDE_CODE,
        endpoint="v1/messages",
    ),
    Agent(name=ORACLE, command=_ORACLE, endpoint=None),
    Agent(name="nop", command="exit 0", endpoint=None),
)
BY_NAME: Mapping[str, Agent] = MappingProxyType({agent.name: agent for agent in _AGENTS})


def agent_named(name: str) -> Agent:
    """Return the agent of that name; raises `InvalidRolloutError` naming those that there are."""
    if name not in BY_NAME:
        raise InvalidRolloutError(
            f"environment_args.agent: {name[:100]!r} is not known; there are {', '.join(BY_NAME)}"
        )
    return BY_NAME[name]
