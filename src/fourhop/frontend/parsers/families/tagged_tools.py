"""Families of tool-call markup that write each argument in tags of its own."""

from __future__ import annotations

import re

from fourhop.frontend.parsers.table import CONTENT, GAP, LAYOUT, State, ToolFamily
from fourhop.frontend.parsers.tagged_call import (
    PLAIN_KEY,
    PLAIN_NAME,
    QUOTED_KEY,
    QUOTED_NAME,
    Between,
    CallEnd,
    KeyTag,
    NameTag,
    Tags,
    ValueText,
)


def tagged(
    tags: Tags, section: tuple[str, str], call: tuple[str, str], argument: tuple[str, str], *, is_bare: bool = False
) -> ToolFamily:
    """`SECTION CALL name> ARGUMENT key> value /ARGUMENT … /CALL … /SECTION`; each pair is a beginning and an end.

    A beginning stops where its attribute starts, and `>` ends that. `is_bare`: the section's markers may be missing.
    """
    opening, closing = section
    ends = {call[1]: "call_end", closing: "after_calls"}
    starts = {call[0]: "name"}
    return ToolFamily(
        {
            "content": State(CONTENT, {opening: "section", **(starts if is_bare else {})}),
            "section": State(GAP, {**starts, closing: "after_calls"}),
            "name": State(NameTag(tags), {">": "between", closing: "after_calls"}),
            "between": State(Between(tags), {argument[0]: "key", **ends, closing: "section_end"}, continues=True),
            "key": State(KeyTag(tags), {">": "value", closing: "section_end"}, continues=True),
            "value": State(ValueText(tags), {argument[1]: "between", closing: "section_end"}, continues=True),
            "call_end": State(CallEnd(tags), {opening: "section", **starts, closing: "after_calls"}, continues=True),
            "section_end": State(CallEnd(tags), {opening: "section", **starts}, continues=True),
            "after_calls": State(LAYOUT, {opening: "section", **(starts if is_bare else {})}),
        }
    )


QWEN3_CODER = tagged(
    Tags(PLAIN_NAME, PLAIN_KEY, margin="\n"),
    ("<tool_call>", "</tool_call>"),
    ("<function=", "</function>"),
    ("<parameter=", "</parameter>"),
    is_bare=True,
)
SEED_OSS = tagged(
    Tags(PLAIN_NAME, PLAIN_KEY),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", "</function>"),
    ("<parameter=", "</parameter>"),
)
MINIMAX_M2 = tagged(
    Tags(QUOTED_NAME, QUOTED_KEY),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<invoke name=", "</invoke>"),
    ("<parameter name=", "</parameter>"),
)
DEEPSEEK_V32 = tagged(
    Tags(QUOTED_NAME, re.compile(r'"?(?P<name>[^"<>]+)"?(?:\s+string="(?P<string>true|false)")?')),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
    ("<｜DSML｜parameter name=", "</｜DSML｜parameter>"),
)


def step3() -> ToolFamily:
    """Each call stands in a pair of markers of its own, behind the word `function`."""
    tags = Tags(QUOTED_NAME, QUOTED_KEY)
    section, section_end = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    begin, end = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
    ends = {end: "call_end", section_end: "section_end"}
    after = {begin: "kind", section_end: "after_calls"}
    return ToolFamily(
        {
            "content": State(CONTENT, {section: "section"}),
            "section": State(GAP, after),
            "kind": State(LAYOUT, {"<｜tool_sep｜>": "call", end: "section", **after}),
            "call": State(GAP, {"<steptml:invoke name=": "name", end: "section", **after}),
            "name": State(NameTag(tags), {">": "between", **after}),
            "between": State(
                Between(tags),
                {"<steptml:parameter name=": "key", "</steptml:invoke>": "call_end", **ends},
                continues=True,
            ),
            "key": State(KeyTag(tags), {">": "value", **ends}, continues=True),
            "value": State(ValueText(tags), {"</steptml:parameter>": "between", **ends}, continues=True),
            "call_end": State(CallEnd(tags), {end: "call_end", **after}, continues=True),
            "section_end": State(CallEnd(tags), {section: "section"}, continues=True),
            "after_calls": State(LAYOUT, {section: "section"}),
        }
    )


def glm() -> ToolFamily:
    """Name, keys and values with markers between them; nothing but the name is needed."""
    tags = Tags(PLAIN_NAME, PLAIN_KEY)
    end = {"</tool_call>": "call_end"}
    return ToolFamily(
        {
            "content": State(CONTENT, {"<tool_call>": "name"}),
            "name": State(NameTag(tags), {"<arg_key>": "key", **end}),
            "key": State(KeyTag(tags), {"</arg_key>": "before_value", "<arg_value>": "value", **end}, continues=True),
            "before_value": State(LAYOUT, {"<arg_value>": "value", "<arg_key>": "key", **end}, continues=True),
            "value": State(ValueText(tags), {"</arg_value>": "between", **end}, continues=True),
            "between": State(Between(tags), {"<arg_key>": "key", **end}, continues=True),
            "call_end": State(CallEnd(tags), {"<tool_call>": "name"}, continues=True),
        }
    )


GLM = glm()

TAGGED_TOOLS = {
    "deepseek_v32": DEEPSEEK_V32,
    "glm45": GLM,
    "glm47": GLM,
    "minimax_m2": MINIMAX_M2,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "step3": step3(),
}
