"""Which families a chat template belongs to, told from the markup that it writes itself.

A family is recognised by its signs: texts that all occur in the template. One whose signs include another's is the more
exact match and wins. Where two families match and neither includes the other, none is named: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

Signs = Mapping[str, frozenset[str]]


UNREAD = frozenset({"minimax_m3"})
"""Families that have signs and no parser here: without their signs they would be taken for others."""


def detect(template: str, signs: Signs) -> str | None:
    """The family of a template, None if there is none or no single best one."""
    found = {name: texts for name, texts in signs.items() if all(text in template for text in texts)}
    best = [name for name, texts in found.items() if not any(texts < other for other in found.values())]
    return best[0] if len(best) == 1 and best[0] not in UNREAD else None


def _signs(table: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(texts) for name, texts in table.items()}


REASONING_SIGNS = _signs(
    {
        "deepseek_r1": ("</think>", "<｜Assistant｜>"),
        "deepseek_v3": ("</think>", "<｜Assistant｜>", " thinking"),
        "glm45": ("</think>", "<|observation|>"),
        "granite": ("Here is my thought process:", "Here is my response:"),
        "kimi_k2": ("</think>", "<|im_assistant|>"),
        "minimax_m2": ("</think>", "]~b]"),
        "mistral": ("[THINK]", "[/THINK]"),
        "nemotron_v3": ("</think>", "<|im_start|>", "truncate_history_thinking"),
        "openai_gptoss": ("<|start|>", "<|channel|>", "analysis"),
        "qwen3": ("</think>", "<|im_start|>"),
        "seed_oss": ("<seed:think>", "</seed:think>"),
        "step3": ("</think>", "<|BOT|>"),
    }
)

TOOL_SIGNS = _signs(
    {
        "deepseek_v3": ("<｜tool▁calls▁begin｜>", "```json"),
        "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
        "deepseek_v32": ("｜DSML｜", "function_calls"),
        "glm45": ("<tool_call>", "<arg_key>"),
        "granite": ("<|start_of_role|>", "<|tool_call|>"),
        "granite-20b-fc": ("<|function_call_library|>", "<function_call>"),
        "granite4": ("<|start_of_role|>", "<tool_call>"),
        "hermes": ("<tool_call>",),
        "internlm": ("<|action_start|>", "<|plugin|>"),
        "jamba": ("<tool_calls>", "</tool_calls>"),
        "kimi_k2": ("<|tool_calls_section_begin|>",),
        "lfm2": ("<|tool_call_start|>",),
        "llama3_json": ("dictionary of argument name and its value",),
        "llama4_json": ("dictionary of argument name and its value", "<|header_start|>"),
        "llama4_pythonic": ("[func_name1(", "<|header_start|>"),
        "minimax_m2": ("<minimax:tool_call>",),
        "minimax_m3": ("<tool_call>", "<mm:think>"),
        "mistral": ("[TOOL_CALLS]",),
        "openai": ("<|start|>", "<|channel|>", "functions."),
        "phi4_mini_json": ("functools[",),
        "pythonic": ("[func_name1(",),
        "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
        "seed_oss": ("<seed:tool_call>",),
        "step3": ("<｜tool_calls_begin｜>", "steptml"),
        "xlam": ('"name": "tool_call_name"',),
    }
)
