"""A stock vLLM without a model: its token endpoint and its NIXL connector, harsh where the real one is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fourhop.wire.generate import SamplingParams

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
    waits for `gate`, if there is one, before its first token. `dead` is why its engine loop ended. `num_steps` shows in
    its metrics, unless they are switched off: what is computed of a prompt, and the tokens made.
    """

    engine_id: str
    model: str = "m"
    window: int = 128
    peers: dict[str, StockVLLM] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    traceparents: list[str | None] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    eos_at: int | None = None
    differs_at: int | None = None
    gate: asyncio.Event | None = None
    dead: str | None = None
    dies_after: int | None = None
    refusals: list[Response] = field(default_factory=list)
    num_open: int = 0
    num_steps: int = 0
    tells_steps: bool = True
    num_read: int = 0
    num_refused: int = 0
    now_s: float = 1000.0
    mode: str = "pull"
    _numbers: count[int] = field(default_factory=count)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self._abort, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    def plain_app(self) -> Starlette:
        """A vLLM that was started without --enable-scale-out."""

        async def disabled(request: Request) -> Response:
            return error(403, "Scale-out endpoints are disabled.", "PermissionDeniedError")

        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/inference/v1/generate", disabled, methods=["POST"]),
                Route("/inference/v1/abort_requests", disabled, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    def is_idle(self) -> bool:
        return self.num_open == 0

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.dead is None else 503)

    async def _metrics(self, request: Request) -> Response:
        told = f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {self.num_steps}.0\n'
        return Response(f"process_cpu_seconds_total {next(self._numbers)}\n" + (told if self.tells_steps else ""))

    async def _models(self, request: Request) -> Response:
        model = {"id": self.model, "object": "model", "root": f"/models/{self.model}", "max_model_len": self.window}
        return JSONResponse({"object": "list", "data": [model]})

    async def _abort(self, request: Request) -> Response:
        self.aborted += (await request.json())["request_ids"]
        return Response()

    async def _generate(self, request: Request) -> Response:
        return await self._answer(await request.json(), request, _as_tokens)

    async def _complete(self, request: Request) -> Response:
        """The same work, asked for and told in the words of completions."""
        flat = await request.json()
        if flat.get("model") is not None:
            return self._refuse(flat["kv_transfer_params"])
        assert flat["return_token_ids"] and flat["return_tokens_as_token_ids"]
        names = SamplingParams.__struct_fields__
        params = {name: flat[name] for name in names if flat.get(name) is not None}
        body = {"token_ids": flat["prompt"], "sampling_params": params}
        body |= {name: flat.get(name) for name in ("stream", "kv_transfer_params", "stream_options")}
        return await self._answer(body, request, _as_completion)

    def _refuse(self, params: dict[str, Any]) -> Response:
        """An unknown model. Whoever holds KV for the request is told."""
        self.num_refused += 1
        if params.get("do_remote_prefill"):
            self.peers[params["remote_engine_id"]].held.pop(params["remote_request_id"], None)
        return error(404, "The model does not exist.", "NotFoundError")

    async def _answer(self, body: dict[str, Any], request: Request, tell: Tell) -> Response:
        self.bodies.append(body)
        self.ids.append(request.headers["X-Request-Id"])
        self.traceparents.append(request.headers.get("traceparent"))
        if self.refusals:
            return self.refusals.pop(0)
        params = body["sampling_params"]
        if params.get("min_tokens", 0) > (params.get("max_tokens") or 1 << 30):
            return error(400, "min_tokens must be less than or equal to max_tokens", "Bad Request")
        if body.get("stream"):
            return StreamingResponse(self._events(body, tell), media_type="text/event-stream")
        run = asyncio.ensure_future(self._whole(body, tell))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait([run, gone], return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            run.cancel()
        gone.cancel()
        with suppress(asyncio.CancelledError):
            return await run
        return Response()

    async def _tokens(self, body: dict[str, Any], index: int) -> AsyncIterator[tuple[int, str | None]]:
        """The tokens of a choice, the last one with its finish reason. Raises LoadFailure."""
        self.num_open += 1
        try:
            is_foreign = not await self._read(body)
            if self.gate is not None:
                await self.gate.wait()
            params, output = body["sampling_params"], list[int]()
            seed = params.get("seed", 0) + index if params.get("temperature", 1.0) > 0 else None
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
                self.num_steps += 1
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

    async def _whole(self, body: dict[str, Any], tell: Tell) -> Response:
        choices, num_made, finish = [], 0, ""
        try:
            for index in range(body["sampling_params"].get("n", 1)):
                made = [one async for one in self._tokens(body, index)]
                num_made, finish = num_made + len(made), made[-1][1] or ""
                choices.append(tell(body, index, [token for token, _ in made], finish))
            of_prompt = prompt_logprobs(body)
            answer = {"model": "m", "created": 1, "prompt_logprobs": of_prompt, "choices": choices}
            answer |= {"usage": usage(body, num_made), "kv_transfer_params": self._hold(body, finish)}
        except (LoadFailure, Dead):
            return error(500, "Internal server error", "InternalServerError")
        return JSONResponse(answer)

    async def _events(self, body: dict[str, Any], tell: Tell) -> AsyncIterator[bytes]:
        num_made, finish = 0, ""
        try:
            for index in range(body["sampling_params"].get("n", 1)):
                async for token, end in self._tokens(body, index):
                    num_made, finish = num_made + 1, end or ""
                    yield event({"usage": None, "choices": [tell(body, index, [token], end)]})
            self._hold(body, finish)  # a stream does not tell of it
        except (LoadFailure, Dead):
            failure = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
            yield event({"error": failure})
        else:
            if (body.get("stream_options") or {}).get("include_usage"):
                yield event({"usage": usage(body, num_made), "choices": []})
        yield b"data: [DONE]\n\n"


Tell = Callable[[dict[str, Any], int, list[int], str | None], dict[str, Any]]


def _as_tokens(body: dict[str, Any], index: int, ids: list[int], finish: str | None) -> dict[str, Any]:
    logprobs = None
    if body["sampling_params"].get("logprobs") is not None:
        tops = [{"token_id": 1, "logprob": -0.5, "rank": 1}]
        logprobs = {"content": [{"token_id": one, "logprob": -1.0, "rank": 2, "top_logprobs": tops} for one in ids]}
    stop = stop_reason(body, ids, finish)
    choice = {"index": index, "token_ids": ids, "finish_reason": finish, "stop_reason": stop, "logprobs": logprobs}
    return choice | {"routed_experts": None, "sampling_mask": None, "weight_versions": None}


def _as_completion(body: dict[str, Any], index: int, ids: list[int], finish: str | None) -> dict[str, Any]:
    logprobs = None
    if body["sampling_params"].get("logprobs") is not None:
        names = [f"token_id:{one}" for one in ids]
        tops = [{name: -1.0, "token_id:1": -0.5} for name in names]
        logprobs = {"tokens": names, "token_logprobs": [-1.0] * len(ids), "top_logprobs": tops, "text_offset": [0]}
    stop = stop_reason(body, ids, finish)
    choice = {"index": index, "token_ids": ids, "finish_reason": finish, "stop_reason": stop, "logprobs": logprobs}
    return choice | {"text": "", "prompt_token_ids": None, "prompt_logprobs": prompt_logprobs(body)}


def prompt_logprobs(body: dict[str, Any]) -> list[Any] | None:
    if body["sampling_params"].get("prompt_logprobs") is None:
        return None
    first, *rest = [{str(one): {"logprob": -1.0, "rank": 1, "decoded_token": None}} for one in body["token_ids"]]
    return [None, *rest] if first else []


def stop_reason(body: dict[str, Any], ids: list[int], finish: str | None) -> int | None:
    is_asked_for = finish == "stop" and ids[-1] in body["sampling_params"].get("stop_token_ids", [])
    return ids[-1] if is_asked_for else None


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
