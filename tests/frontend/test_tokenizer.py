from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fakes.toy import BOS, EOS, IM_END, IM_START, SPECIAL, THINK, VOCAB_SIZE, write_toy_checkpoint
from fourhop.checkpoint import DEFAULT_MODEL, find
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.errors import StartError


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_toy_checkpoint(tmp_path_factory.mktemp("toy")))


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@given(text=st.text())
def test_bytes_are_ids(toy: Tokenizer, text: str) -> None:
    assert toy.encode(text, add_special_tokens=False) == list(text.encode())
    assert toy.decode(list(text.encode())) == text


def test_atomic_tokens(toy: Tokenizer) -> None:
    assert toy.encode("a<think>b<|im_end|>", add_special_tokens=False) == [97, THINK, 98, IM_END]
    assert toy.token_id("<think>") == THINK
    assert toy.token_id("<thin") is None
    assert toy.special_ids == SPECIAL
    assert toy.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert toy.token(IM_START) == "<|im_start|>"


def test_decode_keeps_or_skips_special_tokens(toy: Tokenizer) -> None:
    ids = [BOS, 97, THINK, 98, IM_END, EOS]
    assert toy.decode(ids) == "a<think>b"
    assert toy.decode(ids, skip_special_tokens=False) == "<s>a<think>b<|im_end|></s>"


def test_token_bytes_join_to_the_text(toy: Tokenizer) -> None:
    text = "a 👋<think>é\n"
    joined = b"".join(toy.token_bytes(i) for i in toy.encode(text, add_special_tokens=False))
    assert joined == text.encode()
    assert toy.token_bytes(VOCAB_SIZE) == b""


def test_offsets_are_characters(toy: Tokenizer) -> None:
    assert toy.encode_with_offsets("aé", add_special_tokens=False) == ([97, 195, 169], [[0, 1], [1, 2], [1, 2]])


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("flag", [None, False, True])
def test_edge_tokens_equal_transformers(tmp_path: Path, add_bos: bool, flag: bool | None) -> None:
    folder = write_toy_checkpoint(tmp_path, add_bos=add_bos)
    if flag is not None:
        _change(folder / "tokenizer_config.json", add_bos_token=flag, add_eos_token=not flag)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for special in (False, True):
        assert ours.encode("hi<s>", add_special_tokens=special) == reference.encode("hi<s>", add_special_tokens=special)


def test_tokens_declared_only_in_the_config_are_added(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    declared = {"content": "<|x|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    _change(folder / "tokenizer_config.json", added_tokens_decoder={"264": declared})
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    assert ours.encode("a<|x|>", add_special_tokens=False) == reference.encode("a<|x|>", add_special_tokens=False)
    assert ours.token_id("<|x|>") == 264


def test_vocab_size_is_the_models(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    _change(folder / "config.json", vocab_size=300)
    assert Tokenizer.load(folder).vocab_size == 300


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_missing_file_is_one_line(tmp_path: Path, name: str) -> None:
    folder = write_toy_checkpoint(tmp_path)
    (folder / name).unlink()
    with pytest.raises(StartError, match=f"has no {name}"):
        Tokenizer.load(folder)


def test_the_faster_encoder_gives_the_same_ids() -> None:
    tokenizer = Tokenizer.load(find(DEFAULT_MODEL).folder)
    text = "<|im_start|>user\nWhat's 2 + 2?<|im_end|>\n\u180e"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.quicken()
    assert tokenizer.encode(text + " so", add_special_tokens=True) == [*ids, tokenizer.token_id("Ġso")]


def test_a_tokenizer_without_proof_stays_as_it_is(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    _change(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.quicken()
    assert tokenizer.encode("A<think>", add_special_tokens=False) == [97, THINK]
