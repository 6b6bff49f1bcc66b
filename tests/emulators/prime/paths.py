"""Gives each sandbox a file tree of its own by rewriting paths; there is no container here to do it.

A sandbox's root is a folder of the host. Absolute paths into `FOLDERS` are rewritten into that root wherever the
sandbox's text names them: in commands, working directories, values of variables, and uploaded text files (also those
inside plain and gzipped tar archives). On the way out (output, downloads, reads) the root is cut off again. Uploads to
other places are mapped path by path.

The rewriting is textual. A path counts where a shell would begin a word, so ``http://host/tmp`` and ``$DIR/tmp`` are
left alone; a path that a program puts together while it runs, or that comes out of another kind of archive, is not seen
and means the host's.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import sys
import tarfile
import zlib
from contextlib import suppress
from pathlib import Path

#: Folders that a sandbox has of its own.
FOLDERS = ("tmp", "logs", "tests", "app", "solution", "workspace", "root", "home", "data", "mnt", "srv")

_BEFORE = r"(?<![\w.\-/~})\]])"
_AFTER = r"(?![\w.\-])"
_REPOSITORY = Path(__file__).resolve().parents[3]


class PathView:
    """Translates between a sandbox's paths and the host's."""

    def __init__(self, root: Path, kept: tuple[str, ...]) -> None:
        self.root = str(root)
        self._kept = kept
        self._mapped: list[str] = [f"/{folder}" for folder in FOLDERS]
        self._pattern = self._compile()
        self._way_out = re.compile(re.escape(self.root.encode()) + rb"(/)?")

    def _compile(self) -> re.Pattern[str]:
        # What is to be kept comes first: the interpreter, say, may live below /tmp.
        kept = "|".join(re.escape(path) for path in self._kept)
        mapped = "|".join(re.escape(path) for path in sorted(self._mapped, key=len, reverse=True))
        text = rf"{_BEFORE}(?:(?P<kept>{kept}){_AFTER}|(?P<path>{mapped}){_AFTER})"
        return re.compile(text)

    def enter(self, text: str) -> str:
        """Rewrite the sandbox's paths in ``text`` to the host's."""
        return self._pattern.sub(lambda m: m["kept"] or self.root + m["path"], text)

    def enter_bytes(self, content: bytes) -> bytes:
        """Rewrite the paths in a file's content, if it is text or a tar archive of text files."""
        if content.startswith(b"\x1f\x8b"):
            with suppress(OSError, EOFError, zlib.error):
                return gzip.compress(self._enter_archive(gzip.decompress(content)), 1)
            return content
        return self._enter_archive(content) if content[257:262] == b"ustar" else self._enter_text(content)

    def leave(self, content: bytes) -> bytes:
        """Cut the root off again in what the sandbox's programs wrote."""
        if self.root.encode() not in content:
            return content
        return self._way_out.sub(b"/", content)

    def locate(self, path: str, *, cwd: str = "/") -> Path:
        """Return the host's path of any of the sandbox's paths; relative ones are looked up in ``cwd``."""
        absolute = os.path.normpath(os.path.join("/", cwd, path))
        return Path(self.root + absolute) if absolute != "/" else Path(self.root)

    def own(self, path: str) -> Path:
        """Return the host's path of a file to be written, and rewrite its path from now on, wherever it is."""
        target = self.locate(path)
        absolute = str(target)[len(self.root) :]
        if absolute and not self.owns(absolute):
            parent = os.path.dirname(absolute)
            self._mapped.append(absolute if parent == "/" or os.path.isdir(parent) else parent)
            self._pattern = self._compile()
        return target

    def owns(self, path: str) -> bool:
        """Return whether a path is the sandbox's own, as opposed to its image's."""
        absolute = os.path.normpath(path)
        return any(absolute == mapped or absolute.startswith(mapped + "/") for mapped in self._mapped)

    def create(self) -> None:
        for folder in FOLDERS:
            os.makedirs(os.path.join(self.root, folder), exist_ok=True)

    def _enter_text(self, content: bytes) -> bytes:
        try:
            text = content.decode()
        except UnicodeDecodeError:
            return content
        return content if "\0" in text else self.enter(text).encode()

    def _enter_archive(self, content: bytes) -> bytes:
        try:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
                return self._copy_archive(archive)
        except tarfile.TarError:
            return self._enter_text(content)

    def _copy_archive(self, old: tarfile.TarFile) -> bytes:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member in old:
                file = old.extractfile(member) if member.isreg() else None
                if file is None:
                    new.addfile(member)
                else:
                    content = self._enter_text(file.read())
                    member.size = len(content)
                    new.addfile(member, io.BytesIO(content))
        return target.getvalue()


def kept_paths(directory: Path, extra: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return what is never rewritten, though it may lie in one of `FOLDERS`: this emulator, Python, the repository."""
    paths = {str(directory), sys.prefix, sys.base_prefix, sys.exec_prefix, str(_REPOSITORY), *extra}
    paths |= {os.path.dirname(sys.executable), os.path.dirname(os.path.realpath(sys.executable))}
    return tuple(sorted((path for path in paths if path != "/"), key=len, reverse=True))
