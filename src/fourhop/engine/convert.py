"""`python -m fourhop.engine.convert SRC.gguf DST_DIR`: a GGUF file as a Hugging Face folder, once.

The folder holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json (with the chat template)
and model.safetensors, the weights dequantised exactly to float32. It appears whole or not at all: it is written under a
temporary name beside DST_DIR and renamed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from fourhop.wire.errors import StartError

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The keys under `tokenizer.ggml.` whose tokens end a reply: end of sequence, of turn, of message."""


def convert(source: Path, target: Path) -> None:
    """Write the folder `target` from the GGUF file `source`. Raises StartError if the file cannot be converted."""
    if not source.is_file():
        raise StartError(f"{source} is not a file")
    if target.exists():
        raise StartError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(source, partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(source: Path, folder: Path) -> None:
    _say(f"reading {source.name}")
    end_ids = _end_token_ids(_open(source))
    location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**location)
    _say("converting the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(**location)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _say("dequantising the weights")
    model = _dequantise(source, config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=end_ids or config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    _say("writing safetensors")
    model.save_pretrained(folder)


def _open(source: Path) -> GGUFReader:
    """The file's index, refused when it holds what transformers would leave out without a word: scaled rotary
    embeddings, which GGUF keeps as extra tensors or keys."""
    try:
        reader = GGUFReader(source)
    except (ValueError, OSError) as error:
        raise StartError(f"{source} is not a GGUF file: {error}") from None
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    scaled += [
        key for key, field in reader.fields.items() if key.endswith("rope.scaling.type") and field.contents() != "none"
    ]
    if scaled:
        raise StartError(f"{source.name} scales its rotary embeddings ({scaled[0]}), which is not supported in GGUF")
    return reader


def _end_token_ids(reader: GGUFReader) -> list[int]:
    fields = (reader.get_field(f"tokenizer.ggml.{key}") for key in END_KEYS)
    return sorted({int(field.contents()) for field in fields if field is not None})


def _dequantise(source: Path, config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    loaded = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    mismatch = model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, weight in model.named_parameters() if weight.is_meta]
    if empty or mismatch.unexpected_keys:
        raise StartError(f"{source.name}: weights missing {empty}, weights not understood {mismatch.unexpected_keys}")
    return model


def _say(what: str) -> None:
    print(f"convert: {what}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m fourhop.engine.convert SRC.gguf DST_DIR", file=sys.stderr)
        return 2
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except StartError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
