"""Conversion of a small GGUF file: exact weights, the same tokenizer, every id that ends a reply; all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, quants
from safetensors.numpy import load_file
from transformers import AutoTokenizer, GenerationConfig

from fakes.models import SIZES
from fakes.toy import ATOMIC, BOS, EOS, IM_END, TEMPLATE_TA, byte_symbols, toy_tokenizer
from fourhop.engine.convert import convert, main
from fourhop.engine.model import load_model
from fourhop.wire.errors import StartError

HIDDEN, MLP, LAYERS = (SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
KV_WIDTH = HIDDEN * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]
MERGED = ["ab", "abc"]
"""Two tokens beyond the toy vocabulary, so that there are merges to convert."""
VOCAB = SIZES["vocab_size"] + len(MERGED)

Edit = Callable[[GGUFWriter], None]


def quantised(*shape: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random weights in Q8_0, as bytes."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    packed: npt.NDArray[np.uint8] = quants.quantize(values, GGMLQuantizationType.Q8_0)
    return packed


def write_gguf(path: Path, edit: Edit = lambda writer: None) -> Path:
    """A tiny Llama with the toy vocabulary, its matrices in Q8_0, as llama.cpp would write it."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_rope_dimension_count(HIDDEN // SIZES["num_attention_heads"])
    _add_tokenizer(writer)
    _add_weights(writer)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*byte_symbols(), *ATOMIC, *MERGED])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(ATOMIC) + [TokenType.NORMAL] * 2)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(IM_END)
    writer.add_chat_template(TEMPLATE_TA)


def _add_weights(writer: GGUFWriter) -> None:
    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, quantised(*shape, seed=len(name)), raw_dtype=GGMLQuantizationType.Q8_0)

    add("token_embd.weight", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
        add(f"{prefix}attn_q.weight", HIDDEN, HIDDEN)
        add(f"{prefix}attn_k.weight", KV_WIDTH, HIDDEN)
        add(f"{prefix}attn_v.weight", KV_WIDTH, HIDDEN)
        add(f"{prefix}attn_output.weight", HIDDEN, HIDDEN)
        add(f"{prefix}ffn_gate.weight", MLP, HIDDEN)
        add(f"{prefix}ffn_up.weight", MLP, HIDDEN)
        add(f"{prefix}ffn_down.weight", HIDDEN, MLP)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    convert(write_gguf(folder / "tiny.gguf"), folder / "model")
    return folder / "model"


def test_weights_are_dequantised_exactly(converted: Path) -> None:
    weights = load_file(converted / "model.safetensors")
    packed = quantised(HIDDEN, MLP, seed=len("blk.1.ffn_down.weight"))
    expected = quants.dequantize(packed, GGMLQuantizationType.Q8_0)
    assert weights["model.layers.1.mlp.down_proj.weight"].dtype == np.float32
    assert np.array_equal(weights["model.layers.1.mlp.down_proj.weight"], expected)


def test_the_folder_loads_and_knows_every_token_that_ends_a_reply(converted: Path) -> None:
    model = load_model(converted, dtype="auto", device="cpu", attention="sdpa", progress=lambda done, total: None)
    assert model.architecture == "LlamaForCausalLM"
    assert (model.num_layers, model.vocab_size, model.max_position_embeddings) == (LAYERS, VOCAB, 256)
    assert model.eos_token_ids == {EOS, IM_END}
    assert GenerationConfig.from_pretrained(converted).eos_token_id == [EOS, IM_END]


def test_the_tokenizer_is_the_files_own(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "<|im_start|>user\nnaïve 👋\t12  <|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == toy_tokenizer().encode(text).ids
    assert tokenizer.encode("abc", add_special_tokens=False) == [VOCAB - 1]
    assert tokenizer.chat_template == TEMPLATE_TA
    assert not (converted / "chat_template.jinja").exists()


def scale_by_tensor(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))


def scale_by_key(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)


@pytest.mark.parametrize("scale", [scale_by_tensor, scale_by_key])
def test_scaled_rotary_embeddings_are_refused_and_leave_nothing(tmp_path: Path, scale: Edit) -> None:
    source = write_gguf(tmp_path / "scaled.gguf", scale)
    with pytest.raises(StartError, match="scales its rotary embeddings"):
        convert(source, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_not_a_gguf_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("not a model, but longer than a magic number")
    assert main([str(tmp_path / "text.gguf"), str(tmp_path / "model")]) == 1
    assert "is not a GGUF file" in capsys.readouterr().err
    assert main([str(tmp_path / "none.gguf"), str(tmp_path / "model")]) == 1
    assert "is not a file" in capsys.readouterr().err
    assert main([]) == 2


def test_an_existing_folder_is_left_alone(converted: Path) -> None:
    with pytest.raises(StartError, match="exists already"):
        convert(converted / "config.json", converted)
