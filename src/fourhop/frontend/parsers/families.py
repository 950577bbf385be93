"""The model families that are known: name → table. Grammars: vLLM 0.32, reasoning and tool parsers."""

from __future__ import annotations

from dataclasses import replace

from fourhop.frontend.parsers.json_call import JsonCall
from fourhop.frontend.parsers.table import CONTENT, LAYOUT, REASONING, ReasoningFamily, State, ToolFamily

THINK = {
    # The prompt did not open thinking; the model still may.
    "unopened": State(CONTENT, {"<think>": "thinking", "</think>": "content"}),
    "thinking": State(REASONING, {"<think>": "thinking", "</think>": "content"}),
    # Thinking ends once. A second closing tag is swallowed, an opening one is text.
    "content": State(CONTENT, {"</think>": "content"}),
}

QWEN3 = ReasoningFamily(
    states=THINK,
    opening="<think>",
    closing="</think>",
    inside="thinking",
    outside="unopened",
    turns=("<|im_start|>", "<|im_end|>"),
    switches=("enable_thinking",),
    call_ends_thinking=True,
)

DEEPSEEK_R1 = replace(
    QWEN3,
    turns=("<｜User｜>", "<｜Assistant｜>"),
    switches=(),
    opens_unasked=True,
    call_ends_thinking=False,
)

HERMES = ToolFamily(
    {
        "content": State(CONTENT, {"<tool_call>": "call"}),
        "call": State(JsonCall(name="name", arguments=("arguments",)), {"</tool_call>": "after_call"}),
        "after_call": State(LAYOUT, {"<tool_call>": "call"}),
    }
)

REASONING_FAMILIES: dict[str, ReasoningFamily | None] = {
    "none": None,
    "qwen3": QWEN3,
    "deepseek_r1": DEEPSEEK_R1,
}

TOOL_FAMILIES: dict[str, ToolFamily | None] = {
    "none": None,
    "hermes": HERMES,
    "qwen3_json": HERMES,
}
