"""The structure that a request wants of its output, as `structured_outputs`, and where in the output it begins. Pure.

A grammar comes from `response_format`, `structured_outputs` or a `guided_*` field, or from a tool choice that forces
calls. A forced call is written as JSON whatever the model's own markup is (`forced_calls` reads it), as vLLM does: the
arguments alone for a named tool, else a list of `{"name": …, "parameters": …}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from fourhop.frontend.conversation import read_tools
from fourhop.frontend.parsers import Parsers
from fourhop.frontend.parsers.table import CONTENT_STATE
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.errors import ClientError, client_error
from fourhop.wire.openai import SamplingRequest
from fourhop.wire.openai_chat import ChatCompletionRequest, NamedToolChoice, Tool
from fourhop.wire.structure import KINDS, GrammarStart, parse_structure

ANYTHING: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Structure:
    """`outputs` in vLLM's form, and `param`, the field of the request that they come from."""

    outputs: dict[str, Any]
    param: str

    def names(self) -> dict[str, str]:
        """What the client calls the fields of `outputs`."""
        return {f"structured_outputs.{kind}": self.param for kind in KINDS}


class _JsonSchema(msgspec.Struct, frozen=True):
    schema: dict[str, Any]
    name: str | None = None


class _ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


def structure_of(request: SamplingRequest) -> Structure | None:
    """The structure of a plain completion, None if it is free. Raises ClientError with the path of what is wrong."""
    found = [each for each in (_of_format(request), _of_structured(request), *_of_guided(request)) if each is not None]
    if len(found) > 1:
        path = found[1].param
        raise ClientError(f"{path}: excludes {found[0].param}", param=path)
    return found[0] if found else None


def chat_structure(request: ChatCompletionRequest) -> Structure | None:
    """The structure of a chat's answer. Where calls are forced there is no other text for `response_format`."""
    stated = structure_of(request)
    schema = forced_schema(request)
    if schema is None:
        return stated
    if stated is not None and request.response_format is None:
        raise ClientError(f"{stated.param}: excludes a tool_choice that forces a call", param=stated.param)
    return Structure({"json": schema}, "tools")


def grammar_start(
    request: ChatCompletionRequest,
    structure: Structure,
    prompt_token_ids: list[int],
    template_kwargs: Mapping[str, Any],
    *,
    parsers: Parsers,
    tokenizer: Tokenizer,
) -> GrammarStart | None:
    """Where in a chat's output the structure begins: after thinking, and not where the model calls a tool instead.

    Raises ClientError where the markup of this model does not let an engine see that by token ids.
    """
    free: list[int] = []
    if request.tools and request.tool_choice in (None, "auto"):
        free = sorted(_call_token_ids(parsers))
        if not free:
            message = f"{structure.param}: cannot be combined with tools, whose calls begin with no token of their own"
            raise ClientError(message, param=structure.param)
    family = parsers.reasoning
    if family is None or parsers.reasoning_ended(prompt_token_ids, template_kwargs):
        return GrammarStart(free_token_ids=free) if free else None
    closing = _marker_ids(family.closing, tokenizer)
    if not closing:
        message = f"{structure.param}: the end of this model's thinking is no token; switch thinking off"
        raise ClientError(message, param=structure.param)
    is_inside = parsers.first_state(prompt_token_ids, template_kwargs) == family.inside
    opening = None if is_inside else tokenizer.marker_id(family.opening)
    return GrammarStart(opening_token_id=opening, closing_token_ids=closing, free_token_ids=free)


def forced_schema(request: ChatCompletionRequest) -> dict[str, Any] | None:
    """The JSON schema of a forced call, or of a list of them; None if no call is forced.

    Raises ClientError for a named tool that the request does not offer.
    """
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        named = [tool for tool in read_tools(request.tools) if tool.function.name == choice.function.name]
        if not named:
            path = "tool_choice.function.name"
            raise ClientError(f"{path}: there is no such tool in tools", param=path)
        return _parameters(named[0])
    if choice != "required":
        return None
    tools = read_tools(request.tools)
    return {
        "type": "array",
        "minItems": 1,
        **({"maxItems": 1} if request.parallel_tool_calls is False else {}),
        "items": {"anyOf": [_call(tool.function.name, number) for number, tool in enumerate(tools)]},
        "$defs": {f"tool_{number}": _moved(_parameters(tool), number) for number, tool in enumerate(tools)},
    }


def _of_format(request: SamplingRequest) -> Structure | None:
    if request.response_format is None:
        return None
    try:
        wanted = msgspec.convert(request.response_format, _ResponseFormat)
    except msgspec.ValidationError as error:
        raise client_error(error, "response_format") from None
    if wanted.type == "json_object":
        return Structure({"json_object": True}, "response_format")
    if wanted.type == "text":
        return None
    if wanted.json_schema is None:
        path = "response_format.json_schema"
        raise ClientError(f"{path}: is required", param=path)
    return Structure({"json": wanted.json_schema.schema}, "response_format.json_schema.schema")


def _of_structured(request: SamplingRequest) -> Structure | None:
    given = request.structured_outputs
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ClientError("structured_outputs: must be an object", param="structured_outputs")
    parsed = parse_structure(given, "structured_outputs")
    return None if parsed is None else Structure(given, f"structured_outputs.{parsed.kind}")


def _of_guided(request: SamplingRequest) -> list[Structure]:
    """vLLM's older names for the same."""
    fields = {kind: getattr(request, f"guided_{kind}") for kind in KINDS if kind != "json_object"}
    found = {kind: value for kind, value in fields.items() if value is not None}
    for kind, value in found.items():
        _check_guided(kind, value)
    return [Structure({kind: value}, f"guided_{kind}") for kind, value in found.items()]


def _check_guided(kind: str, value: Any) -> None:
    own, inner = f"guided_{kind}", f"guided.{kind}"
    try:
        parse_structure({kind: value}, "guided")
    except ClientError as error:
        raise ClientError(error.message.replace(inner, own), param=(error.param or own).replace(inner, own)) from None


def _parameters(tool: Tool) -> dict[str, Any]:
    return ANYTHING if tool.function.parameters is None else tool.function.parameters


def _call(name: str, number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool_{number}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, number: int) -> Any:
    """A tool's schema with its references to itself as they are where it is now, in `$defs`."""
    if isinstance(schema, list):
        return [_moved(each, number) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, number) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/tool_{number}{reference[1:]}"
    return moved


def _call_token_ids(parsers: Parsers) -> set[int]:
    """The tokens that begin a call where the answer's text begins."""
    tables = (parsers.table(offers_tools=True), parsers.table(offers_tools=False))
    with_tools, without = (set(table.states[table.numbers[CONTENT_STATE]].by_id) for table in tables)
    return with_tools - without


def _marker_ids(marker: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a marker, if it begins and ends with tokens that text never becomes; else none."""
    token_id = tokenizer.marker_id(marker)
    if token_id is not None:
        return [token_id]
    ids = tokenizer.encode(marker, add_special_tokens=False)
    ends = ids and {tokenizer.token(ids[0]), tokenizer.token(ids[-1])}
    return ids if ends and all(tokenizer.marker_id(token) is not None for token in ends) else []
