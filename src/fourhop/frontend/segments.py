"""Encoding a text piece by piece, with a memory of pieces: a growing conversation costs its new text only.

Exact by construction. `tokenizers` first cuts a text at its added tokens (those with `normalized: false`; leftmost,
longest) and then handles every piece between two of them alone: it is normalized, cut into words and merged without a
look at its neighbours. The ids of a text are therefore those of its pieces in order, whatever text surrounds them.
`Segments.of` checks what could break this:

- an added token that looks beyond itself (`lstrip`, `rstrip`, `single_word`);
- a pre-tokenizer that treats the text's beginning specially (Metaspace's `first`), or one that is not known here;
- merges left out at random (`dropout`), and special tokens that are placed in a way not known here.

Added tokens with `normalized: true` are matched inside of a piece, after its normalization, so they stay with it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer

MAX_CHARS = 8_000_000
"""Text remembered by one process: about 8 MB, and as much again for its ids, twice that for those in use."""

NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace"})
PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
"""Steps that are known to work on each piece alone."""


class PieceCache:
    """Ids by piece; those used longest ago go first. Safe to use from several threads.

    What was used again is kept as Python's own numbers, one object for each: these are copied from piece to prompt five
    times as quickly as out of an array, which takes half the room.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._ids: OrderedDict[str, Sequence[int]] = OrderedDict()
        self._numbers: list[int] = []
        self._max_chars = max_chars
        self._num_chars = 0
        self._lock = Lock()

    def get(self, piece: str) -> Sequence[int] | None:
        with self._lock:
            ids = self._ids.get(piece)
            if ids is None:
                return None
            self._ids.move_to_end(piece)
            if type(ids) is not tuple:
                ids = self._ids[piece] = self._shared(ids)
            return ids

    def _shared(self, ids: Sequence[int]) -> tuple[int, ...]:
        self._numbers.extend(range(len(self._numbers), max(ids, default=-1) + 1))
        return tuple(map(self._numbers.__getitem__, ids))

    def put(self, piece: str, ids: Sequence[int]) -> None:
        """Remember a piece; one that alone is larger than the memory is not kept."""
        if len(piece) > self._max_chars:
            return
        with self._lock:
            if piece not in self._ids:
                self._num_chars += len(piece)
            self._ids[piece] = array("I", ids)
            while self._num_chars > self._max_chars:
                oldest, _ = self._ids.popitem(last=False)
                self._num_chars -= len(oldest)


@dataclass(frozen=True)
class Edges:
    """Ids that encoding with special tokens puts around a text."""

    before: Sequence[int] = ()
    after: Sequence[int] = ()


class Segments:
    """Encodes texts by their pieces. `encode_piece` gives the ids of a text without the added tokens in `marks`."""

    def __init__(
        self, marks: Mapping[str, int], edges: Edges, encode_piece: Callable[[str], list[int]], cache: PieceCache
    ) -> None:
        self._marks = marks
        self._edges = edges
        self._encode_piece = encode_piece
        self._cache = cache
        longest_first = sorted(marks, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split if marks else lambda text: [text]

    @classmethod
    def of(cls, native: NativeTokenizer, encode_piece: Callable[[str], list[int]]) -> Segments | None:
        """The segments of a tokenizer, or None when its pieces are not known to be independent."""
        added = native.get_added_tokens_decoder()
        marks = {token.content: token_id for token_id, token in added.items() if not token.normalized}
        flagged = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        edges = _edges(state(native.post_processor))
        if flagged or edges is None or getattr(native.model, "dropout", None) is not None:
            return None
        if not _known(state(native.normalizer), NORMALIZERS) or not _known(state(native.pre_tokenizer), PRE_TOKENIZERS):
            return None
        return cls(marks, edges, encode_piece, PieceCache())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = list(self._edges.before) if add_special_tokens else []
        for index, part in enumerate(self._split(text)):
            if index % 2:
                ids.append(self._marks[part])
            elif part:
                ids.extend(self._piece(part))
        if add_special_tokens:
            ids.extend(self._edges.after)
        return ids

    def _piece(self, piece: str) -> Sequence[int]:
        known = self._cache.get(piece)
        if known is not None:
            return known
        ids = self._encode_piece(piece)
        self._cache.put(piece, ids)
        return ids


def state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as tokenizer.json has it; empty for a part that it does not have."""
    fields: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return fields


def steps(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor in order: a sequence's own, or the one."""
    if part.get("type") != "Sequence":
        return [part] if part else []
    inner = part.get("normalizers") or part.get("pretokenizers") or part.get("processors") or []
    return [step for entry in inner for step in steps(entry)]


def _known(part: Mapping[str, Any], names: frozenset[str]) -> bool:
    return all(step["type"] in names and step.get("prepend_scheme") != "first" for step in steps(part))


def _edges(post_processor: Mapping[str, Any]) -> Edges | None:
    """What is put around a text; None when a step is not known or there is more than one template."""
    templates = [step for step in steps(post_processor) if step["type"] != "ByteLevel"]
    if not templates:
        return Edges()
    if len(templates) > 1 or templates[0]["type"] != "TemplateProcessing":
        return None
    ids: list[int] = []
    before: list[int] | None = None
    for entry in templates[0]["single"]:
        if "SpecialToken" in entry:
            ids += templates[0]["special_tokens"][entry["SpecialToken"]["id"]]["ids"]
        elif before is None:
            before, ids = ids, []
        else:
            return None
    return None if before is None else Edges(before, ids)
