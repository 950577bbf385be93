"""`VLLMTokenServer`: a stock vLLM as a server of tokens, with what it does otherwise than a fourhop engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from fourhop.tokens.client import RemoteTokenServer, own_headers
from fourhop.tokens.connection import Session, Timeouts, call, request_headers
from fourhop.tokens.dialect import GENERATE, Dialect
from fourhop.tokens.refusal import Entry
from fourhop.wire.errors import PeerError, PeerRefused, TransferError
from fourhop.wire.generate import GenerateChunk, GenerateRequest


class VLLMTokenServer:
    """A stock vLLM (0.32). `dialect` is its token endpoint's, for one with `--tokens-only` or `--enable-scale-out`, or
    `completions.COMPLETIONS` for any other.

    It knows no `output_token_ids`: `Continued` adds them. Its streams never carry transfer parameters nor what is asked
    of the prompt, so a request for one of these is not streamed: all of it comes in one chunk. A transfer that fails is
    an error 500 of the engine, which is well: it becomes a TransferError while no token has come.
    """

    def __init__(
        self,
        url: str,
        session: Session,
        *,
        timeouts: Timeouts | None = None,
        api_key: str | None = None,
        dialect: Dialect = GENERATE,
        entry: Entry | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._entry = entry or Entry(self.url)
        self._session = session
        self._timeouts = timeouts or Timeouts()
        self._headers = request_headers(api_key)
        self._dialect = dialect
        self._streamed = RemoteTokenServer(
            url, session, timeouts=self._timeouts, api_key=api_key, dialect=dialect, entry=self._entry
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Raises as `RemoteTokenServer` does."""
        if request.output_token_ids:
            raise ValueError("a stock vLLM begins every request anew")
        in_one_piece = holds(request) or request.sampling_params.prompt_logprobs is not None
        chunks = self._whole(within_its_limit(request)) if in_one_piece else self._streamed.generate(request)
        async with aclosing(told_of_transfers(request, chunks)) as told:
            async for chunk in told:
                yield chunk

    async def _whole(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        async with call(
            self._session,
            "POST",
            self.url + self._dialect.path,
            timeouts=self._timeouts,
            body=self._dialect.encode(
                msgspec.structs.replace(request, stream=False, stream_options=None, traceparent=None)
            ),
            headers=self._headers | own_headers(request),
            entry=self._entry,
        ) as answer:
            body = await answer.read_all()
        try:
            whole = self._dialect.decode_whole(body)
        except msgspec.DecodeError as error:
            raise PeerError(f"{self.url} answered with what is no answer: {error}") from None
        for chunk in whole.chunks(request.request_id):
            yield chunk


def holds(request: GenerateRequest) -> bool:
    """True if the answer is to tell how another engine gets the KV."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def pulls(request: GenerateRequest) -> bool:
    """True if the engine is to take KV from another one."""
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))


def within_its_limit(request: GenerateRequest) -> GenerateRequest:
    """The request with no more tokens due than it may have; vLLM refuses it otherwise."""
    params = request.sampling_params
    if params.max_tokens is None or params.min_tokens <= params.max_tokens:
        return request
    params = msgspec.structs.replace(params, min_tokens=params.max_tokens)
    return msgspec.structs.replace(request, sampling_params=params)


async def told_of_transfers(
    request: GenerateRequest, chunks: AsyncGenerator[GenerateChunk, None]
) -> AsyncGenerator[GenerateChunk, None]:
    """The stream, its error 500 before the first token told as what it is for a request that pulls."""
    has_begun = not pulls(request)
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                has_begun = has_begun or bool(chunk.choices)
                yield chunk
        except PeerRefused as error:
            if has_begun or error.status != 500:
                raise
            raise TransferError("load_failed", error.message) from error
