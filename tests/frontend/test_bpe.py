from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as NativeTokenizer

from fakes.checkpoints import qwen3_folder
from fourhop.checkpoint import DEFAULT_MODEL, find
from fourhop.frontend.bpe import COVERED, MARKS, MAX_WHITESPACE, WORDS, FastBPE, byte_symbols, prove

Pair = tuple[NativeTokenizer, FastBPE]

SYMBOLS = {byte: symbol for symbol, byte in byte_symbols().items()}
COVERED_CHARACTERS = re.findall(f"[{COVERED}]", "".join(map(chr, [*range(0xD800), *range(0xE000, 0x20000)])))
GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    """Qwen3's tokenizer, and the default model's, whose digits may also be cut off one by one, as in StarCoder's."""
    qwen3 = NativeTokenizer.from_file(str(qwen3_folder() / "tokenizer.json"))
    smollm2 = NativeTokenizer.from_file(str(find(DEFAULT_MODEL).folder / "tokenizer.json"))
    by_digit = NativeTokenizer.from_str(smollm2.to_str())
    by_digit.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_WORDS])
    return {"qwen3": _proven(qwen3), "smollm2": _proven(smollm2), "smollm2 by digit": _proven(by_digit)}


def _proven(native: NativeTokenizer) -> Pair:
    fast = prove(native)
    assert fast is not None
    return native, fast


def same(pair: Pair, text: str) -> bool:
    """Whether both give the same ids. Fails where the fast one does not encode at all."""
    native, fast = pair
    return fast.encode(text) == list(native.encode(text, add_special_tokens=False).ids)


NAMES = ["qwen3", "smollm2", "smollm2 by digit"]
SNIPPETS = [
    "    return {key: value for key, value in items.items() if value is not None}\n",
    'def f(self, *, n: int = 0) -> list[str]:\n\t"""Doc."""\n\n\n    ',
    '{"name": "search", "arguments": {"query": "a/b <c> & \'d\'", "limit": 25, "x": [1.5e-3, null, true]}}',
    "I'm sure they'LL say it's what we'd've done; y'all'd agree, don'T you? 'sad 'ree",
    "https://example.org/a?b=c&d=%20#frag  \r\n\r\n\t\t\r\n   x\n\n\n   ",
    "Zürich, naïve façade, Ελληνικά, русский текст, עברית, 中文字符，日本語のテキスト。한국어 🙂👋🏽 ½ ² Ⅷ ٣",
    "0123456789 3.14159 1,000,000 12/31/1999 ==== ---- **** ##### ....",
]
ascii_text = st.text(st.characters(max_codepoint=0x7E, min_codepoint=0x20))
spaces = st.text(st.sampled_from(" \t\n\r\x0b\x0c"), min_size=1, max_size=12)
covered_text = st.text(st.sampled_from(COVERED_CHARACTERS), max_size=20)
digits = st.text(st.sampled_from("0123456789 "), max_size=8)
contractions = st.sampled_from(["'s", "'T", "'re", "'VE", "'m", "'lL", "'d", "''", "'", "'x", "n't"])
mixed = st.lists(st.one_of(ascii_text, spaces, contractions, digits, st.sampled_from(SNIPPETS))).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(text=mixed)
def test_ascii_is_the_same(pairs: dict[str, Pair], name: str, text: str) -> None:
    native, fast = pairs[name]
    if fast.covers(text):
        assert same((native, fast), text)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.lists(st.one_of(covered_text, spaces, ascii_text)).map("".join))
def test_covered_characters_are_the_same(pairs: dict[str, Pair], name: str, text: str) -> None:
    native, fast = pairs[name]
    if fast.covers(text):
        assert same((native, fast), text)


@pytest.mark.parametrize("name", NAMES)
def test_prose_code_and_json_are_covered(pairs: dict[str, Pair], name: str) -> None:
    shuffled = random.Random(3)
    for _ in range(50):
        assert same(pairs[name], "".join(shuffled.choices(SNIPPETS, k=10)))


def test_random_ascii(pairs: dict[str, Pair]) -> None:
    draw = random.Random(5)
    for alphabet in ("ab ", " \n", "aeiou'stdl ", "0123456789. ", "".join(map(chr, range(0x20, 0x7F)))):
        assert same(pairs["qwen3"], "".join(draw.choices(alphabet, k=20_000)))


def test_both_regex_engines_agree_on_every_covered_character() -> None:
    everything = "".join(COVERED_CHARACTERS)
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    for kind in (r"\s", r"\p{L}", r"\p{N}", "(?i:[stremvld'])", r"[\r\n]"):
        only = tiktoken.Encoding("kind", pat_str=kind, mergeable_ranks=single_bytes, special_tokens={})
        theirs = pre_tokenizers.Split(Regex(f"{kind}+"), "removed", invert=True)
        found = bytes(only.encode_ordinary(everything)).decode()
        assert found == "".join(text for text, _ in theirs.pre_tokenize_str(everything))


