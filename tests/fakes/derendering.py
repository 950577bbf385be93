"""Vocabularies without a checkpoint, and ways to cut an output into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import msgspec
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as NativeTokenizer

from fakes.toy import EOS, IM_START, VOCAB_SIZE, byte_symbols, toy_tokenizer
from fourhop.frontend.answers import Answer
from fourhop.frontend.context import Context, chat_context
from fourhop.frontend.derender import Derenderer
from fourhop.frontend.parsers import find
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.derender import MAX_STATE_BYTES, StreamState
from fourhop.wire.generate import ChunkChoice, FinishReason
from fourhop.wire.openai_chat import ChatCompletionRequest

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
PROMPT = [IM_START, *b"assistant\n"]


@cache
def toy() -> Tokenizer:
    """F0: bytes, and the marks as tokens."""
    return Tokenizer(toy_tokenizer(), vocab_size=VOCAB_SIZE, special_tokens={})


@cache
def spelled_toy() -> Tokenizer:
    """Bytes and the special tokens only: the think and tool-call marks have to be spelled."""
    return marked_toy(())


@cache
def marked_toy(marks: tuple[str, ...]) -> Tokenizer:
    """Bytes, 256 `<s>`, 257 `</s>`, and these marks from 258 on; all but the bytes are special."""
    native = NativeTokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    native.decoder = decoders.ByteLevel()
    native.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", *marks)])
    return Tokenizer(native, vocab_size=VOCAB_SIZE + len(marks), special_tokens={})


PIECES = ["▁a", ".", "▁It", "▁", "▁x", "b", "中"]
PIECE_BOS = 256 + len(PIECES)


@cache
def piece_toy() -> Tokenizer:
    """A vocabulary as SentencePiece makes them: ids 0-255 are byte pieces, then `PIECES`, then a special `<s>`."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
    native = NativeTokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    native.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    native.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(native, vocab_size=PIECE_BOS + 1, special_tokens={})


def encode(text: str) -> list[int]:
    """A text as toy ids, the marks in it as their tokens."""
    return toy().encode(text, add_special_tokens=False)


def context(
    reasoning: str | None = None,
    tool: str | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    prompt: list[int] | None = PROMPT,
    **request: Any,
) -> Context:
    """A chat context over the toy tokenizer; `request` are fields of the chat request. Tools are offered."""
    tokenizer = tokenizer or toy()
    fields: dict[str, Any] = {"messages": [], "tools": TOOLS, **request}
    chat = msgspec.convert(fields, ChatCompletionRequest)
    return chat_context(chat, prompt, tokenizer, find(reasoning, tool, tokenizer), eos_token_ids=frozenset({EOS}))


def chunked(
    pieces: Sequence[list[int]], finish: FinishReason | None, *, trailing_finish: bool = False
) -> list[ChunkChoice]:
    """Chunks with these tokens; the finish comes with the last one or behind it."""
    if finish is None or trailing_finish or not pieces:
        end = [ChunkChoice(finish_reason=finish)] if finish else []
        return [ChunkChoice(token_ids=ids) for ids in pieces] + end
    *first, last = pieces
    return [*(ChunkChoice(token_ids=ids) for ids in first), ChunkChoice(token_ids=last, finish_reason=finish)]


def chunkings(ids: list[int], finish: FinishReason | None, seed: int = 0) -> Iterator[list[ChunkChoice]]:
    """F2: all at once first, then one by one, both with the finish behind, every split in two, and random splits."""
    singles = [[token_id] for token_id in ids]
    yield chunked([ids], finish)
    yield chunked(singles, finish)
    yield chunked([ids], finish, trailing_finish=True)
    yield chunked(singles, finish, trailing_finish=True)
    for cut in range(1, len(ids)):
        yield chunked([ids[:cut], ids[cut:]], finish)
    random = Random(seed)
    for _ in range(20):
        cuts = sorted(random.sample(range(len(ids) + 1), random.randint(0, min(8, len(ids)))))
        yield chunked([ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)], finish)


def derender(context: Context, chunks: Sequence[ChunkChoice], *, carries_state: bool = False) -> Answer:
    """The collected answer. With `carries_state` each chunk meets a derenderer that has only the state as JSON."""
    derenderer, answer = Derenderer.start(context, 0), Answer()
    for chunk in chunks:
        if carries_state:
            data = msgspec.json.encode(derenderer.state())
            assert len(data) <= MAX_STATE_BYTES
            derenderer = Derenderer.resume(context, msgspec.json.decode(data, type=StreamState))
        answer.add(derenderer.feed(chunk))
    return answer


def summary(answer: Answer) -> dict[str, Any]:
    """All that must not depend on the chunks."""
    whole: dict[str, Any] = msgspec.to_builtins(answer.chat_choice(0, return_token_ids=True))
    return {**whole, "num_tokens": answer.num_tokens, "num_reasoning_tokens": answer.num_reasoning_tokens}


def derender_any_way(context: Context, ids: list[int], finish: FinishReason | None = "stop") -> Answer:
    """The answer, after checking that every chunking gives the same one."""
    whole = derender(context, chunked([ids], finish))
    for chunks in chunkings(ids, finish):
        assert summary(derender(context, chunks)) == summary(whole)
    singles = chunked([[token_id] for token_id in ids], finish)
    assert summary(derender(context, singles, carries_state=True)) == summary(whole)
    return whole


def check_every_cut(context: Context, ids: list[int], *, step: int = 1) -> Answer:
    """The answer, after checking that token by token and cut at every `step`-th position it is the same, and that an
    output that ends at that position is the same as in one chunk. At each cut only the state goes on, as JSON."""
    whole = derender(context, chunked([ids], "length"))
    derenderer, answer = Derenderer.start(context, 0), Answer()
    for size in range(len(ids) + 1):
        data = msgspec.json.encode(derenderer.state())
        assert len(data) <= MAX_STATE_BYTES
        state = msgspec.json.decode(data, type=StreamState)
        rests = (
            [([], derender(context, chunked([ids[:size]], "length"))), (ids[size:], whole)] if size % step == 0 else []
        )
        for rest, expected in rests:
            cut = _copy(answer)
            cut.add(Derenderer.resume(context, state).feed(ChunkChoice(token_ids=rest, finish_reason="length")))
            assert summary(cut) == summary(expected), size
        if size < len(ids):
            answer.add(derenderer.feed(ChunkChoice(token_ids=[ids[size]])))
    return whole


def _copy(answer: Answer) -> Answer:
    """One that can go on by itself."""
    return replace(
        answer,
        content=["".join(answer.content)],
        reasoning=["".join(answer.reasoning)],
        calls=[replace(call, arguments=["".join(call.arguments)]) for call in answer.calls],
        token_ids=answer.token_ids[:],
    )


def derender_both_ways(context: Context, ids: list[int], finish: FinishReason) -> Answer:
    """The answer of one chunk, after checking that token by token it is the same."""
    whole = derender(context, chunked([ids], finish))
    singles = chunked([[token_id] for token_id in ids], finish)
    assert summary(derender(context, singles, carries_state=True)) == summary(whole)
    return whole


def shown(answer: Answer) -> tuple[str | None, str | None, list[tuple[str, str]], str | None]:
    """Content, reasoning, calls as (name, arguments), finish reason."""
    choice = answer.chat_choice(0)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    return choice.message.content, choice.message.reasoning, calls, choice.finish_reason
