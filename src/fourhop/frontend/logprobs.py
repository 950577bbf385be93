"""Log-probabilities of token ids with the text of each token: OpenAI's two shapes, and vLLM's for the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from fourhop.frontend.detokenize import Tokenizer
from fourhop.wire.logprobs import PromptLogprob, PromptLogprobs, TokenLogprob
from fourhop.wire.openai_chat import ChatLogprobs, TokenText, TopTokenText
from fourhop.wire.openai_completion import CompletionLogprobs


def chat_logprobs(entries: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer) -> ChatLogprobs:
    """One entry a token; `bytes` are the token's own, also where they are only part of a character."""
    spellings = _Spellings(tokenizer)
    return ChatLogprobs([_token_text(entry, num_top, spellings) for entry in entries])


class _Spellings(dict[int, tuple[str, list[int]]]):
    """The text and the bytes of each token that was asked for: alternatives repeat a lot."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        self[token_id] = spelling = (_text(data), list(data))
        return spelling


def _token_text(entry: TokenLogprob, num_top: int, spellings: _Spellings) -> TokenText:
    text, data = spellings[entry.token_id]
    tops = [(top.logprob, *spellings[top.token_id]) for top in entry.top_logprobs[:num_top]]
    return TokenText(
        token=text,
        logprob=entry.logprob,
        bytes=data,
        top_logprobs=[TopTokenText(piece, logprob, piece_data) for logprob, piece, piece_data in tops],
    )


def completion_logprobs(
    entries: Sequence[TokenLogprob], text_offsets: Sequence[int], num_top: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """Parallel lists. `top_logprobs` holds the likeliest tokens and, if it is none of them, the chosen one."""
    texts = [_text(tokenizer.token_bytes(entry.token_id)) for entry in entries]
    return CompletionLogprobs(
        text_offset=list(text_offsets),
        token_logprobs=[entry.logprob for entry in entries],
        tokens=texts,
        top_logprobs=[_top_texts(entry, text, num_top, tokenizer) for entry, text in zip(entries, texts, strict=True)],
    )


def join_logprobs(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """One after the other; None has no tokens."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        text_offset=first.text_offset + second.text_offset,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        tokens=first.tokens + second.tokens,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


def _top_texts(entry: TokenLogprob, text: str, num_top: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Tokens whose texts are the same (parts of characters) keep the likeliest one's value."""
    texts: dict[str, float] = {}
    for top in entry.top_logprobs[:num_top]:
        texts.setdefault(_text(tokenizer.token_bytes(top.token_id)), top.logprob)
    texts.setdefault(text, entry.logprob)
    return texts


def prompt_texts(told: PromptLogprobs, tokenizer: Tokenizer) -> PromptLogprobs:
    """The same with `decoded_token`, the text of each token."""
    spellings = _Spellings(tokenizer)
    return [
        entry
        and {token_id: PromptLogprob(one.logprob, one.rank, spellings[token_id][0]) for token_id, one in entry.items()}
        for entry in told
    ]


def prompt_as_completion(
    token_ids: Sequence[int], told: PromptLogprobs, text_offsets: list[int], num_top: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """A prompt's log-probabilities in the shape of those of a completion: the first token has none."""
    pairs = list(zip(token_ids, told, strict=True))
    return CompletionLogprobs(
        text_offset=text_offsets,
        token_logprobs=[None if entry is None else entry[token_id].logprob for token_id, entry in pairs],
        tokens=[_text(tokenizer.token_bytes(token_id)) for token_id in token_ids],
        top_logprobs=[
            None if entry is None else _top_of_prompt(token_id, entry, num_top, tokenizer) for token_id, entry in pairs
        ],
    )


def _top_of_prompt(
    token_id: int, entry: dict[int, PromptLogprob], num_top: int, tokenizer: Tokenizer
) -> dict[str, float]:
    """As `_top_texts`."""
    ranked = sorted((one.rank, other) for other, one in entry.items() if one.rank is not None and one.rank <= num_top)
    texts: dict[str, float] = {}
    for other in [*(other for _, other in ranked), token_id]:
        texts.setdefault(_text(tokenizer.token_bytes(other)), entry[other].logprob)
    return texts


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
