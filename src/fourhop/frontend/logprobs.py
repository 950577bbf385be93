"""Log-probabilities of token ids in OpenAI's two shapes, with the text of each token."""

from __future__ import annotations

from collections.abc import Sequence

from fourhop.frontend.detokenize import Tokenizer
from fourhop.wire.logprobs import TokenLogprob
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


def _top_texts(entry: TokenLogprob, text: str, num_top: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Tokens whose texts are the same (parts of characters) keep the likeliest one's value."""
    texts: dict[str, float] = {}
    for top in entry.top_logprobs[:num_top]:
        texts.setdefault(_text(tokenizer.token_bytes(top.token_id)), top.logprob)
    texts.setdefault(text, entry.logprob)
    return texts


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
