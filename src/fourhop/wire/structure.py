"""What structure an output must have (`sampling_params.structured_outputs`), and where in the output that begins.

Names are vLLM 0.32's (`StructuredOutputsParams`); `GrammarStart` is an addition, for engines that know no text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fourhop.wire.errors import ClientError, client_error

KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of `KINDS`, and how JSON may be laid out.

    Attributes:
        json: A JSON schema, as an object or as JSON text.
        json_object: Any JSON object.
        regex: A regular expression that the whole output matches, in the syntax of Rust's `regex`.
        choice: The output is one of these texts.
        grammar: A context-free grammar, GBNF or llguidance's Lark.
        disable_any_whitespace: JSON has no space but one after each comma and colon.
        whitespace_pattern: A regular expression for the space between JSON's parts.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    backend: Any = msgspec.field(name="_backend", default=None)
    backend_was_auto: Any = msgspec.field(name="_backend_was_auto", default=None)

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return next(kind for kind in KINDS if is_given(self, kind))


class GrammarStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where in the output a grammar begins; without one it begins with the output's first token.

    With `closing_token_ids` the output begins in thinking, and the grammar where these tokens, one after the other,
    have ended that. With an `opening_token_id` too, the output begins outside of thinking and may open it.
    `free_token_ids` may stand in place of the grammar's beginning, and then everything is allowed: tool calls.
    """

    opening_token_id: int | None = None
    closing_token_ids: list[int] = []
    free_token_ids: list[int] = []


def is_given(structure: StructuredOutputs, kind: str) -> bool:
    """False asks for nothing, like null."""
    value = getattr(structure, kind)
    return value is not None and value is not False


def parse_structure(params: dict[str, Any] | None, path: str) -> StructuredOutputs | None:
    """The structure that these parameters ask for; None if they ask for none. Raises ClientError below `path`."""
    if params is None:
        return None
    try:
        structure = msgspec.convert(params, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise client_error(error, path) from None
    given = [kind for kind in KINDS if is_given(structure, kind)]
    if len(given) > 1:
        raise ClientError(f"{path}.{given[1]}: excludes {given[0]}", param=f"{path}.{given[1]}")
    if not given:
        return None
    if isinstance(structure.json, str):
        _check_json(structure.json, f"{path}.json")
    if structure.choice == []:
        raise ClientError(f"{path}.choice: must not be empty", param=f"{path}.choice")
    return structure


def _check_json(schema: str, path: str) -> None:
    try:
        msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ClientError(f"{path}: is not the JSON text of a schema", param=path) from None
