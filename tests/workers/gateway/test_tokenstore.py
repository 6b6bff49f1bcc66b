"""Prefix-shared tokens: whatever the turns, each gets back exactly what it put in."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from workers.gateway.server.tokens import Tokens
from workers.gateway.server.tokenstore import TokenStore, common_prefix

IDS = st.lists(st.integers(0, 2), max_size=6)


def tokens(prompt: list[int], completion: list[int]) -> Tokens:
    logprobs = array("d", [-0.5] * len(completion))
    return Tokens(array("i", prompt), array("i", completion), logprobs, len(prompt))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), IDS, IDS), max_size=8))
def test_every_turn_gets_its_own_tokens_back(turns: list[tuple[int, int, list[int], list[int]]]) -> None:
    """Each turn goes on from a part of an earlier one's tokens, with some that are new."""
    store, known, spans = TokenStore(), list[list[int]](), []
    for which, keep, new, completion in turns:
        earlier = which % len(known) if known else 0
        prompt = (known[earlier][:keep] if known else []) + new
        near = [spans[earlier].stream, spans[-1].stream] if known else []
        spans.append(store.add(tokens(prompt, completion), near))
        known.append(prompt + completion)
    found = [span.tokens() for span in spans]
    assert [each.prompt_ids.tolist() + each.completion_ids.tolist() for each in found] == known
    assert sum(len(stream.own) for stream in store.streams) <= sum(map(len, known))


def test_a_growing_conversation_is_kept_once() -> None:
    store, ids, near = TokenStore(), list[int](), []
    for turn in range(50):
        ids += [turn] * 10
        near = [store.add(tokens(ids, [7, 7]), near).stream]
        ids += [7, 7]
    assert [len(stream.own) for stream in store.streams] == [50 * 12]


def test_forks_of_forks_are_as_deep_as_one_likes() -> None:
    store, near, prompt = TokenStore(), [], [0]
    for turn in range(3000):
        span = store.add(tokens(prompt, [1]), near)
        prompt, near = [*prompt[-50:], 2 + turn], [span.stream]
    assert span.tokens().completion_ids.tolist() == [1]


@given(IDS, IDS)
def test_the_common_prefix(one: list[int], other: list[int]) -> None:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert common_prefix(array("i", one), array("i", other)) == count
