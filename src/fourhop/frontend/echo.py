"""`echo`: the prompt of a completion, written before its answer as if it had been generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fourhop.frontend.detokenize import Detokenizer, Tokenizer
from fourhop.frontend.logprobs import prompt_as_completion
from fourhop.wire.errors import ClientError
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.openai_completion import CompletionLogprobs


@dataclass(frozen=True)
class Echo:
    """A prompt as text, without a character that the answer may complete, and where each token begins in it."""

    token_ids: Sequence[int]
    text: str
    text_offsets: list[int]

    def logprobs(self, told: PromptLogprobs | None, num_top: int, tokenizer: Tokenizer) -> CompletionLogprobs:
        """Those of the prompt's tokens, null for the first. Raises ClientError if `told` is of another prompt."""
        if told is None or len(told) != len(self.token_ids):
            raise ClientError("prompt_logprobs: one entry is needed for each prompt token", param="prompt_logprobs")
        for index, (token_id, entry) in enumerate(zip(self.token_ids, told, strict=True)):
            if entry is not None and token_id not in entry:
                path = f"prompt_logprobs[{index}]"
                raise ClientError(f"{path}: the prompt's own token is not in it", param=path)
        return prompt_as_completion(self.token_ids, told, self.text_offsets, num_top, tokenizer)


def read_prompt(
    token_ids: Sequence[int], detokenizer: Detokenizer, tokenizer: Tokenizer, skipped: frozenset[int]
) -> Echo:
    """Pass a prompt through a detokenizer that is at the start, and stands between prompt and answer then."""
    pieces, offsets = [], []
    for token_id in token_ids:
        offsets.append(detokenizer.num_chars)
        if token_id not in skipped:
            pieces.append(detokenizer.feed(detokenizer.piece(token_id, tokenizer)))
    return Echo(token_ids, "".join(pieces), offsets)
