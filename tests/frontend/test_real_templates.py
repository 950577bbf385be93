"""Prompts of real chat templates are those of transformers: the text of 70 families, the ids of 11 real tokenizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fakes.checkpoints import TOKENIZERS, qwen3_folder, template_folder, tokenizer_folder
from fakes.conversations import CONVERSATIONS, TOOLS, as_request, call, result, say
from fakes.toy import toy_tokenizer
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.conversation import prepare_messages
from fourhop.frontend.load import load_renderer
from fourhop.frontend.parsers.detect import REASONING_SIGNS, TOOL_SIGNS, detect
from fourhop.frontend.template import ChatTemplate
from fourhop.wire.errors import ClientError
from fourhop.wire.openai_chat import ChatCompletionRequest

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
REFUSED = None
"""What both sides say of a conversation that the template does not take."""

BAD_INPUT = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


def reference(tokenizer: PreTrainedTokenizerFast, name: str, **how: Any) -> Any:
    messages, options = copy.deepcopy(CONVERSATIONS[name])
    try:
        return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **options, **how})
    except BAD_INPUT:
        return REFUSED


def check_ids(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = FrontendConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    renderer = load_renderer(Checkpoint("real", folder), config)
    num_rendered = 0
    for name, (messages, options) in CONVERSATIONS.items():
        request = msgspec.convert(as_request(messages, options), ChatCompletionRequest)
        try:
            ids: list[int] | None = renderer.chat_prompt(request).token_ids
        except ClientError:
            ids = REFUSED
        assert ids == reference(tokenizer, name, tokenize=True, return_dict=False), name
        num_rendered += ids is not REFUSED
    assert num_rendered >= len(CONVERSATIONS) // 2


def test_ids_of_qwen3_are_transformers() -> None:
    check_ids(qwen3_folder())


@pytest.mark.templates
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_transformers(name: str) -> None:
    check_ids(tokenizer_folder(name))


def render(template: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    fields = as_request(messages, options)
    kwargs = {**fields.pop("chat_template_kwargs")}
    if (effort := fields.pop("reasoning_effort", None)) is not None:
        kwargs["reasoning_effort"] = effort
    try:
        return template.render(prepare_messages(fields.pop("messages")), kwargs=kwargs, **fields)
    except ClientError:
        return REFUSED


@pytest.mark.templates
@pytest.mark.timeout(900)
def test_texts_are_transformers() -> None:
    """Each template with each conversation; a template is asked only what it can answer at all."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=toy_tokenizer(), **SPECIAL)
    num_templates, num_rendered = 0, 0
    for path in sorted(template_folder().glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        tokenizer.chat_template = source
        template = ChatTemplate(source, special_tokens=SPECIAL)
        texts = {}
        for name, (messages, options) in CONVERSATIONS.items():
            texts[name] = render(template, messages, options)
            assert texts[name] == reference(tokenizer, name, tokenize=False), (path.stem, name)
        num_rendered += sum(text is not REFUSED for text in texts.values())
        num_templates += any(text is not REFUSED for text in texts.values())
    assert num_templates >= 60
    assert num_rendered >= 1000


DETECTED: dict[str, tuple[str | None, str | None]] = {
    "Apriel-1.6-15b-Thinker-fixed": (None, "jamba"),
    "Bielik-11B-v3.0-Instruct": ("qwen3", "hermes"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r-plus-tool_use": (None, None),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7-Flash": ("glm45", "glm45"),
    "Kimi-K2-Instruct": (None, "kimi_k2"),
    "Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "Kimi-K3": (None, None),
    "LFM2.5-8B-A1B": ("qwen3", "lfm2"),
    "MiniMax-M1": (None, "jamba"),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "MiniMax-M3": (None, None),
    "Mistral-Small-3.2-24B-Instruct-2506": (None, "mistral"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron_v3", "qwen3_coder"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": (None, "hermes"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": (None, "hermes"),
    "Qwen-QwQ-32B": ("qwen3", "hermes"),
    "Qwen-Qwen2.5-7B-Instruct": (None, "hermes"),
    "Qwen-Qwen3-0.6B": ("qwen3", "hermes"),
    "Qwen3-Coder": (None, "qwen3_coder"),
    "Qwen3.5-4B": ("qwen3", "qwen3_coder"),
    "StepFun3.5-Flash": ("qwen3", "qwen3_coder"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_r1", "deepseek_v3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_r1", "deepseek_v3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3", "deepseek_v31"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v3", "deepseek_v32"),
    "fireworks-ai-llama-3-firefunction-v2": (None, "phi4_mini_json"),
    "google-gemma-2-2b-it": (None, None),
    "ibm-granite-granite-3.3-2B-Instruct": (None, "granite"),
    "ibm-granite-granite-4.0": (None, "granite4"),
    "meta-llama-Llama-3.1-8B-Instruct": (None, "llama3_json"),
    "meta-llama-Llama-3.2-3B-Instruct": (None, "llama3_json"),
    "meta-llama-Llama-3.3-70B-Instruct": (None, "llama3_json"),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": (None, "mistral"),
    "moonshotai-Kimi-K2": (None, "kimi_k2"),
    "openai-gpt-oss-120b": ("openai_gptoss", "openai"),
}
"""What a model's own template shows: the markup that its makers' parsers read, by the names of the families here."""


@pytest.mark.templates
def test_families_are_detected_from_real_templates() -> None:
    found = {}
    for name in DETECTED:
        template = (template_folder() / f"{name}.jinja").read_text(encoding="utf-8")
        found[name] = (detect(template, REASONING_SIGNS), detect(template, TOOL_SIGNS))
    assert found == DETECTED


@pytest.mark.templates
@pytest.mark.timeout(300)
def test_families_are_detected_from_real_checkpoints() -> None:
    """As a server does at its start."""
    expected = {
        "deepseek_v3": (None, "deepseek_v3"),
        "gemma3": (None, None),
        "llama3_1": (None, None),
        "llama3_2": (None, "llama3_json"),
        "mistral_nemo": (None, "mistral"),
        "qwen2_5": (None, "hermes"),
        "qwen1_5": (None, None),
    }
    for name, families in expected.items():
        folder = tokenizer_folder(name)
        source = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())["chat_template"]
        assert (detect(source, REASONING_SIGNS), detect(source, TOOL_SIGNS)) == families, name
        parsers = load_renderer(Checkpoint("real", folder), FrontendConfig()).parsers
        assert parsers.has_reasoning == (families[0] is not None)


PARTS = [{"type": "text", "text": "7 degrees"}]
LOSSLESS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "parts": ([say("user", [{"type": "text", "text": "ab"}, {"type": "text", "text": "7 degrees"}])], {}),
    "system parts": ([say("system", PARTS), say("user", "hi")], {}),
    "null content": (
        [say("user", "x"), say("assistant", None, tool_calls=[call(1, "now", {})]), result(1, "7 degrees", "now")],
        {"tools": TOOLS},
    ),
    "tool parts": (
        [
            say("user", "x"),
            say("assistant", "", tool_calls=[call(1, "now", {})]),
            {**result(1, "", "now"), "content": PARTS},
        ],
        {"tools": TOOLS},
    ),
    "developer": ([say("developer", "7 degrees"), say("user", "hi")], {}),
    "developer after system": ([say("system", "be brief"), say("developer", "7 degrees"), say("user", "hi")], {}),
}
PLAIN = {
    "parts": ([say("user", "7 degrees")], {}),
    "system parts": ([say("system", "7 degrees"), say("user", "hi")], {}),
    "null content": CONVERSATIONS["called"],
    "tool parts": CONVERSATIONS["called"],
    "developer": ([say("system", "7 degrees"), say("user", "hi")], {}),
    "developer after system": ([say("system", "7 degrees"), say("user", "hi")], {}),
}
"""For each of `LOSSLESS` what a template must take and print in full, so that the other form is asked of it."""


@pytest.mark.templates
@pytest.mark.timeout(300)
def test_no_text_is_lost_in_any_form() -> None:
    """Cases 1, 2, 11: parts, null content and developer messages arrive wherever their plain forms do."""
    for path in sorted(template_folder().glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"), special_tokens=SPECIAL)
        for name, (messages, options) in LOSSLESS.items():
            plain = render(template, *PLAIN[name])
            if plain is not REFUSED and "7 degrees" in plain:
                text = render(template, messages, options)
                assert text is not REFUSED and "7 degrees" in text, (path.stem, name)
                assert "'text': '" not in text, (path.stem, name)
