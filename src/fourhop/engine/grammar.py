"""Grammars: which tokens may come next, so that an output has the structure that its request asks for.

The engine knows token ids only; the text that they stand for is read from the checkpoint's tokenizer.json when the
first grammar comes. Grammars are llguidance's, which is an optional package (`pip install 'fourhop[grammar]'`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from fourhop.wire.errors import ClientError
from fourhop.wire.generate import GenerateRequest
from fourhop.wire.structure import GrammarStart, StructuredOutputs, parse_structure

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PARAM = "sampling_params.structured_outputs"

Mask = npt.NDArray[np.bool_]
Allowed = Callable[[Sequence[int]], Mask | None]
"""Of the output so far, which tokens may come next, by id; None if all may."""


class Grammars:
    """Makes the constraints of one model. Used from several threads; the first use reads the vocabulary.

    `vocab_size` is the model's, `eos_token_ids` end an output whose structure is complete.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._loading = threading.Lock()

    def constraint(self, request: GenerateRequest) -> Constraint | None:
        """The constraint of one choice, None where the request asks for no structure.

        Takes up to a second for a large grammar, and for the first one. Raises ClientError for a grammar that is not
        valid, with the path of its field.
        """
        structure = parse_structure(request.sampling_params.structured_outputs, PARAM)
        if structure is None:
            return None
        path = f"{PARAM}.{structure.kind}"
        if not self._eos_token_ids:
            raise ClientError(f"{path}: the model has no EOS token that could end the structure", param=path)
        with self._loading:
            vocabulary = self._vocabulary
        start = request.grammar_start or GrammarStart()
        return Constraint(_matcher(structure, vocabulary, path), start, self._vocab_size)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise ClientError(f"{PARAM}: this engine has no llguidance to enforce grammars", param=PARAM) from None
        source = self._folder / "tokenizer.json"
        if not source.is_file():
            raise ClientError(f"{PARAM}: this engine's model has no tokenizer.json", param=PARAM)
        text = _untruncated(source.read_bytes())
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


class Constraint:
    """The grammar of one choice, as far as its output has come.

    Where it stands follows from the output's tokens alone, so it goes on after a preemption, and on another engine.
    """

    def __init__(self, matcher: LLMatcher, start: GrammarStart, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._start = start
        self._num_read = 0
        self._recent: list[int] = []
        self._is_thinking = bool(start.closing_token_ids) and start.opening_token_id is None
        self._may_open = start.opening_token_id is not None
        self._has_begun = False
        self._is_free = False

    def allowed(self, output_token_ids: Sequence[int]) -> Mask | None:
        """Which tokens may come after this output, which begins with what was given before; None if all may.

        No token may where the grammar grew beyond llguidance's limits.
        """
        for token_id in output_token_ids[self._num_read :]:
            self._read(token_id)
        self._num_read = len(output_token_ids)
        if self._is_thinking or self._is_free:
            return None
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").astype(np.bool_)
        if self._matcher.is_error():
            mask[:] = False
        elif not self._has_begun:
            mask[self._ways_around()] = True
        return mask

    def _ways_around(self) -> list[int]:
        """The tokens that may stand where the grammar begins, without being part of it."""
        opening = self._start.opening_token_id
        return [*self._start.free_token_ids, *([opening] if self._may_open and opening is not None else [])]

    def _read(self, token_id: int) -> None:
        if self._is_free:
            return
        if self._is_thinking:
            closing = self._start.closing_token_ids
            self._recent = [*self._recent, token_id][-len(closing) :]
            self._is_thinking = self._recent != closing
        elif not self._has_begun and self._may_open and token_id == self._start.opening_token_id:
            self._is_thinking, self._may_open = True, False
        elif not self._has_begun and token_id in self._start.free_token_ids:
            self._is_free = True
        else:
            self._has_begun = True
            self._matcher.consume_token(token_id)


def _matcher(structure: StructuredOutputs, vocabulary: LLTokenizer, path: str) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(vocabulary, _grammar(structure), log_level=0)
    except ValueError as error:
        raise ClientError(f"{path}: {error}", param=path) from None
    if matcher.is_error():
        raise ClientError(f"{path}: {matcher.get_error().strip()}", param=path)
    return matcher


def _grammar(structure: StructuredOutputs) -> str:
    """The structure in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if structure.json is not None or structure.json_object:
        schema = {"type": "object"} if structure.json is None else structure.json
        layout: dict[str, object] = {"whitespace_flexible": not structure.disable_any_whitespace}
        if structure.whitespace_pattern is not None:
            layout["whitespace_pattern"] = structure.whitespace_pattern
        return LLMatcher.grammar_from_json_schema(schema, overrides=layout)  # type: ignore[arg-type]
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(_literal(text) for text in structure.choice))
    assert structure.grammar is not None
    return grammar_from("grammar", structure.grammar)


def _literal(text: str) -> str:
    """A text in Lark, whose literals are JSON's."""
    return msgspec.json.encode(text).decode()


def _untruncated(tokenizer: bytes) -> str:
    """tokenizer.json without the truncation and padding that may be stored in it."""
    fields: dict[str, msgspec.Raw] = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    null = msgspec.Raw(b"null")
    return msgspec.json.encode(fields | {"truncation": null, "padding": null}).decode()
