"""A stock vLLM without a model: its token endpoint and its NIXL connector, harsh where the real one is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

EOS = 257
LEASE_S = 30.0
FOREIGN = 256
"""What comes out of blocks that belong to another request by now. No prompt leads to it."""


def next_token(context: list[int], seed: int | None, num_drawn: int) -> int:
    """Greedy (`seed` None): a function of all tokens before it. Sampled: of what the generator drew before, too."""
    text = f"{context}" if seed is None else f"{context}{seed}{num_drawn}"
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0]


def output_of(prompt: list[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """What one engine makes of a prompt."""
    output: list[int] = []
    for num_drawn in range(num_tokens):
        output.append(next_token(prompt + output, seed, num_drawn))
    return output


@dataclass
class StockVLLM:
    """One engine. `peers` are those whose blocks it can read, by engine id; `answer` changes what its prefills answer.

    `eos_at` is the output position of EOS. `differs_at`: it makes another token there than others would. A request
    waits for `gate`, if there is one, before its first token. `dead` is why its engine loop ended.
    """

    engine_id: str
    peers: dict[str, StockVLLM] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    eos_at: int | None = None
    differs_at: int | None = None
    gate: asyncio.Event | None = None
    dead: str | None = None
    dies_after: int | None = None
    refusals: list[Response] = field(default_factory=list)
    num_open: int = 0
    num_read: int = 0
    now_s: float = 1000.0
    mode: str = "pull"
    _numbers: count[int] = field(default_factory=count)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self._abort, methods=["POST"]),
            ]
        )

    def is_idle(self) -> bool:
        return self.num_open == 0

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.dead is None else 503)

    async def _abort(self, request: Request) -> Response:
        self.aborted += (await request.json())["request_ids"]
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.ids.append(request.headers["X-Request-Id"])
        if self.refusals:
            return self.refusals.pop(0)
        params = body["sampling_params"]
        if params.get("min_tokens", 0) > (params.get("max_tokens") or 1 << 30):
            return error(400, "min_tokens must be less than or equal to max_tokens", "Bad Request")
        tokens = self._tokens(body)
        if body.get("stream"):
            return StreamingResponse(self._events(body, tokens), media_type="text/event-stream")
        run = asyncio.ensure_future(self._whole(body, tokens))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait([run, gone], return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            run.cancel()
        gone.cancel()
        with suppress(asyncio.CancelledError):
            return await run
        return Response()

    async def _tokens(self, body: dict[str, Any]) -> AsyncIterator[tuple[int, str | None]]:
        """Tokens, the last one with its finish reason. Raises LoadFailure."""
        self.num_open += 1
        try:
            is_foreign = not await self._read(body)
            if self.gate is not None:
                await self.gate.wait()
            params, output = body["sampling_params"], list[int]()
            seed = params.get("seed") if params.get("temperature", 1.0) > 0 else None
            finish = None
            while finish is None:
                await asyncio.sleep(0)
                if self.dead is not None or len(output) == self.dies_after:
                    self.dead = self.dead or "EngineDeadError"
                    raise Dead
                token = next_token(body["token_ids"] + output, seed, len(output))
                token = EOS if len(output) == self.eos_at and len(output) >= params.get("min_tokens", 0) else token
                token = (token + 1) % 256 if len(output) == self.differs_at else token
                output.append(FOREIGN if is_foreign else token)
                stops = [*params.get("stop_token_ids", []), *([] if params.get("ignore_eos") else [EOS])]
                if output[-1] in stops:
                    finish = "stop"
                elif len(output) == params.get("max_tokens", 64):
                    finish = "length"
                yield output[-1], finish
        finally:
            self.num_open -= 1

    async def _read(self, body: dict[str, Any]) -> bool:
        """Take another engine's blocks, if the request says so; whether they are this prompt's."""
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill"):
            return True
        if not params.get("remote_block_ids"):
            self.dead = "AssertionError"
            raise Dead
        if not all(
            params.get(name) for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        ):
            await asyncio.Event().wait()
        producer = self.peers.get(params["remote_engine_id"])
        if producer is None or producer.dead is not None:
            raise LoadFailure
        expires_at_s = producer.held.pop(params["remote_request_id"], 0.0)
        self.num_read += 1
        return expires_at_s > self.now_s

    def _expect(self, params: dict[str, Any], *names: str) -> None:
        """What the connector reads unchecked: without it the engine loop ends."""
        if not all(params.get(name) for name in names):
            self.dead = "KeyError"
            raise Dead

    def _hold(self, body: dict[str, Any], finish: str) -> dict[str, Any] | None:
        if not (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return None
        request_id = f"generate-tokens-{self.ids[-1]}-{next(self._numbers):08x}"
        self.held[request_id] = self.now_s + LEASE_S
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[7, 8]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "localhost",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(body["token_ids"]),
            "remote_blocks_expiry_time": None,
            "transfer_mode": self.mode,
        } | self.answer

    async def _whole(self, body: dict[str, Any], tokens: AsyncIterator[tuple[int, str | None]]) -> Response:
        try:
            made = [one async for one in tokens]
        except (LoadFailure, Dead):
            return error(500, "Internal server error", "InternalServerError")
        choice = {"index": 0, "token_ids": [token for token, _ in made], "finish_reason": made[-1][1]}
        return JSONResponse(
            {
                "request_id": f"generate-tokens-{self.ids[-1]}",
                "model": "m",
                "created": 1,
                "usage": usage(body, len(made)),
                "prompt_logprobs": None,
                "choices": [choice | {"stop_reason": None, "routed_experts": None, "logprobs": None}],
                "kv_transfer_params": self._hold(body, made[-1][1] or ""),
            }
        )

    async def _events(
        self, body: dict[str, Any], tokens: AsyncIterator[tuple[int, str | None]]
    ) -> AsyncIterator[bytes]:
        head: dict[str, Any] = {"request_id": f"generate-tokens-{self.ids[-1]}", "output_mode": "tokens"}
        num_made, finish = 0, None
        try:
            async for token, finish in tokens:
                num_made += 1
                choice = {"index": 0, "token_ids": [token], "finish_reason": finish, "stop_reason": None}
                yield event(head | {"usage": None, "choices": [choice | {"logprobs": None}]})
        except (LoadFailure, Dead):
            failure = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
            yield event({"error": failure})
        else:
            self._hold(body, finish or "")  # a stream does not tell of it
            yield event(head | {"usage": usage(body, num_made), "choices": []})
        yield b"data: [DONE]\n\n"


class LoadFailure(Exception):
    """KV did not come, and the policy is to fail."""


class Dead(Exception):
    """The engine loop ended."""


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage(body: dict[str, Any], num_made: int) -> dict[str, Any]:
    num_prompt = len(body["token_ids"])
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_made, "completion_tokens": num_made}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)
