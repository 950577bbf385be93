"""The toy byte tokenizer as a real checkpoint folder: every byte is a token, and eight atomic tokens follow.

Ids 0-255 are raw bytes; 256 `<s>`, 257 `</s>`, 262 `<|im_start|>` and 263 `<|im_end|>` are special; 258-261 are the
think and tool-call marks, atomic but not special. The folder loads with `transformers` and with `fourhop` alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = 256, 257
THINK, END_THINK = 258, 259
TOOL_CALL, END_TOOL_CALL = 260, 261
IM_START, IM_END = 262, 263
VOCAB_SIZE = 264

ATOMIC = {
    "<s>": BOS,
    "</s>": EOS,
    "<think>": THINK,
    "</think>": END_THINK,
    "<tool_call>": TOOL_CALL,
    "</tool_call>": END_TOOL_CALL,
    "<|im_start|>": IM_START,
    "<|im_end|>": IM_END,
}
SPECIAL = frozenset({BOS, EOS, IM_START, IM_END})

TEMPLATE_TA = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, content joined by string concatenation."""

TEMPLATE_TB = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}<|im_end|>{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""ChatML, content printed by plain interpolation."""

TEMPLATE_TC = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}{{ '\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "<|im_end|>{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""ChatML, loops over content parts and prints the text parts."""

TEMPLATE_TT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}"
    "{% endif %}"
)
"""As TA; the generation prompt opens a think block, or holds a closed empty one when thinking is off."""

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "dtype": "float32",
}
"""A tiny Llama with the toy vocabulary. There are no weights in the folder."""


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value 0-255 (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def toy_tokenizer(*, add_bos: bool = False, special: frozenset[int] = SPECIAL) -> Tokenizer:
    """The native tokenizer. With `add_bos` it puts `<s>` first when special tokens are asked for."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(text, special=token_id in special, normalized=False) for text, token_id in ATOMIC.items()]
    )
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def write_toy_checkpoint(
    folder: Path,
    *,
    template: str | None = TEMPLATE_TA,
    add_bos: bool = False,
    special: frozenset[int] = SPECIAL,
    config: dict[str, Any] = LLAMA_CONFIG,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    toy_tokenizer(add_bos=add_bos, special=special).save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    if template is not None:
        tokenizer_config["chat_template"] = template
    if generation_config is None:
        generation_config = {"bos_token_id": BOS, "eos_token_id": EOS}
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config)
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
