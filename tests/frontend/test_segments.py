from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as NativeTokenizer

from fakes.checkpoints import qwen3_folder
from fakes.toy import write_toy_checkpoint
from fourhop.checkpoint import DEFAULT_MODEL, find
from fourhop.frontend.segments import PieceCache, Segments


@pytest.fixture(scope="module")
def natives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeTokenizer]:
    toy = tmp_path_factory.mktemp("toy")
    folders = {
        "toy": write_toy_checkpoint(toy, add_bos=True),
        "smollm2": find(DEFAULT_MODEL).folder,
        "qwen3": qwen3_folder(),
    }
    return {name: NativeTokenizer.from_file(str(folder / "tokenizer.json")) for name, folder in folders.items()}


@pytest.fixture
def toy(tmp_path: Path) -> NativeTokenizer:
    return NativeTokenizer.from_file(str(write_toy_checkpoint(tmp_path) / "tokenizer.json"))


def segments(native: NativeTokenizer) -> Segments:
    made = Segments.of(native, lambda piece: list(native.encode(piece, add_special_tokens=False).ids))
    assert made is not None
    return made


def bytes_of(piece: str) -> list[int]:
    return list(piece.encode())


MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<s>", "<|im_", "<think", "<file_sep>"]
BORDERS = [" ", "  ", "\n", "\n\n", "\t ", "\r\n", "\u00a0", "e\u0301", "\u0301", "\u200b", "'s", "'S", "12"]
texts = st.lists(st.one_of(st.sampled_from(MARKS), st.sampled_from(BORDERS), st.text(max_size=12))).map("".join)


@pytest.mark.parametrize("name", ["toy", "smollm2", "qwen3"])
@given(earlier=texts, text=texts, special=st.booleans())
def test_pieces_give_the_ids_of_the_whole(
    natives: dict[str, NativeTokenizer], name: str, earlier: str, text: str, special: bool
) -> None:
    ours = segments(natives[name])
    for asked in (earlier, earlier + text, text + earlier):
        expected = natives[name].encode(asked, add_special_tokens=special).ids
        assert ours.encode(asked, add_special_tokens=special) == expected


SPLITTERS = {
    "llama2": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "gemma": (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "prefix": (normalizers.NFKC(), pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


@pytest.mark.parametrize("splitter", SPLITTERS)
@given(text=texts)
def test_other_splitters(splitter: str, text: str) -> None:
    # A model without bytes: what it does not know becomes <unk>, neighbours fused.
    native = NativeTokenizer.from_str(
        '{"model": {"type": "BPE", "vocab": {"<unk>": 0, "a": 1, "▁": 2, "▁a": 3, "e": 4, "Ġ": 5},'
        ' "merges": ["▁ a"], "unk_token": "<unk>", "fuse_unk": true}}'
    )
    native.normalizer, native.pre_tokenizer = SPLITTERS[splitter]
    native.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=True)])
    expected = native.encode(text, add_special_tokens=False).ids
    assert segments(native).encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_look_beyond_themselves_leave_no_segments(toy: NativeTokenizer, flag: str) -> None:
    toy.add_tokens([AddedToken("<x>", normalized=False, **{flag: True})])
    assert Segments.of(toy, bytes_of) is None


def test_a_special_beginning_leaves_no_segments(toy: NativeTokenizer) -> None:
    toy.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert Segments.of(toy, bytes_of) is None


def test_unknown_edges_leave_no_segments(toy: NativeTokenizer) -> None:
    toy.post_processor = processors.BertProcessing(("</s>", 257), ("<s>", 256))
    assert Segments.of(toy, bytes_of) is None


def test_a_growing_text_costs_its_new_pieces(toy: NativeTokenizer) -> None:
    asked = []

    def encode_piece(piece: str) -> list[int]:
        asked.append(piece)
        return list(piece.encode())

    ours = Segments.of(toy, encode_piece)
    assert ours is not None
    text = ""
    for turn in range(20):
        text += f"<|im_start|>turn {turn}<|im_end|>"
        ours.encode(text, add_special_tokens=False)
    assert asked == [f"turn {turn}" for turn in range(20)]


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    cache = PieceCache(max_chars=6)
    for piece in ("aa", "bb", "cc"):
        cache.put(piece, [1])
    assert cache.get("aa") is not None
    cache.put("dddd", [2])
    assert cache.get("bb") is None
    assert cache.get("cc") is None
    assert cache.get("aa") == (1,)


def test_the_cache_keeps_nothing_larger_than_itself() -> None:
    cache = PieceCache(max_chars=6)
    cache.put("aa", [1])
    cache.put("1234567", [2])
    assert cache.get("1234567") is None
    assert cache.get("aa") is not None


def test_what_is_used_again_shares_its_numbers() -> None:
    cache = PieceCache()
    cache.put("a", [5, 100_000, 0])
    cache.put("b", [100_000])
    first, second = cache.get("a"), cache.get("b")
    assert first == (5, 100_000, 0) and second == (100_000,)
    assert first[1] is second[0] and cache.get("a") is first
    cache.put("", [])
    assert cache.get("") == ()
