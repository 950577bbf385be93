"""Which parsers a server has: named, told from the chat template, or from a plugin."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes.derendering import chunked, context, derender, shown, spelled_toy
from fakes.toy import TEMPLATE_TA, TEMPLATE_TT, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend import load
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.load import load_renderer
from fourhop.frontend.parsers import Parsers, find, plugins
from fourhop.frontend.parsers.detect import REASONING_SIGNS, TOOL_SIGNS, UNREAD, detect
from fourhop.frontend.parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from fourhop.frontend.parsers.plugins import Catalog, Plugin, load_catalog
from fourhop.frontend.parsers.table import CONTENT, REASONING, ReasoningFamily, State, ToolFamily
from fourhop.wire.errors import StartError

CHATML = "<|im_start|>{{ message.role }}"


@pytest.mark.parametrize(
    ("template", "reasoning", "tool"),
    [
        (CHATML, None, None),
        (CHATML + "'<think>\\n\\n</think>'", "qwen3", None),
        (
            CHATML + "<think></think> truncate_history_thinking <tool_call>\n<function=x>\n<parameter=y>",
            "nemotron_v3",
            "qwen3_coder",
        ),
        (CHATML + '</think> <tool_call>\n{"name": "n", "arguments": "a"}\n</tool_call>', "qwen3", "hermes"),
        ("<｜User｜><｜Assistant｜> content.split('</think>')", "deepseek_r1", None),
        ("<｜Assistant｜><think>{% if not enable_thinking %}</think>{% endif %}", "deepseek_r1", None),
        ("]~b]ai '<mm:think>' '</mm:think>' ns_token ~ '<tool_call>'", None, None),
        ("<｜Assistant｜></think> {% set thinking = false %}<｜tool▁calls▁begin｜>", "deepseek_v3", "deepseek_v31"),
        ("<｜Assistant｜><｜tool▁calls▁begin｜>function\n```json\n", None, "deepseek_v3"),
        ("<｜Assistant｜></think> thinking_mode '｜DSML｜' function_calls", "deepseek_v3", "deepseek_v32"),
        ("[gMASK]<|assistant|></think><|observation|><tool_call>f<arg_key>", "glm45", "glm45"),
        ("<|im_assistant|><think></think><|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
        ("]~b]ai\n<think></think><minimax:tool_call>", "minimax_m2", "minimax_m2"),
        ("<|BOT|></think><｜tool_calls_begin｜><steptml:invoke", "step3", "step3"),
        ("'<seed:think>' '</seed:think>' '<seed:tool_call>' <function=f> <parameter=a>", "seed_oss", "seed_oss"),
        ("[INST] [THINK] [/THINK] [TOOL_CALLS]", "mistral", "mistral"),
        ("<|start_of_role|> 'Here is my thought process:' 'Here is my response:' <|tool_call|>", "granite", "granite"),
        ("<|start_of_role|> <tool_call>", None, "granite4"),
        ('"<|start|>assistant<|channel|>analysis<|message|>" "functions." + tool_call.name', "openai_gptoss", "openai"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', None, "llama3_json"),
        ("<|header_start|> dictionary of argument name and its value", None, "llama4_json"),
        ("<|header_start|> [func_name1(param1=value1)]", None, "llama4_pythonic"),
        ("[func_name1(params_name1=params_value1)]", None, "pythonic"),
        ("functools[", None, "phi4_mini_json"),
        ("<|action_start|><|plugin|>", None, "internlm"),
        ("<tool_calls>\n[\n</tool_calls>", None, "jamba"),
        ('[{"name": "tool_call_name", "arguments": {}}]', None, "xlam"),
    ],
)
def test_families_are_told_from_what_templates_write(template: str, reasoning: str | None, tool: str | None) -> None:
    assert (detect(template, REASONING_SIGNS), detect(template, TOOL_SIGNS)) == (reasoning, tool)


def test_nothing_is_guessed_where_two_families_match_equally() -> None:
    assert detect("[TOOL_CALLS] <tool_call>", TOOL_SIGNS) is None
    assert detect("</think> <|im_start|> <|observation|>", REASONING_SIGNS) is None


def test_every_sign_names_a_family() -> None:
    assert set(REASONING_SIGNS) <= set(REASONING_FAMILIES)
    assert set(TOOL_SIGNS) - UNREAD <= set(TOOL_FAMILIES)


HERMES_TEMPLATE = TEMPLATE_TT + "{# <tool_call> #}"


@pytest.mark.parametrize(
    ("template", "fields", "reasoning", "tool", "calls"),
    [
        (HERMES_TEMPLATE, {}, "qwen3", "hermes", True),
        (TEMPLATE_TA, {}, "none", "none", False),
        (HERMES_TEMPLATE, {"reasoning_parser": "none", "tool_call_parser": "none"}, "none", "none", False),
        (HERMES_TEMPLATE, {"enable_auto_tool_choice": False}, "qwen3", "hermes", False),
        (TEMPLATE_TA, {"tool_call_parser": "pythonic"}, "none", "pythonic", True),
        (None, {}, "none", "none", False),
    ],
)
def test_parsers_that_are_not_named_come_from_the_template(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    template: str | None,
    fields: dict[str, Any],
    reasoning: str,
    tool: str,
    calls: bool,
) -> None:
    """Said in one line at the start."""
    folder = write_toy_checkpoint(tmp_path, template=template)
    with caplog.at_level(logging.INFO, logger=load.log.name):
        renderer = load_renderer(Checkpoint("m", folder), FrontendConfig(**fields))
    config = renderer.config
    assert (config.reasoning_parser, config.tool_call_parser) == (reasoning, tool)
    assert config.enable_auto_tool_choice is calls
    assert (renderer.parsers.has_reasoning, renderer.parsers.has_tools) == (reasoning != "none", tool != "none")
    (line,) = [record.getMessage() for record in caplog.records if record.name == load.log.name]
    assert f"reasoning parser: {reasoning} (" in line and f"tool call parser: {tool} (" in line


def test_calls_that_no_parser_can_read_stop_the_start(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    with pytest.raises(StartError, match="needs a tool_call_parser"):
        load_renderer(Checkpoint("m", folder), FrontendConfig(enable_auto_tool_choice=True))


def test_calls_are_read_only_where_a_request_offers_tools() -> None:
    """The parser is on for the whole server; a request without tools gets its text."""
    text = "[f(a=1)]"
    for tools, expected in (([{"type": "function", "function": {"name": "f"}}], None), (None, text)):
        ctx = context(None, "pythonic", tokenizer=spelled_toy(), tools=tools)
        assert shown(derender(ctx, chunked([list(text.encode())], "length")))[0] == expected


# Plugins

QUOTES = ReasoningFamily(
    states={"content": State(CONTENT, {"<<": "thinking"}), "thinking": State(REASONING, {">>": "content"})},
    opening="<<",
    closing=">>",
    inside="thinking",
    outside="content",
)
PLUGIN = Plugin(
    reasoning={"quotes": QUOTES},
    tools={"hermes": ToolFamily({"content": State(CONTENT)})},
    reasoning_signs={"quotes": ("<<", ">>")},
)
NO_PLUGIN = 7


def _use_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are no package that can be imported by name."""
    monkeypatch.setitem(sys.modules, "my_parsers", sys.modules[__name__])


