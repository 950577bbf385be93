"""`Continued`: lets a server that begins every request anew go on after tokens that were delivered already."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from fourhop.tokens.server import TokenServer
from fourhop.tokens.vllm import pulls
from fourhop.wire.errors import EnginesDisagree
from fourhop.wire.generate import ChunkChoice, GenerateChunk, GenerateRequest, SamplingParams
from fourhop.wire.logprobs import ChoiceLogprobs

Chunks = AsyncGenerator[GenerateChunk, None]


class Continued:
    """A TokenServer that adds `output_token_ids` to one that does not know them, like a stock vLLM. Two ways:

    - **append**: what was delivered becomes part of the prompt. Greedy: the same tokens. Sampled: tokens of the same
      distribution, not the same ones, for a stock vLLM's are a function of all that its generator drew before.
    - **repeat**: the request begins anew and its first tokens, which must be those that were delivered, are not sent
      again. For what the past of an output decides: a grammar, penalties, and KV that covers the prompt alone.
      Raises EnginesDisagree when other tokens come.
    """

    def __init__(self, server: TokenServer) -> None:
        self._server = server

    async def generate(self, request: GenerateRequest) -> Chunks:
        if not request.output_token_ids:
            chunks = self._server.generate(request)
        elif pulls(request) or depends_on_output(request.sampling_params):
            chunks = _after_repeated(self._server.generate(anew(request)), request.output_token_ids)
        else:
            chunks = _with_whole_usage(self._server.generate(appended(request)), len(request.output_token_ids))
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk


def depends_on_output(params: SamplingParams) -> bool:
    """True if a token would be chosen otherwise were some of the output part of the prompt."""
    return bool(params.structured_outputs or params.presence_penalty or params.frequency_penalty)


def anew(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, output_token_ids=[])


def appended(request: GenerateRequest) -> GenerateRequest:
    """The request with its output as part of the prompt, its limits counting what is still to come."""
    params, num_known = request.sampling_params, len(request.output_token_ids)
    params = msgspec.structs.replace(
        params,
        max_tokens=None if params.max_tokens is None else params.max_tokens - num_known,
        min_tokens=max(0, params.min_tokens - num_known),
        seed=None if params.seed is None else seed_after(params.seed, num_known),
    )
    return msgspec.structs.replace(
        request, token_ids=request.token_ids + request.output_token_ids, sampling_params=params, output_token_ids=[]
    )


def seed_after(seed: int, num_known: int) -> int:
    """A seed for the rest: with the old one the engine would draw the numbers again that the first tokens had."""
    digest = hashlib.blake2b(f"{seed}+{num_known}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


async def _with_whole_usage(chunks: Chunks, num_known: int) -> Chunks:
    """The stream with the usage of the whole request: what was part of the prompt is output."""
    async with aclosing(chunks):
        async for chunk in chunks:
            usage = chunk.usage
            if usage is not None:
                usage = msgspec.structs.replace(
                    usage,
                    prompt_tokens=usage.prompt_tokens - num_known,
                    completion_tokens=usage.completion_tokens + num_known,
                )
            yield msgspec.structs.replace(chunk, usage=usage)


async def _after_repeated(chunks: Chunks, known: list[int]) -> Chunks:
    """The stream without the tokens that are known."""
    num_left = len(known)
    async with aclosing(chunks):
        async for chunk in chunks:
            for choice in chunk.choices if num_left else ():
                again = choice.token_ids[:num_left]
                if again != known[len(known) - num_left :][: len(again)]:
                    raise EnginesDisagree(f"the engine made {again} where {known} had been made")
                num_left -= len(again)
                if num_left and choice.finish_reason is not None:
                    raise EnginesDisagree(f"the engine ended where {known} had been made")
                chunk = msgspec.structs.replace(chunk, choices=[without_first(choice, len(again))])
            if not chunk.choices or chunk.choices[0].token_ids or chunk.choices[0].finish_reason is not None:
                yield chunk


def without_first(choice: ChunkChoice, count: int) -> ChunkChoice:
    """The choice less its first tokens."""
    logprobs = None if choice.logprobs is None else ChoiceLogprobs(choice.logprobs.content[count:])
    return msgspec.structs.replace(choice, token_ids=choice.token_ids[count:], logprobs=logprobs)
