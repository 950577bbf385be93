"""`Traced`: a token server whose requests are told of in traces, by the moments that it tells in its chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from fourhop.service.tracing import Attributes, Hop, Tracer
from fourhop.tokens.server import TokenServer
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateChunk, GenerateRequest
from fourhop.wire.moments import RECEIVED


@dataclass
class _Account:
    """What was seen of one request: the moments of each choice, and how it ended."""

    request: GenerateRequest
    received_s: float
    lives: dict[int, dict[str, float]] = field(default_factory=dict)
    finishes: list[str] = field(default_factory=list)
    num_tokens: int = 0
    outcome: str = "cancelled"
    error: FourhopError | None = None

    def note(self, chunk: GenerateChunk) -> None:
        for choice in chunk.choices:
            self.num_tokens += len(choice.token_ids)
            if choice.finish_reason is not None:
                self.finishes.append(choice.finish_reason)
            if chunk.moments is not None:
                moments = {name: self.received_s + after_s for name, after_s in chunk.moments.items()}
                self.lives.setdefault(choice.index, {}).update(moments)

    def fail(self, error: FourhopError) -> None:
        self.error = error
        self.outcome = "refused" if error.status < 500 and not self.num_tokens else "failed"

    def tell(self, hop: Hop) -> None:
        received = {RECEIVED: self.received_s}
        lives = [life | received for _, life in sorted(self.lives.items())] or [received]
        hop.end("generate", lives, self._attributes(), has_failed=self.error is not None and self.error.status >= 500)

    def _attributes(self) -> Attributes:
        return {
            "gen_ai.request.id": self.request.request_id,
            "gen_ai.usage.prompt_tokens": len(self.request.token_ids),
            "gen_ai.usage.completion_tokens": self.num_tokens,
            "fourhop.outcome": self.outcome,
            "fourhop.finish": ",".join(dict.fromkeys(self.finishes)) or None,
            "fourhop.transfer": _transfer(self.request),
            "error.type": None if self.error is None else self.error.type,
            "error.message": None if self.error is None else self.error.message,
        }


@dataclass(frozen=True)
class Traced:
    """`server`, with a span for each request."""

    server: TokenServer
    tracer: Tracer

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """See `TokenServer`."""
        hop = self.tracer.begin(request.traceparent)
        account = _Account(request, self.tracer.clock())
        asked = msgspec.structs.replace(request, traceparent=hop.traceparent)
        try:
            async with aclosing(self.server.generate(asked)) as chunks:
                async for chunk in chunks:
                    account.note(chunk)
                    yield chunk
            account.outcome = "finished"
        except FourhopError as error:
            account.fail(error)
            raise
        finally:
            account.tell(hop)


def traced(server: TokenServer, tracer: Tracer | None) -> TokenServer:
    return server if tracer is None else Traced(server, tracer)


def _transfer(request: GenerateRequest) -> str | None:
    """Whether the engine hands KV over or takes it; None for neither."""
    params = request.kv_transfer_params
    if params is None:
        return None
    return "out" if params.get("do_remote_decode") else "in"
