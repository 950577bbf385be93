"""`Upstream`: where a frontend's tokens come from, whatever speaks there: a router, an engine, a vLLM of any kind."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.completions import COMPLETIONS
from fourhop.tokens.connection import Session, Timeouts
from fourhop.tokens.continued import Continued
from fourhop.tokens.server import TokenServer
from fourhop.tokens.vllm import VLLMTokenServer
from fourhop.wire.errors import ClientError, PeerRefused
from fourhop.wire.generate import GenerateChunk, GenerateRequest
from fourhop.wire.moments import Moment

log = logging.getLogger(__name__)

ABSENT = ((403, "PermissionDeniedError"), (404, "UpstreamError"))
"""What a vLLM without the token endpoint answers there: one that has it switched off, and one that is older."""


class Upstream:
    """A TokenServer over HTTP that finds out with the first request whether there is a token endpoint.

    A stock vLLM reads over targets; a router tells with its first token when it let the request in. Where nothing is
    told of that, nobody keeps the targets, and the request is refused then.
    """

    def __init__(self, url: str, session: Session, *, timeouts: Timeouts, api_key: str | None = None) -> None:
        self._server: TokenServer = RemoteTokenServer(url, session, timeouts=timeouts, api_key=api_key)
        self._plain: TokenServer = Continued(
            VLLMTokenServer(url, session, timeouts=timeouts, api_key=api_key, dialect=COMPLETIONS)
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        try:
            async with aclosing(_kept(request, self._server.generate(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except PeerRefused as error:
            if (error.status, error.type) not in ABSENT:
                raise
        if self._server is not self._plain:
            log.warning("the upstream has no token endpoint; tokens come from its completions, with less detail")
        self._server = self._plain
        async with aclosing(_kept(request, self._server.generate(request))) as chunks:
            async for chunk in chunks:
                yield chunk


async def _kept(
    request: GenerateRequest, chunks: AsyncGenerator[GenerateChunk, None]
) -> AsyncGenerator[GenerateChunk, None]:
    """The stream. Raises ClientError before its first token if it has targets that nobody keeps."""
    is_owed = request.targets is not None
    async with aclosing(chunks):
        async for chunk in chunks:
            if is_owed and chunk.choices and Moment.ADMITTED.value not in (chunk.moments or {}):
                raise ClientError("targets: targets are not supported", param="targets")
            is_owed = is_owed and not chunk.choices
            yield chunk
