"""The model's tokenizer over the `tokenizers` package: text to ids and back, equal to what transformers loads.

Safe to use from several threads: after loading only memories of what was worked out before change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer

from fourhop.frontend.bpe import FastBPE, byte_symbols, prove
from fourhop.frontend.files import read_json, whole_number
from fourhop.frontend.memory import give_back
from fourhop.frontend.segments import Segments
from fourhop.wire.errors import StartError

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes and decodes. `vocab_size` is the model's (its embedding rows), not the number of tokenizer entries.

    `special_tokens` maps the named ones (`bos_token`, ...) to their text; chat templates read them by these names.
    `special_ids` are the ids that decoding leaves out with `skip_special_tokens`.
    """

    def __init__(self, native: NativeTokenizer, *, vocab_size: int, special_tokens: dict[str, str]) -> None:
        self.vocab_size = vocab_size
        self.special_tokens = special_tokens
        self._native = native
        self._added = {token_id: token.content for token_id, token in native.get_added_tokens_decoder().items()}
        self._added_ids = {text: token_id for token_id, text in self._added.items()}
        self.special_ids = frozenset(i for i, token in native.get_added_tokens_decoder().items() if token.special)
        self._byte_of_symbol = byte_symbols() if _is_byte_level(native) else None
        self._bytes: dict[int, bytes] = {}
        self._segments = Segments.of(native, self._encode_piece)
        self._fast: FastBPE | None = None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the vocabulary size of config.json.

        Raises StartError when a file is missing or unreadable.
        """
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise StartError(f"{folder.name} has no tokenizer.json")
        native = NativeTokenizer.from_str(source.read_text(encoding="utf-8"))
        config = read_json(folder / "tokenizer_config.json", default={})
        special_tokens = _named_special_tokens(config)
        _apply_config(native, config, special_tokens)
        vocab_size = whole_number(read_json(folder / "config.json"), "vocab_size")
        if vocab_size is None:
            raise StartError(f"{folder.name}/config.json has no vocab_size")
        give_back()
        return cls(native, vocab_size=vocab_size, special_tokens=special_tokens)

    def quicken(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Find out whether a faster encoder gives the same ids, and use it from then on. May take seconds of CPU.

        Meant to run on a thread beside the first requests: what it changes is how long `encode` takes. It gives up as
        soon as `stopped` says so.
        """
        self._fast = prove(self._native, stopped) if self._segments is not None else None
        give_back()
        return self._fast is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text. Special tokens written in the text become their ids either way."""
        if self._segments is None:
            return list(self._native.encode(text, add_special_tokens=add_special_tokens).ids)
        return self._segments.encode(text, add_special_tokens=add_special_tokens)

    def _encode_piece(self, piece: str) -> list[int]:
        ids = None if self._fast is None else self._fast.encode(piece)
        return list(self._native.encode(piece, add_special_tokens=False).ids) if ids is None else ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[list[int]]]:
        """As `encode`, and for each token the [start, end) characters of the text that it stands for."""
        encoding = self._native.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids), [list(pair) for pair in encoding.offsets]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids in one piece. Bytes that are no UTF-8 become U+FFFD; ids without an entry are left out."""
        return self._native.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """The id of an exact vocabulary entry, added tokens included."""
        return self._native.token_to_id(text)

    def marker_id(self, text: str) -> int | None:
        """The id of an added token. Its text becomes this id wherever it is written, unlike an ordinary entry's."""
        return self._added_ids.get(text)

    def token(self, token_id: int) -> str:
        """The vocabulary entry of an id as the tokenizer writes it; empty for ids without one."""
        return self._native.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, before any trimming that a decoder does at the text's start.

        Known for byte-level vocabularies and for pieces with a "▁" or "<0xNN>" form; empty for ids without an entry.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self.token(token_id)
        if self._byte_of_symbol is not None:
            # An entry with a character outside the table is plain text, as in the native decoder.
            known = all(symbol in self._byte_of_symbol for symbol in piece)
            return bytes(self._byte_of_symbol[symbol] for symbol in piece) if known else piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the others that are set; each is a text or an object with `content`."""
    values = {name: config.get(name) for name in NAMED_SPECIAL_TOKENS}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _apply_config(native: NativeTokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Bring the native tokenizer to what tokenizer_config.json says, as transformers does when it loads one.

    Truncation and padding stored in tokenizer.json are switched off: a prompt is never cut silently. Whether BOS is
    added is tokenizer.json's rule; `add_bos_token` of the config does not change it (transformers 5 agrees).
    """
    native.no_truncation()
    native.no_padding()
    declared = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    native.add_tokens([_added_token(fields) for _, fields in declared])
    missing = [text for text in special_tokens.values() if native.token_to_id(text) is None]
    native.add_tokens([AddedToken(text, special=True) for text in missing])


def _added_token(fields: dict[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})


def _is_byte_level(native: NativeTokenizer) -> bool:
    """Whether the decoder maps GPT-2's printable symbols back to bytes."""
    return native.decoder is not None and b'"ByteLevel"' in native.decoder.__getstate__()
