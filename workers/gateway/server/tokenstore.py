"""The tokens of a rollout's turns, each kept once: a turn's prompt is mostly the prompt and answer of the one before.

A `TokenStream` is a sequence of ids that only grows: prompt, answer, what the environment said, answer, and so on. A
turn whose prompt does not begin with all of an existing stream starts a stream of its own, which shares what they have
in common with the one it parts from. 4 bytes for an id, 8 for a logprob; n turns of an n-fold growing conversation take
as much memory as its last turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from workers.gateway.server.packing import pack, unpack
from workers.gateway.server.tokens import Tokens

Ids: TypeAlias = "array[int]"


@dataclass(slots=True, eq=False)
class TokenStream:
    """A growing sequence of ids: the first ``shared`` of ``parent``'s, then its own."""

    index: int
    parent: TokenStream | None
    shared: int
    own: Ids = field(default_factory=lambda: array("i"))
    spans: list[TokenSpan] = field(default_factory=list)

    def __len__(self) -> int:
        return self.shared + len(self.own)

    def ids(self, start: int, end: int) -> Ids:
        """Return the ids from ``start`` to ``end``."""
        parts: list[Ids] = []
        stream: TokenStream | None = self
        while stream is not None and start < end:  # from the end backwards, through whom each stream parted from
            if end > stream.shared:
                parts.append(stream.own[max(0, start - stream.shared) : end - stream.shared])
                end = max(start, stream.shared)
            stream = stream.parent
        found: Ids = array("i")
        for part in reversed(parts):
            found += part
        return found

    def agrees_until(self, ids: Ids) -> int:
        """Return how many leading ids are the same in this stream and in ``ids``."""
        return common_prefix(self.ids(0, len(self)), ids)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Where a turn's tokens are: the prompt ends at ``prompt_end`` of its stream, the completion at ``end``."""

    stream: TokenStream
    prompt_end: int
    end: int
    logprobs: array[float]
    prompt_length: int
    experts: bytes | None = None

    def tokens(self) -> Tokens:
        """Return the turn's tokens, whole."""
        return Tokens(
            prompt_ids=self.stream.ids(0, self.prompt_end),
            completion_ids=self.stream.ids(self.prompt_end, self.end),
            logprobs=self.logprobs,
            prompt_length=self.prompt_length,
            routed_experts=unpacked(self.experts),
        )

    def is_cut(self, max_seq_len: int | None) -> bool:
        """Return whether ``max_seq_len`` cuts prompt plus completion."""
        return max_seq_len is not None and self.prompt_length + self.end - self.prompt_end > max_seq_len


class TokenStore:
    """The streams of one rollout."""

    def __init__(self) -> None:
        self.streams: list[TokenStream] = []

    def add(self, tokens: Tokens, near: list[TokenStream]) -> TokenSpan:
        """Keep a turn's tokens; ``near`` are the streams that its prompt may have much in common with."""
        prompt = tokens.prompt_ids
        best, agreed = _closest(near, prompt)
        continues = best is not None and agreed == len(best)
        stream = best if best is not None and continues else self.new_stream(best if agreed else None, agreed)
        stream.own += prompt[len(stream) :]
        start = len(stream)
        stream.own += tokens.completion_ids
        experts = packed(tokens.routed_experts)
        return self.mark(stream, TokenSpan(stream, start, len(stream), tokens.logprobs, tokens.prompt_length, experts))

    def new_stream(self, parent: TokenStream | None, shared: int) -> TokenStream:
        """Begin a stream with the first ``shared`` ids of ``parent``."""
        while parent is not None and shared <= parent.shared:
            parent = parent.parent  # it shares nothing of its own: the one before has all of it
        self.streams.append(TokenStream(len(self.streams), parent, shared if parent else 0))
        return self.streams[-1]

    def mark(self, stream: TokenStream, span: TokenSpan) -> TokenSpan:
        """Note where a turn's tokens are in ``stream``."""
        stream.spans.append(span)
        return span

    def spans(self) -> Iterator[TokenSpan]:
        """Yield all spans, stream by stream."""
        for stream in self.streams:
            yield from stream.spans


def common_prefix(one: Ids, other: Ids) -> int:
    """Return how many leading ids are the same; looks at halves, as whole arrays are compared by the machine."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def packed(value: Any) -> bytes | None:
    """Return a JSON value as few bytes; None for None."""
    return None if value is None else pack(orjson.dumps(value))


def unpacked(data: bytes | None) -> Any:
    """Undo `packed`."""
    return None if data is None else orjson.loads(unpack(data))


def _closest(streams: list[TokenStream], prompt: Ids) -> tuple[TokenStream | None, int]:
    best: TokenStream | None = None
    agreed = 0
    for stream in streams:
        until = stream.agrees_until(prompt)
        if until == len(stream):
            return stream, until
        if until > agreed:
            best, agreed = stream, until
    return best, agreed
