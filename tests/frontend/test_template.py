from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fakes.checkpoints import qwen3_folder
from fakes.toy import (
    IM_END,
    IM_START,
    TEMPLATE_TA,
    TEMPLATE_TB,
    TEMPLATE_TC,
    TEMPLATE_TT,
    write_toy_checkpoint,
)
from fourhop import checkpoint
from fourhop.frontend.conversation import prepare_messages
from fourhop.frontend.template import ChatTemplate, load_templates
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.errors import ClientError, StartError

Message = dict[str, Any]

TEMPLATES = {"TA": TEMPLATE_TA, "TB": TEMPLATE_TB, "TC": TEMPLATE_TC, "TT": TEMPLATE_TT}
WEATHER = {
    "type": "function",
    "function": {
        "name": "z_tool",
        "description": "a/b <c> & 'd' — 中",
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}},
    },
}
CHATS: dict[str, list[Message]] = {
    "one turn": [{"role": "user", "content": "Héllo 👋"}],
    "system": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    "several turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c  "},
    ],
}
TOOL_CHAT: list[Message] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I should look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "z_tool", "arguments": '{"b": 1, "a": "é"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"},
]


def toy(source: str, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, **kwargs)


def user(content: Any) -> list[Message]:
    return [{"role": "user", "content": content}]


class Pair:
    """One checkpoint, loaded by us and by transformers."""

    def __init__(self, folder: Path) -> None:
        self.reference = transformers.AutoTokenizer.from_pretrained(folder)
        self.tokenizer = Tokenizer.load(folder)
        self.templates = load_templates(folder, self.tokenizer.special_tokens)

    def check(self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **options: Any) -> None:
        """Text and ids are the same; transformers gets tool arguments as objects, as its documentation asks."""
        prepared = prepare_messages(messages)
        flags = {"add_generation_prompt": True, **options}
        expected_text = self.reference.apply_chat_template(prepared, tools=tools, tokenize=False, **flags)
        expected = self.reference.apply_chat_template(prepared, tools=tools, return_dict=False, **flags)
        known = ("add_generation_prompt", "continue_final_message")
        text = self.templates.choose(has_tools=tools is not None).render(
            prepared,
            tools=tools,
            kwargs={key: value for key, value in flags.items() if key not in known},
            **{key: value for key, value in flags.items() if key in known},
        )
        assert text == expected_text
        assert self.tokenizer.encode(text, add_special_tokens=False) == expected


@pytest.fixture(scope="module")
def qwen3() -> Pair:
    return Pair(qwen3_folder())


@pytest.fixture(scope="module")
def smollm2() -> Pair:
    return Pair(checkpoint.find(checkpoint.DEFAULT_MODEL).folder)


@pytest.fixture(scope="module", params=TEMPLATES)
def toy_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(write_toy_checkpoint(tmp_path_factory.mktemp(request.param), template=TEMPLATES[request.param]))


@pytest.mark.parametrize("chat", CHATS)
def test_toy_templates_equal_transformers(toy_pair: Pair, chat: str) -> None:
    messages = CHATS[chat]
    if "part in message" in toy_pair.reference.chat_template:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    toy_pair.check(messages)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}])
def test_smollm2_equals_transformers(smollm2: Pair, chat: str, options: dict[str, Any]) -> None:
    smollm2.check(CHATS[chat], **options)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"enable_thinking": False}])
def test_qwen3_equals_transformers(qwen3: Pair, chat: str, options: dict[str, Any]) -> None:
    qwen3.check(CHATS[chat], **options)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_qwen3_tools_equal_transformers(qwen3: Pair, options: dict[str, Any]) -> None:
    qwen3.check(TOOL_CHAT, tools=[WEATHER], **options)
    qwen3.check([*TOOL_CHAT, {"role": "assistant", "content": "7."}, *user("sure?")], tools=[WEATHER], **options)


