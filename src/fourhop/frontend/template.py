"""Chat templates: which one a model has, what it can print, and the prompt text of a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from fourhop.frontend.conversation import Content, as_parts, as_system, as_text
from fourhop.frontend.environment import Clock, Refusal, environment
from fourhop.frontend.files import read_json
from fourhop.wire.errors import ClientError, StartError

Message = dict[str, Any]

_BAD_INPUT = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What Python and jinja2 raise when a template meets values that it was not written for."""


@dataclass(frozen=True)
class Forms:
    """Which forms of `content` a template prints in full for one role."""

    text: bool
    parts: bool


class ChatTemplate:
    """One compiled template, and what trying it out told about it.

    Raises StartError at construction when the source is not a valid template: that is the operator's fault.
    """

    def __init__(self, source: str, *, special_tokens: dict[str, str], clock: Clock = datetime.now) -> None:
        try:
            self._template = environment(clock).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartError(f"the chat template is not valid, line {error.lineno}: {error.message}") from None
        self.source = source
        self._special_tokens = special_tokens
        self._forms = {role: self._try_forms(role) for role in _PROBES}
        # A template that prints whatever role it gets does not know this one.
        self.knows_developer = "developer" in source and self._prints("developer", "MARK-A")
        self._knows_both = self.knows_developer and self._prints("developer after system", "MARK-A")

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a prepared conversation (`conversation.prepare_messages`).

        Raises ClientError with the template's own words when it refuses, or with the reason why it cannot render.
        """
        fitted = [
            self._fit(message) for message in (messages if self._takes_developer(messages) else as_system(messages))
        ]
        marker = _unused_marker(fitted) if continue_final_message else ""
        if continue_final_message:
            fitted[-1] = _plant(fitted[-1], marker, len(messages) - 1)
        text = self._fill(
            messages=fitted,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **(kwargs or {})},
        )
        return _cut(text, marker) if continue_final_message else text

    def _takes_developer(self, messages: list[Message]) -> bool:
        """Some templates know developer messages, but lose them after a system message."""
        roles = {message["role"] for message in messages}
        return self._knows_both if "system" in roles else self.knows_developer

    def _fill(self, **values: Any) -> str:
        try:
            return self._template.render(**values)
        except Refusal as refusal:
            raise ClientError(str(refusal.message), param="messages") from None
        except _BAD_INPUT as error:
            raise ClientError(f"the chat template cannot render this request: {error}", param="messages") from None

    def _fit(self, message: Message) -> Message:
        """The message with its content in a form that the template prints; as sent when that is one or none is."""
        content: Content | None = message.get("content")
        forms = self._forms.get(message["role"], self._forms["user"])
        if isinstance(content, str) and forms.parts and not forms.text:
            return {**message, "content": as_parts(content)}
        if isinstance(content, list) and forms.text and not forms.parts:
            return {**message, "content": as_text(content)}
        return message

    def _try_forms(self, role: str) -> Forms:
        """Render a small conversation with each form and look whether all of its text arrives, and only that."""
        return Forms(
            text=self._prints(role, "MARK-A"),
            parts=self._prints(role, [{"type": "text", "text": "MARK-A"}, {"type": "text", "text": "MARK-B"}]),
        )

    def _prints(self, role: str, content: Content) -> bool:
        """Tried without tools, and with one for the templates that cannot do without."""
        *before, last, after = _PROBES[role]
        messages = [message for message in [*before, {**last, "content": content}, after] if message]
        text = self._try(messages, None) or self._try(messages, [_TOOL]) or ""
        marks = ["MARK-A"] if isinstance(content, str) else ["MARK-A", "MARK-B"]
        return all(mark in text for mark in marks) and "'text': 'MARK" not in text and '"text": "MARK' not in text

    def _try(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str | None:
        try:
            return self._fill(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except ClientError:
            return None


_USER: Message = {"role": "user", "content": "u"}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_PROBES: dict[str, list[Message]] = {
    "user": [{"role": "user"}, {}],
    "system": [{"role": "system"}, _USER],
    "assistant": [_USER, {"role": "assistant"}, _USER],
    "developer": [{"role": "developer"}, _USER],
    "developer after system": [{"role": "system", "content": "s"}, {"role": "developer"}, _USER],
    "tool": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "call00000"},
        {},
    ],
}
"""For each role a conversation to try a template with: the message before the last gets the content under test."""


def _unused_marker(messages: list[Message]) -> str:
    """A text that occurs nowhere in the messages."""
    everything = json.dumps(messages, ensure_ascii=False)
    number = 0
    while (marker := f"<<continue-here-{number}>>") in everything:
        number += 1
    return marker


def _plant(message: Message, marker: str, index: int) -> Message:
    """The message with marker and a blank after its text; the blank shows later whether the template trims."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{marker} "}
    if not content:
        raise ClientError(
            "continue_final_message needs a final message with content", param=f"messages[{index}].content"
        )
    last = {**content[-1], "text": f"{content[-1]['text']}{marker} "}
    return {**message, "content": [*content[:-1], last]}


def _cut(text: str, marker: str) -> str:
    """The prompt up to the marker; without the final text's trailing blanks if the template trimmed the marker's."""
    prompt, found, rest = text.rpartition(marker)
    if not found:
        raise ClientError("the chat template does not print the final message's content", param="messages")
    return prompt if rest.startswith(" ") else prompt.rstrip()


@dataclass(frozen=True)
class ChatTemplates:
    """The templates of a model: `default`, and possibly `tool_use` for requests with tools."""

    by_name: dict[str, ChatTemplate]

    @property
    def source(self) -> str:
        """What all of them write, for telling the model's markup."""
        return "\n".join(template.source for template in self.by_name.values())

    def choose(self, *, has_tools: bool) -> ChatTemplate:
        """Raises ClientError when the model has no chat template."""
        if has_tools and "tool_use" in self.by_name:
            return self.by_name["tool_use"]
        if "default" not in self.by_name:
            raise ClientError("this model has no chat template; use /v1/completions", param="messages")
        return self.by_name["default"]


def load_templates(
    folder: Path, special_tokens: dict[str, str], *, override: str | None = None, clock: Clock = datetime.now
) -> ChatTemplates:
    """The checkpoint's templates, or `override`: a file, or the template itself (recognised by its braces).

    `chat_template.jinja` wins over tokenizer_config.json, as in transformers. Raises StartError.
    """
    sources = _checkpoint_sources(folder) if override is None else {"default": _override_source(override)}
    return ChatTemplates(
        {name: ChatTemplate(source, special_tokens=special_tokens, clock=clock) for name, source in sources.items()}
    )


def _override_source(override: str) -> str:
    if "{" in override:
        return override
    path = Path(override)
    if not path.is_file():
        raise StartError(f"the chat template {override} is neither a file nor a template")
    return path.read_text(encoding="utf-8")


def _checkpoint_sources(folder: Path) -> dict[str, str]:
    """Template sources by name; empty when the checkpoint has none."""
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in extra}
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if sources:
        return sources
    declared = read_json(folder / "tokenizer_config.json", default={}).get("chat_template")
    if isinstance(declared, str):
        return {"default": declared}
    return {entry["name"]: entry["template"] for entry in declared or []}
