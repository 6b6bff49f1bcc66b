"""Reads a Dockerfile that needs no build: a base image, and a working directory, variables and files laid over it.

Whatever changes the image by running something needs a build, which a fleet of sandboxes cannot make.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from producer.packing import walk

#: They say nothing about the file system; the sandbox's own command takes the place of CMD.
_WITHOUT_EFFECT = {"CMD", "LABEL", "MAINTAINER", "EXPOSE"}


class NeedsBuildError(Exception):
    """The Dockerfile cannot be had without building it; the message says which line, and why."""


@dataclass(frozen=True)
class Copy:
    """One ``COPY``: sources relative to the build context, and the absolute target as it was written."""

    sources: tuple[str, ...]
    target: str
    #: The working directory at that line: a folder, even if the target is written without a slash at its end.
    workdir: str

    def files(self, context: Path) -> dict[str, Path]:
        """Return the files that it copies, by their absolute path in the sandbox; raises `NeedsBuildError`."""
        found: dict[str, Path] = {}
        into_folder = self.target.endswith("/") or len(self.sources) > 1 or self._is_known_folder()
        for source in self.sources:
            path = (context / source.lstrip("/")).resolve()
            if not path.is_relative_to(context.resolve()) or not path.exists():
                raise NeedsBuildError(f"COPY {source}: there is no such file in {context.name}/")
            if path.is_dir():
                found |= {posixpath.join(self.target, name): file for name, file in walk(path).items()}
            else:
                target = posixpath.join(self.target, path.name) if into_folder else self.target
                found[target] = path
        return {posixpath.normpath(name): file for name, file in found.items()}

    def _is_known_folder(self) -> bool:
        return (self.workdir + "/").startswith(self.target.rstrip("/") + "/")


@dataclass
class Recipe:
    """What a Dockerfile without a build amounts to."""

    image: str = ""
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Recipe:
        """Read a Dockerfile; raises `NeedsBuildError` naming the first line that needs a build."""
        recipe = cls()
        for number, name, rest in _instructions(text):
            try:
                recipe._apply(name, rest)
            except (NeedsBuildError, ValueError) as error:
                raise NeedsBuildError(f"line {number}: {error}") from None
        if not recipe.image:
            raise NeedsBuildError("it has no FROM")
        return recipe

    def _apply(self, name: str, rest: str) -> None:
        if name in _WITHOUT_EFFECT:
            return
        if name not in {"FROM", "WORKDIR", "ENV", "COPY"}:
            raise NeedsBuildError(f"{name} changes the image")
        if "$" in rest or "<<" in rest:
            raise NeedsBuildError(f"{name} uses a variable or a here-document")
        if name == "FROM":
            self._from(rest)
        elif name == "WORKDIR":
            self.workdir = _joined(self.workdir, rest)
        elif name == "ENV":
            self.env |= _variables(rest)
        else:
            self.copies.append(self._copy(rest))

    def _from(self, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        if self.image or not words or words[0] == "scratch":
            raise NeedsBuildError("only one FROM, of an image that exists, needs no build")
        self.image = words[0]

    def _copy(self, rest: str) -> Copy:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        if any(word.startswith("--") or set(word) & set("*?[") for word in words):
            raise NeedsBuildError("COPY with an option or a pattern")
        if len(words) < 2:
            raise NeedsBuildError("COPY names no target")
        *sources, target = words
        joined = _joined(self.workdir, target)
        is_folder = target.endswith("/") or posixpath.basename(target) in {".", ".."}
        return Copy(tuple(sources), joined.rstrip("/") + "/" if is_folder else joined, self.workdir)


def last_workdir(text: str) -> str | None:
    """Return the working directory with which the Dockerfile ends, also of one that needs a build; None if unsaid."""
    workdir = None
    for _, name, rest in _instructions(text):
        if name == "FROM":
            workdir = None
        elif name == "WORKDIR" and "$" not in rest:
            workdir = _joined(workdir or "/", rest)
    return workdir


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, instruction and its arguments, with continued lines joined and comments left out."""
    began, joined = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        began = began if joined else number
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        if joined.strip():
            name, _, rest = joined.strip().partition(" ")
            yield began, name.upper(), rest.strip()
        joined = ""


def _variables(rest: str) -> dict[str, str]:
    first = rest.split(maxsplit=1)[0] if rest else ""
    if "=" not in first:  # the older form: one name, and the rest of the line
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    pairs = [word.partition("=") for word in shlex.split(rest)]
    if not all(re.fullmatch(r"\w+", name) for name, _, _ in pairs):
        raise NeedsBuildError("ENV is not of the form NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _joined(base: str, path: str) -> str:
    words = shlex.split(path)
    return posixpath.normpath(posixpath.join(base, words[0] if words else ""))
