from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.derendering import PIECE_BOS, PIECES, piece_toy, toy
from fakes.toy import BOS, EOS, THINK
from fourhop.frontend.detokenize import Detokenizer
from fourhop.frontend.tokenizer import Tokenizer

A, DOT, IT, SPACE, X = (256 + PIECES.index(piece) for piece in ("▁a", ".", "▁It", "▁", "▁x"))


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    """One text a token, and the flushed end."""
    skipped = tokenizer.special_ids if skip else frozenset()
    detokenizer = Detokenizer.after(prompt, tokenizer, skipped)
    visible = [token_id for token_id in output if token_id not in skipped]
    return [*(detokenizer.feed(detokenizer.piece(t, tokenizer)) for t in visible), detokenizer.flush()]


def minus_prompt(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """The decoding of prompt and output minus that of the prompt, a half character at its end counted out."""
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    return whole.removeprefix(tokenizer.decode(prompt, skip_special_tokens=skip))


def test_a_prompt_that_ends_in_half_a_character_does_not_leak() -> None:
    """Case 22."""
    texts = pieces(toy(), [*b"Hi ", 240, 159, 145], [139, 33])
    assert texts == ["👋", "!", ""]


def test_half_a_character_of_the_prompt_that_is_never_completed_stays_the_prompts() -> None:
    assert "".join(pieces(toy(), [*b"Hi ", 240, 159], [33])) == "!"
    assert "".join(pieces(toy(), [*b"Hi ", 240, 159], [])) == ""


def test_invalid_bytes_are_released_within_four_tokens() -> None:
    """Case 25."""
    ids = [65, 255, 255, 226, 130, 66, 172, 67]
    assert pieces(toy(), [], ids) == ["A", "�", "�", "", "", "�B", "�", "C", ""]


def test_random_bytes_equal_the_decoding_in_one_piece() -> None:
    """Case 25."""
    ids = [random.Random(7).randrange(256) for _ in range(300)]
    texts = pieces(toy(), [], ids)
    assert "".join(texts) == bytes(ids).decode("utf-8", "replace") == toy().decode(ids)
    num_silent = max(len(run) for run in "".join("." if text else " " for text in texts).split("."))
    assert num_silent <= 3


@pytest.mark.parametrize("prompt", [[], [PIECE_BOS], [A], [PIECE_BOS, A, DOT]])
@pytest.mark.parametrize("output", [[A, DOT, IT], [SPACE, X], [SPACE, SPACE, SPACE, X], [PIECE_BOS, A], [DOT], []])
@pytest.mark.parametrize("skip", [True, False])
def test_piece_vocabularies_keep_their_spaces(prompt: list[int], output: list[int], skip: bool) -> None:
    """Case 26: one space is trimmed, only at the very start of prompt and output together."""
    assert "".join(pieces(piece_toy(), prompt, output, skip=skip)) == minus_prompt(
        piece_toy(), prompt, output, skip=skip
    )


def test_spaces_in_words() -> None:
    """Case 26."""
    assert "".join(pieces(piece_toy(), [], [A, DOT, IT])) == "a. It"
    assert "".join(pieces(piece_toy(), [A], [IT])) == " It"
    assert "".join(pieces(piece_toy(), [], [SPACE, SPACE, SPACE, X])) == "   x"


def test_byte_level_vocabularies_are_not_trimmed() -> None:
    """Case 26."""
    assert "".join(pieces(toy(), [], [*b" a"])) == " a"


def test_special_tokens_are_left_out_or_kept() -> None:
    assert "".join(pieces(toy(), [], [BOS, 97, THINK, EOS])) == "a<think>"
    assert "".join(pieces(toy(), [], [BOS, 97, EOS], skip=False)) == "<s>a</s>"


def test_a_skipped_token_does_not_split_a_character() -> None:
    ids = [240, 159, EOS, 145, 139]
    assert "".join(pieces(toy(), [], ids)) == "👋" == toy().decode(ids)


@given(
    prompt=st.lists(st.integers(0, PIECE_BOS), max_size=6).filter(lambda ids: all(i >= 256 or i < 128 for i in ids)),
    output=st.lists(st.integers(256, PIECE_BOS) | st.integers(32, 126), max_size=12),
)
def test_pieces_add_up_to_the_decoding_minus_the_prompts(prompt: list[int], output: list[int]) -> None:
    assert "".join(pieces(piece_toy(), prompt, output)) == minus_prompt(piece_toy(), prompt, output)


@given(prompt=st.lists(st.integers(0, 263), max_size=8), output=st.lists(st.integers(0, 263), max_size=16))
def test_bytes_add_up_to_the_decoding_minus_the_prompts(prompt: list[int], output: list[int]) -> None:
    tokenizer = toy()
    whole, before = tokenizer.decode(prompt + output), tokenizer.decode(prompt)
    if not whole.startswith(before):  # the output completes the prompt's last character
        before = before[:-1]
    assert "".join(pieces(tokenizer, prompt, output)) == whole.removeprefix(before)


@given(text=st.text(max_size=40), data=st.data())
def test_no_piece_splits_a_character(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    assert "�" in text or "�" not in "".join(pieces(toy(), [], ids))
    for piece in pieces(toy(), [], ids):
        assert piece in text