def test_a_plugin_adds_families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _use_this_module(monkeypatch)
    folder = write_toy_checkpoint(tmp_path, template=TEMPLATE_TA + "{# << >> #}")
    renderer = load_renderer(Checkpoint("m", folder), FrontendConfig(parser_plugin=("my_parsers:PLUGIN",)))
    assert renderer.config.reasoning_parser == "quotes"
    catalog = load_catalog(["my_parsers:PLUGIN"])
    assert catalog.tools["hermes"] is PLUGIN.tools["hermes"]
    assert catalog.tools["qwen3_json"] is TOOL_FAMILIES["hermes"]
    parsers = find("quotes", "hermes", spelled_toy(), catalog)
    assert isinstance(parsers, Parsers) and parsers.has_reasoning


def test_installed_packages_add_families(monkeypatch: pytest.MonkeyPatch) -> None:
    _use_this_module(monkeypatch)
    entry = EntryPoint(name="quotes", value="my_parsers:PLUGIN", group=plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "fourhop.parsers" else [])
    assert load_catalog().reasoning["quotes"] is QUOTES
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    assert load_catalog() == Catalog()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_parsers", "not of the form module:attribute"),
        (":PLUGIN", "not of the form"),
        ("no_such_module:PLUGIN", "no_such_module:PLUGIN cannot be loaded"),
        ("my_parsers:NOTHING", "cannot be loaded"),
        ("my_parsers:NO_PLUGIN", "is a int, not a Plugin"),
    ],
)
def test_a_plugin_that_cannot_be_used_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    _use_this_module(monkeypatch)
    with pytest.raises(StartError, match=message):
        load_catalog([name])


def test_a_table_that_leads_nowhere_stops_the_start() -> None:
    broken = Plugin(tools={"broken": ToolFamily({"content": State(CONTENT, {"<x>": "call"})})})
    with pytest.raises(StartError, match="leads to the state 'call'"):
        find(None, "broken", spelled_toy(), Catalog().extend(broken))


def test_the_documents_plugin_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/parsers.md shows a whole family; its names are those of the tables."""
    text = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text(encoding="utf-8")
    module = ModuleType("shown_parsers")
    exec(text.partition("```python\n")[2].partition("```")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "shown_parsers", module)
    catalog = load_catalog(["shown_parsers:PLUGIN"])
    assert detect("<call></call>", catalog.tool_signs) == "mine"
    ctx = context(None, None, tokenizer=spelled_toy())
    parsers = find(None, "mine", spelled_toy(), catalog)
    ctx = replace(ctx, parsers=parsers, table=parsers.with_tools)
    output = b'x<call>{"tool":"f","input":{"a":1}}</call>'
    assert shown(derender(ctx, chunked([list(output)], "length"))) == ("x", None, [("f", '{"a":1}')], "length")
    for name in (*REASONING_FAMILIES, *TOOL_FAMILIES):
        assert f"`{name}`" in text
