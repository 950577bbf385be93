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
