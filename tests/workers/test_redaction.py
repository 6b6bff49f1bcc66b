"""Secrets in what is shown: whole ones, and what a cut has left of one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import keep_head_and_tail
from workers.redaction import redacted, redacted_output
from workers.sandboxes.prime_output import keep_ends

SECRET = "hf_Zq8€\"'\\w0rTyPeX-9"


@pytest.mark.parametrize("form", [SECRET, json.dumps(SECRET), json.dumps(SECRET, ensure_ascii=False), repr(SECRET)])
def test_a_whole_secret_however_it_is_written(form: str) -> None:
    shown = redacted(f"key {form}, key {form}", {"KEY": SECRET})
    assert shown.count("[redacted KEY]") == 2
    assert "w0rT" not in shown


def pieces(shown: str, secret: str) -> list[str]:
    """Return the beginnings and ends of ``secret`` of four characters that ``shown`` has."""
    return [piece for piece in (secret[:4], secret[-4:]) if piece in shown]


@pytest.mark.parametrize("at", range(len(SECRET.encode()) + 1))
@pytest.mark.parametrize("cut", [keep_ends, keep_head_and_tail])
def test_nothing_is_left_of_a_secret_through_which_a_text_was_cut(at: int, cut: object) -> None:
    limit = 400
    assert callable(cut)
    for text in ("." * (limit // 2 - at) + SECRET + "." * 999, "." * 999 + SECRET + "." * (limit // 2 - at)):
        assert pieces(redacted(cut(text, limit), {"KEY": SECRET}), SECRET) == []


@given(
    secret=st.text(alphabet="ab\n€", min_size=4, max_size=12),
    before=st.text(alphabet="ab\n.", max_size=40),
    at=st.integers(min_value=4, max_value=11),
)
def test_a_piece_beside_a_cut_goes_whatever_stands_around_it(secret: str, before: str, at: int) -> None:
    piece = secret[:at]
    shown = redacted(f"{before}{piece}\n... [7 bytes cut] ...\n{secret[-at:]} and more", {"KEY": secret})
    head, _, tail = shown.partition("\n... [7 bytes cut] ...\n")
    assert len(piece) < 4 or not head.endswith(piece)
    assert not tail.startswith(secret[-at:])


def test_the_beginning_of_a_command_in_a_message() -> None:
    message = f"could not run 'curl -H {SECRET[:9]}...' (timeout 5 s)"
    assert redacted(message, {"KEY": SECRET}) == "could not run 'curl -H [redacted KEY]...' (timeout 5 s)"


def test_what_only_looks_like_a_piece_stays() -> None:
    text = f"{SECRET[:6]} at the beginning, {SECRET[3:9]} and {SECRET[-6:]} within, hf_"
    assert redacted(text, {"KEY": SECRET}) == text
    assert redacted("1 and 1", {"KEY": "1"}) == "1 and 1"


@pytest.mark.parametrize("text", ["answer: see http", "xyz is the answer: see http", "/xyz", "http...", "see http\n"])
def test_output_that_holds_no_secret_stays_as_it_is_at_its_ends_too(text: str) -> None:
    secrets = {"URL": "http://internal/xyz"}
    assert redacted_output(text, secrets, unfinished=False) == text
    assert redacted_output(text, secrets, unfinished=True) == text
    assert redacted(text.removesuffix("..."), secrets) == text.removesuffix("...")


@pytest.mark.parametrize("size", range(8, len(SECRET)))
def test_output_that_was_read_while_it_was_printed_may_end_within_a_secret(size: int) -> None:
    text = f"key: {SECRET[:size]}"
    assert redacted_output(text, {"KEY": SECRET}, unfinished=True) == "key: [redacted KEY]"
    assert redacted_output(text, {"KEY": SECRET}, unfinished=False) == text


def test_a_text_that_is_made_of_pieces_takes_no_time() -> None:
    text = (SECRET[:4] + "\n... [1 bytes cut] ...\n") * 2500
    assert SECRET[:4] not in redacted(text, {"KEY": SECRET * 80})