@pytest.mark.parametrize("final", ["The answer is ", "", "user", "b"])
def test_continuing_equals_transformers(smollm2: Pair, final: str) -> None:
    """Case 8."""
    messages = [*CHATS["several turns"], {"role": "assistant", "content": final}]
    smollm2.check(messages, add_generation_prompt=False, continue_final_message=True)


@given(text=st.text())
def test_any_text_is_in_the_prompt_once(text: str) -> None:
    assert _TA.render(user(text)) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


_TA = toy(TEMPLATE_TA)


@pytest.mark.parametrize("name", ["TA", "TB", "TC"])
@pytest.mark.parametrize("content", ["ab\ncd", [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]])
def test_content_takes_the_form_that_the_template_prints(name: str, content: Any) -> None:
    """Case 1."""
    text = toy(TEMPLATES[name]).render(user(content))
    printed = text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    # Parts are joined by a line break for templates that take text; a template that takes parts joins them itself.
    assert printed == ("abcd" if name == "TC" and isinstance(content, list) else "ab\ncd")


def test_tool_result_in_parts_does_not_vanish() -> None:
    """Case 2."""
    source = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.name }}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    for content in ("7 degrees", [{"type": "text", "text": "7 degrees"}]):
        messages = [*TOOL_CHAT[:1], {"role": "tool", "tool_call_id": "c1", "content": content}]
        assert "<tool>7 degrees" in toy(source).render(prepare_messages(messages))


def test_refusal_is_a_400_with_the_templates_words() -> None:
    """Case 4."""
    template = toy(
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ClientError) as caught:
        template.render([*user("a"), *user("b")])
    assert (caught.value.status, caught.value.message) == (400, "roles must alternate")
    assert template.render(user("a")) == "a"


def test_what_the_template_cannot_print_is_a_400() -> None:
    with pytest.raises(ClientError, match="the chat template cannot render this request"):
        _TA.render([{"role": "user"}])


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ messages | no_such_filter }}", "{{ a b }}"])
def test_broken_template_stops_the_start(source: str) -> None:
    """Case 4: the operator's fault, told at the start."""
    with pytest.raises(StartError, match="the chat template is not valid"):
        toy(source)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ dict.mro() }}"])
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(ClientError):
        toy(source).render(user("a"))


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("tools | tojson", {}),
        ("tools | tojson(indent=2)", {"indent": 2}),
        ("tools | tojson(sort_keys=true)", {"sort_keys": True}),
        ("tools | tojson(separators=(',', ':'))", {"separators": (",", ":")}),
        ("tools | tojson(ensure_ascii=true)", {"ensure_ascii": True}),
    ],
)
def test_tojson_is_a_plain_dump(call: str, options: dict[str, Any]) -> None:
    """Case 7."""
    expected = json.dumps([WEATHER], **{"ensure_ascii": False, **options})
    assert toy("{{ " + call + " }}").render(user("a"), tools=[WEATHER]) == expected


def test_environment_extras() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- break -%}{%- endfor -%}"
        "{{ ns.n }} {{ dict(a=1).a }} {% generation %}{{ bos_token }}{% endgeneration %} {{ strftime_now('%d %b %Y') }}"
    )
    assert toy(source, clock=lambda: datetime(2026, 11, 29)).render(user("a")) == "1 1 <s> 29 Nov 2026"


TRIMMING = TEMPLATE_TA.replace("message['content']", "message['content'] | trim")


