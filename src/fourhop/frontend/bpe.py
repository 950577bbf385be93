"""Byte-level BPE by `tiktoken`, about eight times faster than `tokenizers`, for texts where both are proven equal.

`prove` checks a tokenizer; `FastBPE.encode` then encodes the texts that the proof covers, and answers None for others.

**Words.** Both cut a text into words with the same regular expression. The two regex engines read the expressions of
`WORDS` alike (alternation, greedy repetition, one lookahead, case-insensitive ASCII letters) as long as they agree on
which characters are letters, numbers and whitespace. That depends on the Unicode version each was built with, so only
texts in `COVERED` are encoded: blocks that were settled long ago, without the two characters beyond ASCII that equal
an ASCII letter when case is ignored. A test compares both engines on every one of these characters. Under an NFC
normalizer the text must be in that form already.

**Merges.** Both start from a word's bytes and merge, again and again, the adjacent pair that comes first in the order
of merges, the leftmost of equals. They differ in what a pair is: for `tokenizers` one listed as a merge (l, r) → t, for
`tiktoken` any two tokens whose bytes joined are a token t of its vocabulary, which here holds the bytes and the results
of merges. `prove` checks of every merge that

1. its result has a higher id than that of the merge before (so the order is that of ids, and no token has two merges);
2. `tokenizers` makes exactly t out of the bytes of t.

Suppose that both have done the same up to some step and `tiktoken` picks the tokens x, y, which spell t. No merge so
far crossed the borders of this span, since tokens are never cut up again; inside of it each merge was the first there
too. The span has therefore gone through the very steps of a word that consists of t's bytes. By (2) that word ends as
t; by (1) only (l, r) makes t; so its last state but one, which is the only one with two tokens, is l, r. Hence x = l
and y = r: the pair is a listed merge, and as everything listed is also open to `tiktoken`, `tokenizers` picks it too.
If `tiktoken` finds nothing to merge then nothing listed is left either. Both take a word that is a token as it is: by
(2) that is what merging gives.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import msgspec
import tiktoken
from tokenizers import Tokenizer as NativeTokenizer

from fourhop.frontend.segments import state, steps

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel with `use_regex` cuts by: https://github.com/openai/gpt-2/blob/master/src/encoder.py"""

GPT2_SINGLE_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""The same after each digit was cut off on its own, in one step: no word reaches over a digit, and whitespace before
a digit is at the end of its part, as if the text ended there."""

WORDS = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        GPT2,
    }
)
"""Expressions of Split that are known to be read alike: Qwen2 to Qwen3, the family of Llama 3, GPT-2."""

COVERED = (
    "\u0000-\u017e\u0180-\u02ff"  # Latin, phonetic signs; without the long s
    "\u0300-\u036f\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481\u048a-\u04ff\u0531-\u0556\u0561-\u0587"  # Greek, Cyrillic
    "\u05d0-\u05ea\u0621-\u064a\u0660-\u0669\u0905-\u0939\u0966-\u096f\u0e01-\u0e3a\u10d0-\u10f0"  # Hebrew to Georgian
    "\u1e00-\u1e99\u1ea0-\u1ef9\u2000-\u200a\u2010-\u2029\u202f-\u205f\u20a0-\u20ac"  # Latin again, marks, currencies
    "\u2100-\u2129\u212b-\u2138\u2150-\u217f\u2190-\u21ff\u2200-\u22ff\u2300-\u237a\u2460-\u24ff"  # without Kelvin
    "\u2500-\u25ff\u2600-\u2613\u2619-\u2671\u2701-\u2704\u2706-\u2709\u270c-\u2727\u2729-\u274b"  # lines, dingbats
    "\u3000-\u303d\u3041-\u3094\u3099-\u309e\u30a1-\u30fe\u3131-\u318e\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e"  # CJK
    "\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001f9ff"  # blocks that only hold pictures
)
"""Characters, as the inside of a regex class."""

MARKS = "\u0300-\u036f\u0e38-\u0e3a\u302a-\u302f\u3099\u309a"
"""Combining marks among them."""

MAX_WHITESPACE = 250_000
"""Longest run of whitespace: `\\s+(?!\\S)` takes a stack entry for each of its characters; 1,000,000 are too many."""

NUM_AT_ONCE = 500
"""Merges that are checked between two looks at what else is to be done."""

_WHITESPACE = re.compile(r"\s+")
_ASCII = bytes(range(0x80))
_UNCOVERED = re.compile(f"[^{COVERED}]")
_MARK = re.compile(f"[{MARKS}]")
_COVERED_BYTES = frozenset(range(0xF1)) - {0xC0, 0xC1}
"""All that occur in the UTF-8 of covered characters."""


class FastBPE:
    """Encodes texts without added tokens. `missing` are ASCII characters that the vocabulary does not have."""

    def __init__(self, encoding: tiktoken.Encoding, *, missing: str, nfc: bool) -> None:
        self._encoding = encoding
        self._missing = missing
        self._nfc = nfc

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text, or None when equality is not proven for it."""
        return self._encoding.encode_ordinary(text) if self.covers(text) else None

    def covers(self, text: str) -> bool:
        """Whether equality is proven for a text."""
        # Run by run, and each search below on its own, so that other threads get their turn in a long text.
        if len(text) > MAX_WHITESPACE and any(
            run.end() - run.start() > MAX_WHITESPACE for run in _WHITESPACE.finditer(text)
        ):
            return False
        if any(character in text for character in self._missing):
            return False
        if text.isascii():
            return True
        beyond = text.encode("utf-8", "surrogatepass").translate(None, _ASCII).decode("utf-8", "surrogatepass")
        if _UNCOVERED.search(beyond) is not None:
            return False
        # Of the covered characters only marks join what stands before them, so without any the rest does not matter.
        return not self._nfc or unicodedata.is_normalized("NFC", text if _MARK.search(beyond) else beyond)


