"""Token ids to text, piece by piece, with a state of a few bytes.

The rule: the pieces joined are the tokenizer's decoding of prompt and output together, minus that of the prompt.
A token is turned into bytes (`token_bytes`), and bytes into text by a replacing UTF-8 decoder that keeps back the bytes
of an unfinished character, at most three. Maximal subparts of ill-formed sequences become one U+FFFD each (Unicode 16,
section 3.9, table 3-8), in Python and in the `tokenizers` package alike, so the text does not depend on the pieces.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

import msgspec

from fourhop.wire.derender import Count

MAX_PENDING_BYTES = 3
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What turning tokens into text needs of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def marker_id(self, text: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer(msgspec.Struct, array_like=True):
    """The state of one choice.

    `pending` holds the bytes of an unfinished character. They may be the prompt's (`pending_is_prompts`): a character
    that the output completes belongs to the output, a U+FFFD that they turn out to be belongs to the prompt.
    `at_start` is true until the first visible token of prompt and output together: some decoders trim a space there.
    """

    pending: bytes = b""
    pending_is_prompts: bool = False
    at_start: bool = False
    num_chars: Count = 0

    @classmethod
    def after(cls, prompt_token_ids: Sequence[int], tokenizer: Tokenizer, skipped: frozenset[int]) -> Detokenizer:
        """The state behind a prompt. Looks at the last few tokens, and for a visible one from the front."""
        tail = _tail_bytes(prompt_token_ids, tokenizer, skipped)
        pending = _unfinished(tail)
        return cls(pending=pending, pending_is_prompts=bool(pending), at_start=not tail)

    def piece(self, token_id: int, tokenizer: Tokenizer) -> bytes:
        """The bytes that a token adds to the text."""
        data = tokenizer.token_bytes(token_id)
        if self.at_start and data:
            self.at_start = False
            if data.startswith(b" ") and not tokenizer.decode([token_id], skip_special_tokens=False).startswith(" "):
                return data[1:]
        return data

    def feed(self, data: bytes) -> str:
        """The characters that these bytes complete."""
        return self._decode(data, False)

    def flush(self) -> str:
        """U+FFFD for an unfinished character: no more bytes of it come."""
        return self._decode(b"", True) if self.pending else ""

    def _decode(self, data: bytes, final: bool) -> str:
        if self.pending:
            data = self.pending + data
        text, num_bytes = utf_8_decode(data, "replace", final)
        self.pending = data[num_bytes:]
        if self.pending_is_prompts and (text or final):
            self.pending_is_prompts = False
            text = text.removeprefix(REPLACEMENT)
        self.num_chars += len(text)
        return text


def _tail_bytes(token_ids: Sequence[int], tokenizer: Tokenizer, skipped: frozenset[int]) -> bytes:
    """The last bytes of the ids' text, at least `MAX_PENDING_BYTES` if it has as many."""
    tail = b""
    for token_id in reversed(token_ids):
        if token_id not in skipped:
            tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) >= MAX_PENDING_BYTES:
                break
    return tail


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character without completing it."""
    for size in range(1, min(MAX_PENDING_BYTES, len(data)) + 1):
        if data[-size] >= 0xC0:
            return data[-size:] if utf_8_decode(data[-size:], "replace", False)[1] == 0 else b""
    return b""
