"""The shell scripts that run in a Harbor task's sandbox, for any POSIX sh: images need not have more than that.

Paths in commands are absolute; `Place` puts them where commands see them.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from workers.harbor.task import relocated

AGENT_DIR, TESTS, VERIFIER, OTHER_LOGS = "/logs/agent", "/tests", "/logs/verifier", "/logs/artifacts"
OUTPUT = f"{VERIFIER}/test-stdout.txt"
#: Bytes read of each reward file, and of the end of what the verifier printed.
REWARD_LIMIT, TAIL_LIMIT = 16384, 4000

#: Starts the agent. It is found from the root, or below the folder that stands for it and where commands start there.
RUN_AGENT = "[ -f logs/agent/run.sh ] || cd /; exec sh logs/agent/run.sh"

_HEAD = """\
AGENT_DIR=$(cd "$(dirname "$0")" && pwd)
PATH="$PATH:$AGENT_DIR/venv/bin:$AGENT_DIR/node_modules/.bin"
export AGENT_DIR PATH INSTRUCTION="$AGENT_DIR/instruction.md"
"""

#: Kills a process and those that it started, however deep. What has become a daemon has another parent by then and
#: stays: it may be the service that the task asks for. Each is stopped when it is found, so that it starts no more.
_END_TREE = """\
pid=$(head -c 20 {pid_file})
case $pid in *[!0-9]*|""|0|1) exit 0;; esac  # an agent may have written anything there
tree=" $pid "
kill -STOP $tree || exit 0
grown=yes
while [ "$grown" ]; do
  grown=
  for stat in /proc/[0-9]*/stat; do
    read -r line < "$stat" || continue
    pid=${line%% *}
    set -- ${line##*) }
    case $tree in *" $pid "*) continue;; esac
    case $tree in *" $2 "*) kill -STOP "$pid" && tree="$tree$pid " grown=yes;; esac
  done
done
kill -KILL $tree
exit 0
"""


@dataclass(frozen=True)
class Place:
    """Where a sandbox's commands see its paths: below ``root``, which is empty where a sandbox has its own."""

    root: str

    def quoted(self, path: str) -> str:
        """Return an absolute path of the sandbox as a word of a shell command."""
        return shlex.quote(self.root + path)

    def enter(self, workdir: str | None) -> str:
        """Return the line that enters the working directory."""
        return f"cd {self.quoted(workdir)} || exit 1\n" if workdir else ""

    def exports(self, env: Mapping[str, str]) -> str:
        """Return the line that sets ``env``; the well-known paths in values are put in place too."""
        words = [f"{name}={shlex.quote(relocated(value, self.root))}" for name, value in env.items()]
        return f"export {' '.join(words)}\n" if words else ""


def run_script(place: Place, command: str, workdir: str | None, env: Mapping[str, str]) -> str:
    """Return the script that becomes the agent, and notes the number of its process."""
    return f'{_HEAD}echo $$ > "$AGENT_DIR/agent.pid"\n{place.enter(workdir)}{place.exports(env)}{command}\n'


def install_script(place: Place, install: str, workdir: str | None) -> str:
    """Return the script that installs the agent; what it prints goes to its stderr."""
    return f"exec >&2\nset -e\n{_HEAD}{place.enter(workdir)}{install}\n"


def prepare_line(place: Place, folders: list[str], executables: list[str]) -> str:
    """Return the command that makes folders, and lets files be executed."""
    line = "mkdir -p " + " ".join(map(place.quoted, folders))
    return f"{line} && {_executable(place, executables)}" if executables else line


def clear_line(place: Place) -> str:
    """Return the command that empties the folders of tests and rewards, whatever an agent has put in their place."""
    folders = " ".join(map(place.quoted, (TESTS, VERIFIER)))
    return f"rm -rf {folders} && mkdir -p {folders} {place.quoted(OTHER_LOGS)}"


def end_agent_line(place: Place) -> str:
    """Return the command that ends an agent which is still running."""
    return _END_TREE.replace("{pid_file}", place.quoted(f"{AGENT_DIR}/agent.pid"))


def tail_line(place: Place) -> str:
    """Return the command that prints the end of the verifier's output."""
    return f"tail -c {TAIL_LIMIT} {place.quoted(OUTPUT)}"


def _executable(place: Place, paths: list[str]) -> str:
    return "chmod +x " + " ".join(map(place.quoted, paths))


@dataclass(frozen=True)
class Verdict:
    """What a verifier left: its exit status, its reward files by name, and the end of its output."""

    exit_code: int
    rewards: dict[str, str]
    output: str


class VerifierRun:
    """The line that runs a verifier and prints what it left, and the reading of that.

    Both are one command: nothing that an agent left running has more time than between two processes of it to change
    the reward. A word that cannot be guessed separates the parts.
    """

    def __init__(self, place: Place, workdir: str | None, env: Mapping[str, str], executables: list[str]) -> None:
        self._mark = f"==={secrets.token_hex(16)}"
        rewards = " ".join(place.quoted(f"{VERIFIER}/{name}") for name in ("reward.json", "reward.txt"))
        test = f"{TESTS}/test.sh"
        self.line = (
            f"{_executable(place, [test, *executables])}\n"
            f"({place.enter(workdir)}{place.exports(env)}"
            f"exec {place.quoted(test)}) < /dev/null > {place.quoted(OUTPUT)} 2>&1\n"
            "code=$?\n"
            f"for file in {rewards}; do\n"
            f'[ -f "$file" ] && printf \'\\n{self._mark} %s\\n\' "${{file##*/}}" && head -c {REWARD_LIMIT} "$file"\n'
            "done\n"
            f"printf '\\n{self._mark} %s\\n' $code\n"
            f"{tail_line(place)}\n"
        )

    def verdict(self, printed: str) -> Verdict | None:
        """Return what the line printed; None if it did not come to its end."""
        parts = re.split(rf"\n?^{self._mark} (.*)(?:\n|\Z)", printed, flags=re.MULTILINE)[1:]
        found = dict(zip(parts[::2], parts[1::2], strict=True))
        rewards = {name: text for name, text in found.items() if not name.isdecimal()}
        codes = [name for name in found if name.isdecimal()]
        return Verdict(int(codes[0]), rewards, found[codes[0]]) if codes else None
