"""What is asked of a prompt, at a stock vLLM: its streams do not tell it, so it is asked for in one piece."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from contracts.token_server import chunks_of, finishes_of, tokens_of, usage_of
from fakes.serving import serving
from fourhop.service import ServerConfig, create_app
from fourhop.tokens.connection import open_session
from fourhop.tokens.dialect import GENERATE_PATH
from fourhop.tokens.vllm import VLLMTokenServer
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.logprobs import PromptLogprob

# As vLLM 0.32 writes it.
ANSWER: dict[str, Any] = {
    "request_id": "generate-tokens-r",
    "model": "m",
    "created": 1,
    "usage": {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": None},
    "choices": [{"index": 0, "token_ids": [7, 8], "finish_reason": "length", "stop_reason": None, "logprobs": None}],
    "prompt_logprobs": [None, {"2": {"logprob": -1.5, "rank": 3, "decoded_token": None}}],
    "kv_transfer_params": None,
}


def test_it_comes_with_the_first_chunk() -> None:
    bodies: list[Any] = []

    async def generate(request: Request) -> JSONResponse:
        bodies.append(await request.json())
        return JSONResponse(ANSWER)

    async def main() -> None:
        routes = [Route(GENERATE_PATH, generate, methods=["POST"])]
        app = create_app(routes=routes, config=ServerConfig(), registry=CollectorRegistry())
        params = SamplingParams(max_tokens=2, prompt_logprobs=0)
        request = GenerateRequest(token_ids=[1, 2], sampling_params=params, request_id="r", stream=True)
        async with serving(app) as url, open_session() as session:
            chunks = await chunks_of(VLLMTokenServer(url, session), request)
        assert chunks[0].prompt_logprobs == [None, {2: PromptLogprob(-1.5, 3)}]
        assert (tokens_of(chunks), finishes_of(chunks)) == ([7, 8], ["length"])
        assert usage_of(chunks).completion_tokens == 2

    asyncio.run(main())
    (body,) = bodies
    assert body["stream"] is False and body["sampling_params"]["prompt_logprobs"] == 0, json.dumps(body)
