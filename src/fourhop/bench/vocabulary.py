"""The tokenizer of a model on this machine, as the vocabulary that prompts are drawn from."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from fourhop import checkpoint


class TokenizerVocabulary:
    """A `workload.Vocabulary` over a model's tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.ids = sorted(id for id in tokenizer.get_vocab(with_added_tokens=False).values() if id not in added)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def open_vocabulary(model: str) -> TokenizerVocabulary:
    """The vocabulary of a model folder, or of a name that `fourhop` can find. Raises StartError if there is none."""
    file = checkpoint.find(model, weights=False).folder / "tokenizer.json"
    return TokenizerVocabulary(Tokenizer.from_str(file.read_text(encoding="utf-8")))