def prove(native: NativeTokenizer, stopped: Callable[[], bool] = lambda: False) -> FastBPE | None:
    """The fast encoder of a tokenizer, or None where it cannot be proven equal.

    Takes a second or two for 150,000 merges; ends early, with None, when `stopped` says so.
    """
    words = _words(state(native.pre_tokenizer))
    normalizer = state(native.normalizer).get("type")
    if words is None or normalizer not in (None, "NFC"):
        return None
    if any(token.normalized for token in native.get_added_tokens_decoder().values()):
        return None
    if type(native.model).__name__ != "BPE":
        return None
    model = msgspec.json.decode(native.model.__getstate__(), type=_Model)
    if not model.is_plain():
        return None
    results = [left + right for left, right in model.merges]
    symbols = byte_symbols()
    base = {symbol: byte for symbol, byte in symbols.items() if symbol in model.vocab}
    missing = _COVERED_BYTES.intersection(symbols.values()).difference(base.values())
    if any(byte > 0x7F for byte in missing) or not base.keys() >= set("".join(results)):
        return None
    if not _in_order(results, model.vocab) or not _reached(native, results, model.vocab, stopped):
        return None
    table = {ord(symbol): byte for symbol, byte in base.items()}
    ranks = {result.translate(table).encode("latin-1"): model.vocab[result] for result in results}
    ranks.update({bytes([byte]): model.vocab[symbol] for symbol, byte in base.items()})
    encoding = tiktoken.Encoding("model", pat_str=_grouped(words), mergeable_ranks=ranks, special_tokens={})
    return FastBPE(encoding, missing="".join(map(chr, sorted(missing))), nfc=normalizer == "NFC")


def byte_symbols() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte, reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class _Model(msgspec.Struct, frozen=True):
    """A BPE model as tokenizer.json has it."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    ignore_merges: bool = False

    def is_plain(self) -> bool:
        """Whether merging is all that happens to words of known bytes.

        With `ignore_merges` the check of merges would see nothing.
        """
        affixes = self.continuing_subword_prefix or self.end_of_word_suffix
        return not (self.dropout or affixes or self.ignore_merges)


def _words(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The one expression that cuts as the pre-tokenizer does, or None when there is none that is proven."""
    found = steps(pre_tokenizer)
    if not found or found[-1]["type"] != "ByteLevel" or found[-1].get("add_prefix_space"):
        return None
    before, uses_regex = found[:-1], found[-1].get("use_regex", True)
    if not before:
        return GPT2 if uses_regex else None
    if len(before) > 1:
        return None
    if before[0]["type"] == "Digits":
        return GPT2_SINGLE_DIGITS if uses_regex and before[0].get("individual_digits") else None
    is_plain = before[0].get("behavior") == "Isolated" and not before[0].get("invert")
    if before[0]["type"] != "Split" or not is_plain or uses_regex:
        return None
    expression = before[0]["pattern"].get("Regex")
    return expression if expression in WORDS else None


def _grouped(expression: str) -> str:
    """The same with what stands before the lookahead as one group: tiktoken's engine matches a group without lookahead
    in one go, a third faster.
    """
    before, lookahead, after = expression.partition(r"|\s+(?!")
    return f"(?:{before}){lookahead}{after}"


def _in_order(results: list[str], vocab: Mapping[str, int]) -> bool:
    return all(vocab[earlier] < vocab[later] for earlier, later in pairwise(results))


def _reached(
    native: NativeTokenizer, results: list[str], vocab: Mapping[str, int], stopped: Callable[[], bool]
) -> bool:
    """Whether each result is what its own bytes become; some at a time, so that other threads get their turn."""
    merging = NativeTokenizer(native.model)
    for start in range(0, len(results), NUM_AT_ONCE):
        some = results[start : start + NUM_AT_ONCE]
        found = merging.encode(some, is_pretokenized=True, add_special_tokens=False).ids
        if stopped() or found != [vocab[result] for result in some]:
            return False
    return True
