"""The weight files of a checkpoint: which they are, reading them through, and a digest that tells weights apart.

Source of the format: huggingface/safetensors, README "Format": 8 bytes of header length (little-endian), a JSON header
of `{name: {dtype, shape, data_offsets}}`, then the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fourhop.wire.errors import StartError

Progress = Callable[[int, int], None]
"""Called with bytes read so far and their total."""

CHUNK_BYTES = 8 << 20
SAMPLE_BYTES = 4096


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names. Raises StartError if one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [single]
    if not single.is_file() and index.is_file():
        try:
            shards = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        except msgspec.MsgspecError as error:
            raise StartError(f"{index}: {error}") from None
        files = [folder / name for name in sorted(set(shards))]
    for file in files:
        if not file.is_file():
            raise StartError(f"{folder} has no {file.name}; weights must be in safetensors")
    return files


def read_through(files: list[Path], progress: Progress) -> None:
    """Read every byte once, so that the pages which the model maps are in memory when it first computes."""
    total = sum(file.stat().st_size for file in files)
    buffer = bytearray(CHUNK_BYTES)
    done = 0
    progress(done, total)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                done += count
                progress(done, total)


def digest(files: list[Path]) -> str:
    """SHA-256, in hex, over each tensor's name, dtype, shape and a sample of its bytes: the first and the middle 4 KiB.

    How tensors are spread over files does not matter. A change that leaves every sample as it was, such as a single
    element edited by hand, goes unseen; another training run, a merged adapter or another quantisation does not.
    """
    samples = sorted(sample for file in files for sample in _samples(file))
    result = hashlib.sha256()
    for name, identity, data in samples:
        result.update(f"{name}\0{identity}\0{len(data)}\0".encode())
        result.update(data)
    return result.hexdigest()


def _samples(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """(name, dtype and shape, sampled bytes) of each tensor."""
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = msgspec.json.decode(stream.read(length))
            header.pop("__metadata__", None)
            tensors = msgspec.convert(header, dict[str, _Tensor])
        except (struct.error, msgspec.MsgspecError, OverflowError, MemoryError) as error:
            raise StartError(f"{file} is not a safetensors file: {error}") from None
        for name, tensor in tensors.items():
            begin, end = tensor.data_offsets
            data = b""
            for start in (begin, (begin + end) // 2):
                stream.seek(8 + length + start)
                data += stream.read(min(SAMPLE_BYTES, end - start))
            yield name, f"{tensor.dtype}{tensor.shape}", data
