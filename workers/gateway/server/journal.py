"""The journal: every registration and every answered call, in files that a restarted gateway reads.

An entry is written (one `writev`, into the system's page cache) before the agent has its answer's end: a gateway killed
by SIGKILL has lost nothing that it answered. What a dead machine loses is bounded by ``sync_interval``: a thread calls
`fdatasync` for all entries of that time at once.

Entries go to the end of numbered segments. When the segments hold more than twice what is alive, every living rollout
is written once more, as a snapshot with each message and token once, and the older segments are deleted: the files are
at most about twice as large as what the gateway remembers, plus four segments.

An entry: length of what follows the checksum, CRC-32 of it, kind, lengths of header and body; then header and body
(JSON) and data (the upstream's bytes). Reading ends at the first entry of a segment that is not whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from workers.gateway.server.log import Kind

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 1024 * 1024
_CHECKED = struct.Struct("<II")
_HEAD = struct.Struct("<BII")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, read back."""

    kind: Kind
    header: dict[str, Any]
    body: Any
    data: bytes


class JournalError(OSError):
    """The journal's directory cannot be used; the message says why."""


class Journal:
    """The journal of one gateway process, in ``directory``; raises `JournalError` when another process has it.

    Read it with `entries` first, then `start` writing. ``failed`` tells why the last entry could not be written (no
    space, most likely); the gateway goes on, and is not ready.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, sync_interval: float = 0.05) -> None:
        self.directory = directory
        self.failed: str | None = None
        self.size = 0
        self._segment_bytes = segment_bytes
        self._sync_interval = sync_interval
        self._alive = 0  # bytes when it was last compacted
        self._number = 0
        self._fd = -1
        self._written = 0  # bytes in the current segment
        self._lost = 0  # entries that could not be written
        self._policy: dict[str, Any] | None = None  # the last policy's header
        self._dirty = threading.Event()
        self._ended = threading.Event()
        self._finished: list[int] = []  # segments' descriptors that are to be synced and closed
        self._syncing = threading.Lock()  # who holds it may close them
        self._thread = threading.Thread(target=self._sync, name="journal", daemon=True)
        self._lock = self._take(directory)

    def entries(self) -> Iterator[Entry]:
        """Read all entries, oldest first."""
        segments = self._segments()
        for path in segments:
            content = path.read_bytes()
            self.size += len(content)
            at = 0
            while entry := _read(content, at):
                at, found = entry
                self._note(found.kind, found.header)
                yield found
            if at < len(content):
                logger.log(
                    logging.INFO if path == segments[-1] else logging.ERROR,
                    "journal segment %s ends after %d of %d bytes: an entry was not written whole",
                    path.name,
                    at,
                    len(content),
                )
        self._alive = self.size

    def start(self) -> None:
        """Begin to write, into a new segment."""
        self._open_next()
        self._thread.start()

    def write(self, kind: Kind, header: dict[str, Any], body: Any = None, data: bytes = b"") -> None:
        """Write an entry; one that cannot be written is logged, and undone."""
        self._note(kind, header)
        if self._fd < 0:
            return
        head, told = orjson.dumps(header), b"" if body is None else orjson.dumps(body)
        start = _HEAD.pack(kind, len(head), len(told))
        checksum = zlib.crc32(data, zlib.crc32(told, zlib.crc32(head, zlib.crc32(start))))
        length = len(start) + len(head) + len(told) + len(data)
        parts = [_CHECKED.pack(length, checksum), start, head, told, data]
        try:
            written = os.writev(self._fd, parts)
            if written < length + _CHECKED.size:
                _write_all(self._fd, b"".join(parts)[written:])
        except OSError as error:
            self._undo(error)
            return
        self.failed = None
        self._written += length + _CHECKED.size
        self.size += length + _CHECKED.size
        self._dirty.set()
        if self._written >= self._segment_bytes:
            self._open_next()

    @property
    def is_due(self) -> bool:
        """Whether most of the files may be of rollouts that are forgotten, or said twice."""
        return self.size > max(4 * self._segment_bytes, 2 * self._alive)

    async def compact(self, snapshots: Iterator[tuple[dict[str, Any], bytes]]) -> None:
        """Write what is alive into new segments, and delete the older ones. Lets other work go on in between."""
        if self._written or self._fd < 0:
            self._open_next()
        first, before, lost = self._number, self.size, self._lost
        if self._policy is not None:
            self.write(Kind.POLICY, self._policy)
        for header, data in snapshots:
            self.write(Kind.SNAPSHOT, header, None, data)
            await asyncio.sleep(0)
            if self._lost > lost:
                break
        if self._lost > lost or self._fd < 0:  # the older segments are all there is of it
            self._alive = self.size  # no new try at once: each would take of what room is left
            return
        await asyncio.to_thread(self._sync_all)
        for path in self._segments():
            if int(path.stem) < first:
                self.size -= path.stat().st_size
                path.unlink()
        self._alive = self.size
        logger.info("journal compacted from %d to %d bytes", before, self.size)

    def close(self) -> None:
        """Write everything through to the disk, and let the next process have the directory."""
        if self._thread.is_alive():
            self._ended.set()
            self._dirty.set()
            self._thread.join()
        if self._fd >= 0:
            self._sync_all()
            with self._syncing:
                os.close(self._fd)
                self._fd = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take(self, directory: Path) -> int:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"the journal's directory {directory} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise JournalError(
                f"another gateway writes its journal to {directory}; give each process a directory of its own"
            ) from None
        return lock

    def _segments(self) -> list[Path]:
        return sorted(self.directory.glob("[0-9]*.log"))

    def _open_next(self) -> None:
        segments = self._segments()
        number = max(self._number, int(segments[-1].stem) if segments else 0) + 1
        path = self.directory / f"{number:08d}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            opened = os.open(path, flags, 0o600)
        except OSError as error:
            self.failed = f"{path.name} cannot be made: {error.strerror}"
            logger.error("journal: %s", self.failed)  # noqa: TRY400 - the reason is in it
            return  # the segment before it grows on
        if self._fd >= 0:
            self._finished.append(self._fd)
            self._dirty.set()
        self._number, self._fd, self._written = number, opened, 0

    def _note(self, kind: Kind, header: dict[str, Any]) -> None:
        if kind is Kind.POLICY:  # of no rollout, and so in no snapshot
            self._policy = header

    def _undo(self, error: OSError) -> None:
        if self.failed is None:
            logger.error("journal: an entry could not be written: %s", error.strerror)
        self.failed = f"an entry could not be written: {error.strerror}"
        self._lost += 1
        try:
            os.ftruncate(self._fd, self._written)
        except OSError:
            self._open_next()  # half an entry stays behind: nothing may follow it in that segment

    def _sync(self) -> None:
        while not self._ended.is_set():
            self._dirty.wait()
            self._dirty.clear()
            try:
                self._sync_all()
            except OSError as error:
                logger.error("journal: not synced: %s", error.strerror)  # noqa: TRY400 - the reason is in it
            self._ended.wait(self._sync_interval)

    def _sync_all(self) -> None:
        """Write all entries through to the disk that were written when this began."""
        with self._syncing:
            os.fdatasync(self._fd)  # it may be finished meanwhile, and then once more
            while self._finished:
                os.fdatasync(self._finished[0])
                os.close(self._finished.pop(0))


def _read(content: bytes, at: int) -> tuple[int, Entry] | None:
    start = at + _CHECKED.size
    if start + _HEAD.size > len(content):
        return None
    length, checksum = _CHECKED.unpack_from(content, at)
    end = start + length
    if length < _HEAD.size or end > len(content) or zlib.crc32(memoryview(content)[start:end]) != checksum:
        return None
    kind, head, body = _HEAD.unpack_from(content, start)
    at = start + _HEAD.size
    told = content[at + head : at + head + body]
    return end, Entry(
        Kind(kind),
        orjson.loads(content[at : at + head]),
        orjson.loads(told) if told else None,
        content[at + head + body : end],
    )


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
