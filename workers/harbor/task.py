"""What a request carries of a Harbor task: its arguments, and folders packed by `producer.packing`.

A request may come from anywhere, so nothing here trusts it: a pack is unpacked in memory, within bounds, and holds
ordinary files below one folder and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from producer.contract import RolloutRequest, Seconds
from producer.harbor import Variables
from producer.packing import FILES_LIMIT, PACK_LIMIT, UNPACKED_LIMIT
from workers.errors import InvalidRolloutError

#: Bytes that a tar archive may need besides its files' contents: two blocks and padding for each, and its end.
#: Bytes of the header that holds a long or foreign name.
_LONGEST_HEADER = 4096
_TAR_OVERHEAD = FILES_LIMIT * 4096 + 20480
_GZIP = 16 + zlib.MAX_WBITS

#: The absolute paths that tasks of this format name. They are a container's own; where a sandbox is a mere folder,
#: texts are changed to name them below it.
_WELL_KNOWN = re.compile(r"(?<![\w./~$}-])/(?:app|logs|root|solution|tests|tmp|workspace)(?![\w.-])")


class VerifierArguments(BaseModel):
    """The verifier's seconds and variables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: Seconds = 600.0
    env: Variables = Field(default_factory=dict)


class HarborArguments(BaseModel):
    """The request's ``environment_args``. ``tests``, ``files`` and ``solution`` are packed folders.

    ``files`` are laid over the image from its root before the agent starts. ``workdir`` is where agent and verifier
    run, or None for wherever the sandbox starts commands.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: str
    tests: str
    files: str | None = None
    solution: str | None = None
    solution_env: Variables = Field(default_factory=dict)
    verifier: VerifierArguments = Field(default_factory=VerifierArguments)
    workdir: Annotated[str, Field(pattern=r"^/[^\x00]*$")] | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: RolloutRequest) -> HarborArguments:
        """Return the arguments of ``request``; raises `InvalidRolloutError` naming the wrong fields."""
        try:
            return cls.model_validate(request.environment_args)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
            raise InvalidRolloutError(
                f"environment_args: {'; '.join(wrong)}; `rollouts run --harbor` makes them"
            ) from None


@dataclass(frozen=True)
class PackedFile:
    """A file of a packed folder: its relative path, its content, and whether it may be executed."""

    name: str
    content: bytes
    executable: bool


def unpack(what: str, packed: str) -> list[PackedFile]:
    """Return the files of a base64 tar.gz named ``what``.

    Raises `InvalidRolloutError` for anything but ordinary files with relative paths, and above the limits of
    `producer.packing`.
    """
    if len(packed) > PACK_LIMIT * 4 // 3 + 4:
        raise InvalidRolloutError(f"environment_args.{what}: more than {PACK_LIMIT} bytes, packed")
    try:
        return _files(_inflated(base64.b64decode(packed, validate=True)))
    except (binascii.Error, zlib.error, tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        raise InvalidRolloutError(f"environment_args.{what}: cannot be unpacked: {error}") from None


def _inflated(compressed: bytes) -> bytes:
    limit = UNPACKED_LIMIT + _TAR_OVERHEAD
    inflating = zlib.decompressobj(_GZIP)
    data = inflating.decompress(compressed, limit)
    if inflating.unconsumed_tail or not inflating.eof:
        raise ValueError(f"more than {UNPACKED_LIMIT} bytes, or cut off")
    return data


def _refuse_odd_headers(data: bytes) -> None:
    """Raise `ValueError` for extension headers that no pack of ours has: reading them can take minutes.

    A long name takes one of a few hundred bytes before its file. Global ones are copied to each file that follows, and
    a chain of them is read recursively.
    """
    offset, extended = 0, False
    while (header := data[offset : offset + 512]).strip(b"\0"):
        size, kind = tarfile.nti(header[124:136]), header[156:157]  # type: ignore[attr-defined]
        is_extension = kind in {tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME}
        if kind == tarfile.XGLTYPE or size < 0 or (is_extension and (extended or size > _LONGEST_HEADER)):
            raise ValueError("a header that no pack of `rollouts run --harbor` has")
        extended = is_extension
        offset += 512 + (size + 511) // 512 * 512


def _files(data: bytes) -> list[PackedFile]:
    _refuse_odd_headers(data)
    found: dict[str, PackedFile] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for number, member in enumerate(archive, start=1):
            if number > FILES_LIMIT:
                raise ValueError(f"more than {FILES_LIMIT} files")
            name = _relative(member.name)
            # A sparse file is an ordinary one by its type, and may claim any size.
            if member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE} or member.sparse is not None:
                raise ValueError(f"{name!r} is no ordinary file")
            content = archive.extractfile(member)
            if name in found or content is None:
                raise ValueError(f"{name!r} comes twice")
            found[name] = PackedFile(name, content.read(), bool(member.mode & 0o100))
    return list(found.values())


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\x00" in name:
        raise ValueError(f"{name[:100]!r} is no path below the folder")
    return str(path)


def relocated(text: str, root: str) -> str:
    """Return ``text`` with the format's absolute paths moved below ``root``; as it is if ``root`` is empty."""
    return _WELL_KNOWN.sub(lambda found: root + found.group(), text) if root else text


def relocated_bytes(content: bytes, root: str) -> bytes:
    """Do what `relocated` does, to the content of a file; one that is not UTF-8 text stays as it is."""
    if not root or b"\x00" in content:
        return content
    try:
        return relocated(content.decode(), root).encode()
    except UnicodeDecodeError:
        return content
