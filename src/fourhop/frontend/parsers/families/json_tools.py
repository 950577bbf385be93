"""Families of tool-call markup whose arguments are JSON, and those that write calls as Python."""

from __future__ import annotations

import re

from fourhop.frontend.parsers.harmony import Arguments, harmony_states
from fourhop.frontend.parsers.json_call import JsonCall
from fourhop.frontend.parsers.json_calls import JsonCalls
from fourhop.frontend.parsers.mistral_calls import MistralCalls
from fourhop.frontend.parsers.named_call import MARK, NAME, NamedCall, NamedCallEnd
from fourhop.frontend.parsers.python_calls import PythonCalls
from fourhop.frontend.parsers.table import CONTENT, GAP, LAYOUT, State, ToolFamily, letters_id

CALL = JsonCall(name="name", arguments=("arguments",))
CALL_OF_PARAMETERS = JsonCall(name="name", arguments=("parameters", "arguments"))


def marked(body: JsonCall | JsonCalls | PythonCalls, opening: str, closing: str) -> dict[str, State]:
    """Calls between two markers. Text behind the first call is layout."""
    return {
        "content": State(CONTENT, {opening: "call"}),
        "call": State(body, {closing: "after_call"}),
        "after_call": State(LAYOUT, {opening: "call"}),
    }


def bare(body: JsonCalls | PythonCalls, openings: tuple[str, ...] = (), closings: tuple[str, ...] = ()) -> ToolFamily:
    """Calls that are the whole answer, with markers around them or without."""
    return ToolFamily(
        {
            "content": State(body, dict.fromkeys(openings, "call")),
            "call": State(body, dict.fromkeys(closings, "after_call")),
            "after_call": State(LAYOUT, dict.fromkeys(openings, "call")),
        }
    )


HERMES = ToolFamily(marked(CALL, "<tool_call>", "</tool_call>"))
JAMBA = ToolFamily(marked(JsonCalls(CALL), "<tool_calls>", "</tool_calls>"))
LFM2 = ToolFamily(marked(PythonCalls(), "<|tool_call_start|>", "<|tool_call_end|>"))
GRANITE_20B = ToolFamily(
    {
        "content": State(CONTENT, {"<function_call>": "call"}),
        "call": State(CALL, {"<function_call>": "call"}),
    }
)
INTERNLM = ToolFamily(
    {
        "content": State(CONTENT, {"<|action_start|>": "action"}),
        "action": State(GAP, {"<|plugin|>": "call", "<|action_end|>": "after_call"}),
        "call": State(CALL_OF_PARAMETERS, {"<|action_end|>": "after_call"}),
        "after_call": State(LAYOUT, {"<|action_start|>": "action"}),
    }
)

LLAMA3 = bare(JsonCalls(CALL_OF_PARAMETERS), ("<|python_tag|>",))
# What may be spelled is a prefix, not a marker: an argument may hold it.
GRANITE = bare(JsonCalls(CALL, prefixes=("<tool_call>",)), ("<|tool_call|>",))
PHI4_MINI = bare(JsonCalls(CALL, prefixes=("functools",)), ("<|tool_call|>",), ("<|/tool_call|>",))
XLAM = bare(JsonCalls(CALL, prefixes=("```json", "```", "[TOOL_CALLS]", "<tool_call>")))
PYTHONIC = bare(PythonCalls())
LLAMA4_PYTHONIC = bare(PythonCalls(), ("<|python_start|>",), ("<|python_end|>",))


def sectioned(call: NamedCall, section: tuple[str, str], markers: tuple[str, str], *, divider: str) -> ToolFamily:
    """A section of calls, each between two markers, its head and its arguments divided by a third one."""
    begin, end = markers
    after = {begin: "call", section[1]: "after_calls"}
    return ToolFamily(
        {
            "content": State(CONTENT, {section[0]: "section"}),
            "section": State(GAP, after),
            "call": State(call, {divider: "arguments", end: "call_end", **after}),
            "arguments": State(call, {end: "call_end", **after}, continues=True),
            "call_end": State(NamedCallEnd(call), after, continues=True),
            "after_calls": State(LAYOUT, {section[0]: "section"}),
        }
    )


def deepseek(head: str) -> ToolFamily:
    return sectioned(
        NamedCall(re.compile(head)),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        divider="<｜tool▁sep｜>",
    )


DEEPSEEK_V3 = deepseek(rf"{MARK}\s*function\s*{MARK}\s*(?P<name>{NAME})[ \t]*\r?\n\s*```(?:json)?\s*")
DEEPSEEK_V31 = deepseek(rf"{MARK}\s*(?P<name>{NAME})\s*{MARK}\s*")

# The head is the call's id as well: the next turn has to repeat it.
KIMI_ID = rf"(?P<id>functions\.{NAME}:\d+)\s*{MARK}"
KIMI_K2 = sectioned(
    NamedCall(re.compile(rf"{MARK}\s*(?:(?={KIMI_ID}))?(?:functions\.)?(?P<name>{NAME})(?::\d+)?\s*{MARK}\s*")),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    divider="<|tool_call_argument_begin|>",
)

MISTRAL_CALL = NamedCall(
    re.compile(rf"{MARK}\s*(?P<name>{NAME})\s*(?:{MARK}\s*(?:(?P<id>[A-Za-z0-9]{{1,64}})\s*{MARK}\s*)?)?")
)
MISTRAL = ToolFamily(
    {
        "content": State(CONTENT, {"[TOOL_CALLS]": "call"}),
        "call": State(
            MistralCalls(JsonCalls(CALL), MISTRAL_CALL),
            {"[TOOL_CALLS]": "call", "[CALL_ID]": "part", "[ARGS]": "part"},
        ),
        "part": State(MISTRAL_CALL, {"[TOOL_CALLS]": "call", "[CALL_ID]": "part", "[ARGS]": "part"}, continues=True),
    },
    new_id=letters_id,
)

OPENAI = ToolFamily(harmony_states(Arguments()))

JSON_TOOLS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "granite": GRANITE,
    "granite-20b-fc": GRANITE_20B,
    "granite4": HERMES,
    "hermes": HERMES,
    "internlm": INTERNLM,
    "jamba": JAMBA,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "llama4_pythonic": LLAMA4_PYTHONIC,
    "mistral": MISTRAL,
    "openai": OPENAI,
    "phi4_mini_json": PHI4_MINI,
    "pythonic": PYTHONIC,
    "qwen3_json": HERMES,
    "xlam": XLAM,
}
