"""Packs files into a request: a tar.gz as base64, whose bytes depend on names, contents and execute bits alone."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

#: Bytes of one pack, and what it may unpack to. Every sample of a task carries its packs through Redis.
PACK_LIMIT, UNPACKED_LIMIT, FILES_LIMIT = 4 * 1024**2, 64 * 1024**2, 1000

_SMALLER = "put large files into the image, or fetch them in the sandbox"


class PackingError(Exception):
    """Files cannot be packed; the message names what is too large, or no ordinary file."""


def walk(folder: Path) -> dict[str, Path]:
    """Return the files below ``folder`` by their relative paths, in order, without what Python leaves behind.

    Raises `PackingError` for anything that is neither a file nor a folder: a link would show another file's content.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise PackingError(f"{path.relative_to(folder.parent)} is a link or no ordinary file; put a copy there")
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path
    return found


def pack(what: str, files: Mapping[str, Path]) -> str:
    """Return ``files``, by their relative paths, packed; raises `PackingError` naming ``what`` above the limits."""
    if len(files) > FILES_LIMIT:
        raise PackingError(f"{what}: {len(files)} files are more than {FILES_LIMIT}; {_SMALLER}")
    size = sum(path.stat().st_size for path in files.values())
    if size > UNPACKED_LIMIT:
        raise PackingError(f"{what}: {size} bytes are more than {UNPACKED_LIMIT}; {_SMALLER}")
    packed = gzip.compress(_archived(files), mtime=0)
    if len(packed) > PACK_LIMIT:
        raise PackingError(f"{what}: {len(packed)} bytes packed are more than {PACK_LIMIT}; {_SMALLER}")
    return base64.b64encode(packed).decode()


def _archived(files: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in files.items():
            content = path.read_bytes()
            member = tarfile.TarInfo(name)  # of no owner, and from 1970
            member.size, member.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
