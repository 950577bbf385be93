"""Families of thinking markup."""

from __future__ import annotations

from dataclasses import replace

from fourhop.frontend.parsers.harmony import harmony_states
from fourhop.frontend.parsers.table import CONTENT, REASONING, ReasoningFamily, State


def think_states(opening: str, closing: str) -> dict[str, State]:
    """Thinking between two markers."""
    return {
        # The prompt did not open thinking; the model still may.
        "unopened": State(CONTENT, {opening: "thinking", closing: "content"}),
        "thinking": State(REASONING, {opening: "thinking", closing: "content"}),
        # Thinking ends once. A second closing tag is swallowed, an opening one is text.
        "content": State(CONTENT, {closing: "content"}),
    }


QWEN3 = ReasoningFamily(
    states=think_states("<think>", "</think>"),
    opening="<think>",
    closing="</think>",
    inside="thinking",
    outside="unopened",
    turns=("<|im_start|>", "<|im_end|>"),
    switches=("enable_thinking",),
    call_ends_thinking=True,
)

# The prompt may leave the opening to no one: thinking is the default.
NEMOTRON_V3 = replace(QWEN3, opens_unasked=True, call_ends_thinking=False)

DEEPSEEK_R1 = replace(
    QWEN3,
    turns=("<｜User｜>", "<｜Assistant｜>"),
    switches=(),
    opens_unasked=True,
    call_ends_thinking=False,
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_R1,
    switches=("thinking", "enable_thinking"),
    opens_unasked=False,
    is_off_unasked=True,
    call_ends_thinking=True,
)

GLM45 = replace(
    QWEN3,
    turns=("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    switches=("enable_thinking", "thinking"),
)

KIMI_K2 = replace(
    QWEN3,
    turns=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_end|>"),
    switches=("thinking", "enable_thinking"),
    opens_unasked=True,
)

MINIMAX_M2 = replace(QWEN3, turns=("]~b]", "[e~["), switches=(), opens_unasked=True, call_ends_thinking=False)

STEP3 = replace(QWEN3, turns=("<|BOT|>", "<|EOT|>"), switches=(), opens_unasked=True, call_ends_thinking=False)

SEED_OSS = replace(
    QWEN3,
    states=think_states("<seed:think>", "</seed:think>"),
    opening="<seed:think>",
    closing="</seed:think>",
    turns=("<seed:bos>", "<seed:eos>"),
    switches=(),
    call_ends_thinking=False,
)

MISTRAL = replace(
    QWEN3,
    states=think_states("[THINK]", "[/THINK]"),
    opening="[THINK]",
    closing="[/THINK]",
    turns=("[INST]", "[/INST]", "[/TOOL_RESULTS]"),
    switches=(),
    call_ends_thinking=False,
)

# Sentences, not tags: outside of their one place they are the answer's own words.
GRANITE = replace(
    QWEN3,
    states={
        "unopened": State(
            CONTENT, {"Here is my thought process:": "thinking", "Here's my thought process:": "thinking"}
        ),
        "thinking": State(REASONING, {"Here is my response:": "content", "Here's my response:": "content"}),
        "content": State(CONTENT),
    },
    opening="Here is my thought process:",
    closing="Here is my response:",
    turns=("<|start_of_role|>", "<|end_of_text|>"),
    switches=("thinking",),
    is_off_unasked=True,
    call_ends_thinking=False,
)

HARMONY = ReasoningFamily(
    states=harmony_states(CONTENT),
    opening="<|channel|>analysis<|message|>",
    closing="<|channel|>final<|message|>",
    inside="analysis",
    outside="content",
    turns=("<|start|>",),
)

THINKING = {
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_v3": DEEPSEEK_V3,
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": GRANITE,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "nemotron_v3": NEMOTRON_V3,
    "openai_gptoss": HARMONY,
    "qwen3": QWEN3,
    "seed_oss": SEED_OSS,
    "step3": STEP3,
}