def test_no_covered_character_but_a_mark_joins_the_one_before() -> None:
    """So that the normal form of a text's characters beyond ASCII is that of the text."""
    decompositions = [unicodedata.normalize("NFD", chr(c)) for c in range(0x110000)]
    joining = {character for decomposed in decompositions for character in decomposed[1:]}
    marks = {character for character in COVERED_CHARACTERS if unicodedata.combining(character)}
    assert joining.intersection(COVERED_CHARACTERS) <= marks == set(re.findall(f"[{MARKS}]", "".join(marks)))


@pytest.mark.parametrize("expression", sorted(WORDS))
def test_every_expression_takes_every_character(expression: str) -> None:
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("words", pat_str=expression, mergeable_ranks=single_bytes, special_tokens={})
    text = "".join(f"{character} '{character}1" for character in COVERED_CHARACTERS)
    assert bytes(encoding.encode_ordinary(text)) == text.encode()


@pytest.mark.parametrize("text", ["\u017f", "'\u017f", "\u212a", "\ue000", "\U000e0001", "\u180e", "e\u0301"])
def test_what_is_not_proven_is_left_to_the_other(pairs: dict[str, Pair], text: str) -> None:
    assert pairs["qwen3"][1].encode(text) is None


def test_a_character_that_the_vocabulary_lacks_is_not_covered(pairs: dict[str, Pair]) -> None:
    assert not pairs["smollm2"][1].covers("a\x04")
    assert pairs["qwen3"][1].covers("a\x04")


@pytest.mark.parametrize("end", ["", "x"])
def test_long_whitespace(pairs: dict[str, Pair], end: str) -> None:
    assert same(pairs["qwen3"], " \t" * (MAX_WHITESPACE // 2) + end)
    assert pairs["qwen3"][1].encode(" " * (MAX_WHITESPACE + 1) + end) is None
    assert same(pairs["qwen3"], "ab  " * (MAX_WHITESPACE // 2) + end)


def byte_level(merges: Sequence[tuple[str, str]], ids: Sequence[int] | None = None, **options: Any) -> NativeTokenizer:
    """A vocabulary of all bytes and the results of merges, numbered in their order or by `ids`."""
    vocab = {SYMBOLS[byte]: byte for byte in range(256)}
    results = dict.fromkeys(left + right for left, right in merges)
    vocab |= dict(zip(results, ids or range(256, 256 + len(results)), strict=True))
    native = NativeTokenizer(models.BPE(vocab=vocab, merges=list(merges), **options))
    native.pre_tokenizer = GPT2_WORDS
    return native


@st.composite
def merge_lists(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Merges of tokens that exist by then, over three letters; no two make the same token."""
    tokens, merges = ["a", "b", "c"], []
    for _ in range(draw(st.integers(1, 8))):
        left, right = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if left + right not in tokens:
            tokens.append(left + right)
            merges.append((left, right))
    return merges


@given(merges=merge_lists(), texts=st.lists(st.text("abc", min_size=1, max_size=30), min_size=1))
def test_what_is_proven_is_the_same_for_any_vocabulary(merges: list[tuple[str, str]], texts: list[str]) -> None:
    native = byte_level(merges)
    fast = prove(native)
    if fast is not None:
        assert all(same((native, fast), text) for text in texts)


def test_a_token_that_its_bytes_do_not_become_is_no_proof() -> None:
    native = byte_level([("b", "c"), ("a", "b"), ("ab", "c")])
    assert native.encode("abc").tokens == ["a", "bc"]  # tiktoken would make it the token abc
    assert prove(native) is None


def test_ids_out_of_order_are_no_proof() -> None:
    assert prove(byte_level([("a", "b"), ("b", "c")], [256, 257])) is not None
    assert prove(byte_level([("a", "b"), ("b", "c")], [257, 256])) is None


def test_two_merges_to_one_token_are_no_proof() -> None:
    assert prove(byte_level([("a", "a"), ("aa", "a"), ("a", "aa")])) is None


@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {"ignore_merges": True}, {"end_of_word_suffix": "</w>"}], ids=lambda o: next(iter(o))
)
def test_models_that_do_more_than_merge_are_no_proof(options: dict[str, Any]) -> None:
    suffixed = {"end_of_word_suffix"} & options.keys()
    assert prove(byte_level([] if suffixed else [("a", "b")], **options)) is None


def test_steps_that_are_not_known_are_no_proof() -> None:
    lowercase, expression, prefix = (byte_level([("a", "b")]) for _ in range(3))
    lowercase.normalizer = normalizers.Lowercase()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expression.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated"), plain])
    prefix.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert [prove(native) for native in (lowercase, expression, prefix)] == [None, None, None]


def test_an_added_token_that_is_normalized_is_no_proof() -> None:
    native = byte_level([("a", "b")])
    native.add_tokens([AddedToken("<x>", normalized=True)])
    assert prove(native) is None


def test_a_vocabulary_without_a_byte_of_covered_characters_is_no_proof() -> None:
    vocab = {SYMBOLS[byte]: byte for byte in range(256) if byte != 0xC3}
    native = NativeTokenizer(models.BPE(vocab=vocab, merges=[]))
    native.pre_tokenizer = GPT2_WORDS
    assert prove(native) is None


def test_a_proof_that_is_stopped_is_none() -> None:
    assert prove(byte_level([("a", "b")]), lambda: True) is None