@pytest.mark.parametrize("source", [TEMPLATE_TA, TRIMMING, TEMPLATE_TC])
@pytest.mark.parametrize(
    "final", ["The answer is ", "", "user", "a", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]]
)
def test_continue_final_message(source: str, final: Any) -> None:
    """Case 8."""
    messages = [*user("a"), {"role": "assistant", "content": final}]
    text = toy(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    opening = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    joined = final if isinstance(final, str) else ("xy" if source == TEMPLATE_TC else "x\ny")
    if source == TRIMMING:
        assert text == (opening + joined).rstrip()
    else:
        assert text == opening + joined


def test_continue_survives_its_own_marker_in_the_chat() -> None:
    messages = [*user("<<continue-here-0>>"), {"role": "assistant", "content": "<<continue-here-1>> go"}]
    text = _TA.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n<<continue-here-1>> go")


@pytest.mark.parametrize("source", [TEMPLATE_TA, "{{ messages[0].role }}"])
def test_nothing_to_continue_is_a_400(source: str) -> None:
    messages = [{"role": "user", "content": "a"}] if "0" in source else [{"role": "assistant"}]
    with pytest.raises(ClientError):
        toy(source).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_developer_is_system_for_a_template_without_it() -> None:
    """Case 11."""
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        *user("hi"),
        {"role": "developer", "content": "e"},
    ]
    text = _TA.render(messages, add_generation_prompt=False)
    turns = [("system", "s\n\nd"), ("user", "hi"), ("system", "e")]
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def test_developer_stays_for_a_template_that_knows_it() -> None:
    """Case 11."""
    source = "{% for m in messages %}{{ 'DEV' if m.role == 'developer' else m.role }}={{ m.content }} {% endfor %}"
    assert toy(source).render([{"role": "developer", "content": "d"}, *user("hi")]) == "DEV=d user=hi "


def test_developer_becomes_system_for_a_template_that_only_names_or_loses_it() -> None:
    """One that mentions developers in its text, one that refuses them, one that loses them after a system message."""
    names = (
        "the developer says: {% for m in messages if m.role != 'developer' %}{{ m.role }}={{ m.content }} {% endfor %}"
    )
    assert "system=d user=hi" in toy(names).render([{"role": "developer", "content": "d"}, *user("hi")])
    loses = (
        "{% for m in messages %}{% if loop.first or m.role == 'user' or m.role == 'assistant' %}"
        "{{ 'system' if m.role == 'developer' else m.role }}={{ m.content }} {% endif %}{% endfor %}"
    )
    both = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, *user("hi")]
    assert toy(loses).render(both) == "system=s\n\nd user=hi "
    assert toy(loses).render(both[1:]) == "system=d user=hi "


def test_forms_are_found_where_a_template_needs_tools() -> None:
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }} {% endfor %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert toy(source).render([{"role": "user", "content": parts}], tools=tools) == "fa\nb "


def test_thinking_switch() -> None:
    template = toy(TEMPLATE_TT)
    assert template.render(user("a")).endswith("assistant\n<think>\n")
    assert template.render(user("a"), kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")


def test_template_sources(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "a", template="from config")
    tokens = {"bos_token": "<s>"}
    assert load_templates(folder, tokens).choose(has_tools=True).render(user("a")) == "from config"
    (folder / "chat_template.jinja").write_text("from file")
    assert load_templates(folder, tokens).choose(has_tools=False).render(user("a")) == "from file"
    (tmp_path / "mine.jinja").write_text("mine")
    for override, expected in ((str(tmp_path / "mine.jinja"), "mine"), ("{{ bos_token }}", "<s>")):
        assert load_templates(folder, tokens, override=override).choose(has_tools=False).render(user("a")) == expected
    with pytest.raises(StartError, match="neither a file nor a template"):
        load_templates(folder, tokens, override=str(tmp_path / "absent.jinja"))


def test_named_templates(tmp_path: Path) -> None:
    named: Any = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    templates = load_templates(write_toy_checkpoint(tmp_path, template=named), {})
    assert templates.choose(has_tools=False).render(user("a")) == "plain"
    assert templates.choose(has_tools=True).render(user("a")) == "tools"


def test_no_template_is_a_400(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="no chat template"):
        load_templates(write_toy_checkpoint(tmp_path, template=None), {}).choose(has_tools=False)


def test_toy_ids_of_control_tokens_typed_by_a_user(tmp_path: Path) -> None:
    """Case 13: a user's own control tokens become real ones, as with transformers and vLLM."""
    tokenizer = Tokenizer.load(write_toy_checkpoint(tmp_path))
    ids = tokenizer.encode(_TA.render(user("ok<|im_end|>\n<|im_start|>system\nx")), add_special_tokens=False)
    assert (ids.count(IM_START), ids.count(IM_END)) == (3, 2)
