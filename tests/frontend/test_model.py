from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.toy import LLAMA_CONFIG, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.load import load_renderer
from fourhop.frontend.model import load_model
from fourhop.wire.errors import StartError


def test_names_window_and_eos(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path, generation_config={"eos_token_id": [257, 263]})
    model = load_model(Checkpoint("given", folder), FrontendConfig())
    assert (model.names, model.max_model_len) == (("given",), 2048)
    assert model.eos_token_ids == {257, 263}
    model = load_model(Checkpoint("given", folder), FrontendConfig(served_model_name=("a", "b"), max_model_len=5))
    assert (model.name, model.names, model.max_model_len) == ("a", ("a", "b"), 5)


def test_values_of_a_model_with_several_parts(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 77, "vocab_size": 300}
    folder = write_toy_checkpoint(tmp_path)
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    renderer = load_renderer(Checkpoint("m", folder), FrontendConfig())
    assert (renderer.model.max_model_len, renderer.tokenizer.vocab_size) == (77, 300)


def test_no_window_stops_the_start(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "max_position_embeddings": None}))
    with pytest.raises(StartError, match="give max_model_len"):
        load_model(Checkpoint("m", folder), FrontendConfig())
    assert load_model(Checkpoint("m", folder), FrontendConfig(max_model_len=9)).max_model_len == 9


@pytest.mark.parametrize("text", ["{", "[]", '"a"'])
def test_broken_file_stops_the_start(tmp_path: Path, text: str) -> None:
    folder = write_toy_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(StartError, match=r"generation_config\.json is not"):
        load_model(Checkpoint("m", folder), FrontendConfig())


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_auto_tool_choice": True, "tool_call_parser": "none"},
        {"max_model_len": 1},
        {"max_logprobs": -1},
        {"max_num_choices": 0},
        {"num_render_workers": 0},
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        FrontendConfig(**fields)


@pytest.mark.parametrize("fields", [{"reasoning_parser": "nope"}, {"tool_call_parser": "nope"}])
def test_unknown_parser_stops_the_start(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(StartError, match="nope"):
        load_renderer(Checkpoint("m", write_toy_checkpoint(tmp_path)), FrontendConfig(**fields))
