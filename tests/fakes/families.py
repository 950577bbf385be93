"""What a model of each tool family writes for given calls, and the markers that its vocabulary has as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fakes.derendering import marked_toy
from fourhop.frontend.tokenizer import Tokenizer


class Mark(str):
    """A marker that real vocabularies of the family hold as one token. Other text is spelled everywhere."""


Written = list[str]
Call = tuple[str, dict[str, Any]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_of(value: Any) -> str:
    """A value inside of tags."""
    return value if isinstance(value, str) else dumps(value)


def named(call: Call, arguments: str = "arguments") -> str:
    return dumps({"name": call[0], arguments: call[1]})


def hermes(calls: Sequence[Call]) -> Written:
    parts = [[Mark("<tool_call>"), f"\n{named(call)}\n", Mark("</tool_call>")] for call in calls]
    return [piece for part in parts for piece in [*part, "\n"]]


def bare_list(prefix: str = "") -> Callable[[Sequence[Call]], Written]:
    return lambda calls: [prefix + "[" + ", ".join(named(call) for call in calls) + "]"]


def llama(calls: Sequence[Call]) -> Written:
    return ["; ".join(named(call, "parameters") for call in calls)]


def marked_llama(calls: Sequence[Call]) -> Written:
    return [Mark("<|python_tag|>"), *llama(calls)]


def jamba(calls: Sequence[Call]) -> Written:
    return [Mark("<tool_calls>"), *bare_list("\n")(calls), Mark("</tool_calls>")]


def granite(calls: Sequence[Call]) -> Written:
    return [Mark("<|tool_call|>"), *bare_list()(calls)]


def granite_20b(calls: Sequence[Call]) -> Written:
    return [piece for call in calls for piece in (Mark("<function_call>"), " " + named(call) + "\n")]


def internlm(calls: Sequence[Call]) -> Written:
    markup = [Mark("<|action_start|>"), Mark("<|plugin|>")]
    parts = [[*markup, "\n" + named(call, "parameters"), Mark("<|action_end|>")] for call in calls]
    return [piece for part in parts for piece in part]


def mistral(calls: Sequence[Call]) -> Written:
    return [piece for f, a in calls for piece in (Mark("[TOOL_CALLS]"), f, Mark("[ARGS]"), dumps(a))]


def mistral_bare(calls: Sequence[Call]) -> Written:
    return [piece for f, a in calls for piece in (Mark("[TOOL_CALLS]"), f, dumps(a))]


def old_mistral(calls: Sequence[Call]) -> Written:
    return [Mark("[TOOL_CALLS]"), *bare_list(" ")(calls)]


def deepseek_v3(calls: Sequence[Call]) -> Written:
    parts = [
        [Mark("<｜tool▁call▁begin｜>"), "function", Mark("<｜tool▁sep｜>"), f"{f}\n```json\n{dumps(a)}\n```"]
        for f, a in calls
    ]
    inner = [piece for part in parts for piece in [*part, Mark("<｜tool▁call▁end｜>"), "\n"]]
    return [Mark("<｜tool▁calls▁begin｜>"), *inner, Mark("<｜tool▁calls▁end｜>")]


def deepseek_v31(calls: Sequence[Call]) -> Written:
    parts = [[Mark("<｜tool▁call▁begin｜>"), f, Mark("<｜tool▁sep｜>"), dumps(a)] for f, a in calls]
    inner = [piece for part in parts for piece in [*part, Mark("<｜tool▁call▁end｜>")]]
    return [Mark("<｜tool▁calls▁begin｜>"), *inner, Mark("<｜tool▁calls▁end｜>")]


def deepseek_v32(calls: Sequence[Call]) -> Written:
    inner = ""
    for f, a in calls:
        inner += f'\n<｜DSML｜invoke name="{f}">'
        for key, value in a.items():
            kind = "true" if isinstance(value, str) else "false"
            inner += f'\n<｜DSML｜parameter name="{key}" string="{kind}">{text_of(value)}</｜DSML｜parameter>'
        inner += "\n</｜DSML｜invoke>"
    return [f"<｜DSML｜function_calls>{inner}\n</｜DSML｜function_calls>"]


def kimi(calls: Sequence[Call]) -> Written:
    inner: Written = []
    for number, (f, a) in enumerate(calls):
        inner += [Mark("<|tool_call_begin|>"), f"functions.{f}:{number}", Mark("<|tool_call_argument_begin|>")]
        inner += [dumps(a), Mark("<|tool_call_end|>")]
    return [Mark("<|tool_calls_section_begin|>"), *inner, Mark("<|tool_calls_section_end|>")]


def harmony(calls: Sequence[Call]) -> Written:
    written: Written = []
    for f, a in calls:
        written += [Mark("<|start|>"), "assistant"] if written else []
        written += [Mark("<|channel|>"), f"commentary to=functions.{f} ", Mark("<|constrain|>"), "json"]
        written += [Mark("<|message|>"), dumps(a), Mark("<|call|>")]
    return written


def python_source(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def pythonic(calls: Sequence[Call]) -> Written:
    return ["[" + ", ".join(map(python_source, calls)) + "]"]


def llama4_pythonic(calls: Sequence[Call]) -> Written:
    return [Mark("<|python_start|>"), *pythonic(calls), Mark("<|python_end|>")]


def lfm2(calls: Sequence[Call]) -> Written:
    return [Mark("<|tool_call_start|>"), *pythonic(calls), Mark("<|tool_call_end|>")]


def qwen3_coder(calls: Sequence[Call]) -> Written:
    written: Written = []
    for f, a in calls:
        inner = "".join(f"<parameter={key}>\n{text_of(value)}\n</parameter>\n" for key, value in a.items())
        written += [Mark("<tool_call>"), f"\n<function={f}>\n{inner}</function>\n", Mark("</tool_call>"), "\n"]
    return written


def seed_oss(calls: Sequence[Call]) -> Written:
    written: Written = []
    for f, a in calls:
        inner = "".join(f"<parameter={key}>{text_of(value)}</parameter>\n" for key, value in a.items())
        written += [Mark("<seed:tool_call>"), f"\n<function={f}>\n{inner}</function>\n", Mark("</seed:tool_call>")]
    return written


def minimax(calls: Sequence[Call]) -> Written:
    inner = ""
    for f, a in calls:
        arguments = "".join(f'<parameter name="{key}">{text_of(value)}</parameter>\n' for key, value in a.items())
        inner += f'\n<invoke name="{f}">\n{arguments}</invoke>'
    return [Mark("<minimax:tool_call>"), inner + "\n", Mark("</minimax:tool_call>")]


def step3(calls: Sequence[Call]) -> Written:
    inner: Written = []
    for f, a in calls:
        tag = "steptml:parameter"
        arguments = "".join(f'<{tag} name="{key}">{text_of(value)}</{tag}>\n' for key, value in a.items())
        inner += [Mark("<｜tool_call_begin｜>"), "function", Mark("<｜tool_sep｜>")]
        inner += [f'<steptml:invoke name="{f}">\n{arguments}</steptml:invoke>', Mark("<｜tool_call_end｜>"), "\n"]
    return [Mark("<｜tool_calls_begin｜>"), "\n", *inner, Mark("<｜tool_calls_end｜>")]


def glm(calls: Sequence[Call]) -> Written:
    written: Written = []
    for f, a in calls:
        written += [Mark("<tool_call>"), f + "\n"]
        for key, value in a.items():
            written += [Mark("<arg_key>"), key, Mark("</arg_key>"), "\n"]
            written += [Mark("<arg_value>"), text_of(value), Mark("</arg_value>"), "\n"]
        written += [Mark("</tool_call>")]
    return written


@dataclass(frozen=True)
class Family:
    """`write` gives a model's output. `spelled` are the markers that no vocabulary holds, so that no value may hold
    them either. `is_bare`: calls are the whole answer.
    """

    parser: str
    write: Callable[[Sequence[Call]], Written]
    spelled: tuple[str, ...] = ()
    is_bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        written = self.write([("f", {"a": 1}), ("g", {"b": "x"})])
        return tuple(sorted({piece for piece in written if isinstance(piece, Mark)}))


FAMILIES = {
    "hermes": Family("hermes", hermes),
    "jamba": Family("jamba", jamba),
    "granite": Family("granite", granite),
    "granite-bare": Family("granite", bare_list(), is_bare=True),
    "granite-20b-fc": Family("granite-20b-fc", granite_20b),
    "internlm": Family("internlm", internlm),
    "llama3_json": Family("llama3_json", llama, is_bare=True),
    "llama3_json-tag": Family("llama4_json", marked_llama, is_bare=True),
    "phi4_mini_json": Family("phi4_mini_json", bare_list("functools"), is_bare=True),
    "xlam": Family("xlam", bare_list(), is_bare=True),
    "xlam-tag": Family("xlam", bare_list("<tool_call>"), is_bare=True),
    "granite-tag": Family("granite", bare_list("<tool_call>"), is_bare=True),
    "xlam-fence": Family("xlam", bare_list("```json\n"), is_bare=True),
    "mistral": Family("mistral", mistral),
    "mistral-bare": Family("mistral", mistral_bare),
    "mistral-old": Family("mistral", old_mistral),
    "deepseek_v3": Family("deepseek_v3", deepseek_v3),
    "deepseek_v31": Family("deepseek_v31", deepseek_v31),
    "deepseek_v32": Family("deepseek_v32", deepseek_v32, ("</｜DSML｜parameter>", "</｜DSML｜function_calls>")),
    "kimi_k2": Family("kimi_k2", kimi),
    "openai": Family("openai", harmony),
    "pythonic": Family("pythonic", pythonic, is_bare=True),
    "llama4_pythonic": Family("llama4_pythonic", llama4_pythonic, is_bare=True),
    "lfm2": Family("lfm2", lfm2),
    "qwen3_coder": Family("qwen3_coder", qwen3_coder, ("</parameter>",)),
    "seed_oss": Family("seed_oss", seed_oss, ("</parameter>",)),
    "minimax_m2": Family("minimax_m2", minimax, ("</parameter>",)),
    "step3": Family("step3", step3, ("</steptml:parameter>",)),
    "glm45": Family("glm45", glm),
}


def vocabulary(family: Family, *, is_spelled: bool, marks: tuple[str, ...] = ()) -> Tokenizer:
    """Bytes and the family's markers; bytes alone if the markers have to be spelled."""
    return marked_toy(() if is_spelled else (*family.marks, *marks))


def encode(written: Written, tokenizer: Tokenizer) -> list[int]:
    """Markers as their tokens where there are some, all other text as bytes, whatever it spells."""
    ids: list[int] = []
    for piece in written:
        token_id = tokenizer.marker_id(piece) if isinstance(piece, Mark) else None
        ids += [token_id] if token_id is not None else piece.encode()
    return ids


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def tools_for(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The tools of these calls, their arguments' types declared."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": _TYPES.get(type(value), "null")} for key, value in arguments.items()},
                },
            },
        }
        for name, arguments in calls
    ]
