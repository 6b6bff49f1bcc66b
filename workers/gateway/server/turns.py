"""The turns of one rollout, and how they follow from each other.

A call is kept as it came (`Answered`) until somebody asks, or the event loop has nothing else to do: then it becomes a
`Turn`, whose messages and tokens are shared with the turns before it. Knows no dialect and does no I/O.

Turns form branches. Within a branch each prompt begins with the whole conversation before it, message by message and,
where ids are known, token by token. A turn that does not continue the last one of a branch begins another: an earlier
point was taken up again or asked twice (``forked``), the history was changed (``edited``: compaction, dropped
reasoning), its tokens are others for the same messages (``retokenised``), or it is a conversation of its own (``new``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from workers.gateway.server.answers import Message, answer_message, normalise
from workers.gateway.server.packing import pack, unpack
from workers.gateway.server.scan import completion_of, tolerant_loads
from workers.gateway.server.streaming import CompletionAssembler
from workers.gateway.server.tokens import TokenError, Tokens, counted_tokens, read_tokens
from workers.gateway.server.tokenstore import TokenSpan, TokenStore, TokenStream, common_prefix

#: Bytes from which what waits to become a turn is kept compressed.
PACK_FROM = 64 * 1024
#: Chunks of a stream that are read at a time: half a millisecond.
_SLICE = 100
#: What a message is told apart by when conversations are compared: reasoning is often left out of a history.
_KIN = ("role", "name", "tool_calls", "tool_call_id")


@dataclass(frozen=True, slots=True)
class Payload:
    """The upstream's answer in bytes: a chat completion, or the chunks of one, a line each (``chunks``).

    ``packed``: they are zstd's, in one frame or several.
    """

    data: bytes
    chunks: bool = False
    packed: bool = False

    @classmethod
    def of(cls, data: bytes) -> Payload:
        """Return a completion's payload, compressed if it is large."""
        return cls(data) if len(data) < PACK_FROM else cls(pack(data), packed=True)

    def completion(self) -> dict[str, Any]:
        """Return it as a chat completion; raises `ValueError` when it cannot be read."""
        return self.assembled().completion() if self.chunks else completion_of(self._plain())

    def assembled(self) -> CompletionAssembler:
        """Return what puts the chunks together, with all of them in it; raises `ValueError`."""
        *_, assembler = self.assembling()
        return assembler

    def assembling(self) -> Iterator[CompletionAssembler]:
        """Do what `assembled` does, a slice at each step."""
        assembler = CompletionAssembler()
        for count, line in enumerate(self._plain().split(b"\n"), 1):
            if line:
                assembler.add(tolerant_loads(line))
            if count % _SLICE == 0:
                yield assembler
        yield assembler

    def _plain(self) -> bytes:
        return unpack(self.data) if self.packed else self.data


@dataclass(slots=True)
class Answered:
    """A call that was answered: the conversation as a chat request has it, and the answer."""

    messages: list[Message]
    answer: Payload
    extras: dict[str, Any]
    answer_id: str | None = None
    partial: bool = False
    size: int = 0  # bytes of both, about
    _reading: Iterator[CompletionAssembler] | None = None
    _read: CompletionAssembler | None = None

    def read_part(self) -> bool:
        """Read a part of a long stream ahead; return whether there is more of it to read."""
        if not self.answer.chunks:
            return False
        self._reading = self._reading or self.answer.assembling()
        try:
            self._read = next(self._reading)
        except StopIteration:
            return False
        except ValueError:
            self._reading = self._read = None  # `completion` will tell what is wrong with it
            return False
        return True

    def completion(self) -> dict[str, Any]:
        """Return the answer as a chat completion; raises `ValueError` when it cannot be read."""
        while self.read_part():
            pass
        return self._read.completion() if self._read else self.answer.completion()


@dataclass(slots=True)
class Turn:
    """One model call that was answered; ``messages`` and ``completion`` in the trajectory's shape of messages.

    ``branch`` and ``parent`` (an index) tell what it follows, ``relation`` how: ``first``, ``continues``, ``forked``,
    ``edited``, ``retokenised`` or ``new``. ``shared`` counts the leading messages, ``agreed`` the leading tokens, that
    it has in common with ``parent``; ``unseen`` the answers in its new messages that the gateway did not give.
    """

    messages: list[Message]
    completion: Message
    finish_reason: str | None = None
    span: TokenSpan | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    partial: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answer_id: str | None = None
    branch: int = 0
    parent: int | None = None
    relation: str = "first"
    shared: int = 0
    agreed: int | None = None
    unseen: int = 0

    @property
    def tokens(self) -> Tokens | None:
        """The turn's tokens, whole."""
        return self.span.tokens() if self.span else None

    def is_truncated(self, max_seq_len: int | None) -> bool:
        """Return whether the model stopped for length, the sequence limit cut it, or the agent left in between."""
        cut = self.span is not None and self.span.is_cut(max_seq_len)
        return self.partial or self.finish_reason == "length" or cut

    def step(self, max_seq_len: int | None) -> dict[str, Any]:
        """Return the turn as a step of a trajectory."""
        tokens = self.tokens
        return {
            "prompt": self.messages,
            "completion": [self.completion],
            "tokens": tokens.as_dict(max_seq_len) if tokens else None,
            "reward": None,
            "advantage": None,
            "is_truncated": self.is_truncated(max_seq_len),
            "trajectory_id": "",
            "extras": self.extras,
        }


