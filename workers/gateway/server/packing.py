"""Compression of what is kept for the record: light, and with one context a thread.

To make zstd's context for each block of a stream took longer than to compress it, and a thousand streams that began
together come to the end of a block together: each of their chunks waited for all of these.
"""

from __future__ import annotations

import threading

import zstandard

_LEVEL = 1
_contexts = threading.local()


def pack(data: bytes) -> bytes:
    """Return ``data`` as one zstd frame."""
    try:
        context = _contexts.packing
    except AttributeError:
        context = _contexts.packing = zstandard.ZstdCompressor(level=_LEVEL)
    packed: bytes = context.compress(data)
    return packed


def unpack(data: bytes) -> bytes:
    """Return what is in one frame, or in several that follow each other."""
    return zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(data)