class Turns:
    """The settled turns of one rollout, in the order in which they were answered."""

    def __init__(self) -> None:
        self.settled: list[Turn] = []
        self.tokens = TokenStore()
        self.branches: list[list[int]] = []
        self._pool: dict[bytes, tuple[Message, bytes]] = {}
        self._ends: dict[bytes, int] = {}  # a conversation with its answer -> the turn
        self._seen: dict[bytes, int] = {}  # the beginning of a conversation -> the first turn that had it

    def settle(self, answered: Answered) -> Turn:
        """Make a turn of a call, and add it."""
        turn = Turn(messages=[], completion={}, extras=dict(answered.extras), answer_id=answered.answer_id)
        tokens = self._read(turn, answered)
        if answered.partial:
            turn.partial = turn.extras["partial"] = True
        self.add(turn, answered.messages, tokens)
        return turn

    def add(self, turn: Turn, messages: list[Message], tokens: Tokens | None = None) -> None:
        """Add a turn: share its messages, find what it follows, and keep ``tokens`` unless it has a span already."""
        entries = [self._shared(normalise(message)) for message in messages]
        turn.messages = [message for message, _ in entries]
        turn.completion, kin = self._shared(turn.completion)
        chains = _chains([kin for _, kin in entries])
        continues = self._relate(turn, chains)
        if tokens is not None:
            turn.span = self.tokens.add(tokens, self._near(turn))
        if continues and turn.parent is not None:
            self._continue(turn, self.settled[turn.parent])
        index = len(self.settled)
        if turn.relation == "continues":
            self.branches[turn.branch].append(index)
        else:
            turn.branch = len(self.branches)
            self.branches.append([index])
        for chain in chains:
            self._seen.setdefault(chain, index)
        self._ends[_link(chains[-1] if chains else b"", kin)] = index
        self.settled.append(turn)

    def answered(self, answer_id: str) -> Turn | None:
        """Return the turn whose answer had this id."""
        return next((turn for turn in reversed(self.settled) if turn.answer_id == answer_id), None)

    def _read(self, turn: Turn, answered: Answered) -> Tokens | None:
        try:
            completion = answered.completion()
            choice = completion["choices"][0]
            turn.completion = answer_message(choice["message"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            turn.completion = answer_message({})
            turn.extras["record_error"] = f"the answer cannot be read: {error}"
            return None
        turn.finish_reason = choice.get("finish_reason")
        tokens = None
        try:
            tokens = read_tokens(completion)
        except TokenError as error:
            turn.extras["token_error"] = str(error)
        turn.prompt_tokens, turn.completion_tokens = counted_tokens(completion, tokens)
        if len(completion["choices"]) > 1:
            turn.extras["choices"] = len(completion["choices"])  # the agent got them all, the step holds the first
        return tokens

    def _relate(self, turn: Turn, chains: list[bytes]) -> bool:
        """Set what the turn follows, and how; return whether its conversation continues an earlier one's whole."""
        ends = [(at, self._ends[chain]) for at, chain in enumerate(chains, 1) if chain in self._ends]
        common = next((at for at, chain in enumerate(chains) if chain not in self._seen), len(chains))
        if ends:
            turn.shared, turn.parent = ends[-1]
            turn.unseen = sum(message.get("role") == "assistant" for message in turn.messages[turn.shared :])
            return True
        if self.settled:
            known = common and any(message.get("role") != "system" for message in turn.messages[:common])
            turn.shared, turn.relation = common, "new"
            if known:
                turn.parent = self._seen[chains[common - 1]]
                turn.relation = "forked" if common == len(chains) else "edited"
        return False

    def _near(self, turn: Turn) -> list[TokenStream]:
        """Return the streams that the turn's prompt may continue: those of what it follows, and of the last turn."""
        turns = [] if turn.parent is None else [self.settled[turn.parent]]
        spans = [each.span for each in [*turns, *self.settled[-1:]]]
        return [span.stream for span in spans if span is not None]

    def _continue(self, turn: Turn, parent: Turn) -> None:
        is_last = self.branches[parent.branch][-1] == turn.parent
        turn.relation, turn.branch = ("continues", parent.branch) if is_last else ("forked", 0)
        if turn.span is None or parent.span is None or not turn.span.prompt_end:
            return
        if turn.span.stream is parent.span.stream and turn.span.prompt_end >= parent.span.end:
            return
        before = parent.span.stream.ids(0, parent.span.end)
        turn.agreed = common_prefix(before, turn.span.stream.ids(0, turn.span.prompt_end))
        if turn.agreed == len(before):
            turn.agreed = None
        else:
            same = zip([*parent.messages, parent.completion], turn.messages, strict=False)
            turn.relation = "retokenised" if all(old is new for old, new in same) else "edited"

    def _shared(self, message: Message) -> tuple[Message, bytes]:
        """Return the one copy of ``message`` that all turns use, and its digest as part of a conversation."""
        exact = _digest(message)
        entry = self._pool.get(exact)
        if entry is None:
            entry = self._pool[exact] = (message, _digest([message.get("content") or "", *map(message.get, _KIN)]))
        return entry


def _digest(value: Any) -> bytes:
    written = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(written, digest_size=16).digest()


def _link(chain: bytes, kin: bytes) -> bytes:
    return hashlib.blake2b(chain + kin, digest_size=16).digest()


def _chains(kins: list[bytes]) -> list[bytes]:
    """Return for each beginning of a conversation a digest of it."""
    chains: list[bytes] = []
    for kin in kins:
        chains.append(_link(chains[-1] if chains else b"", kin))
    return chains
