"""Real engines over sockets that register with a router, and leave it while it streams."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing

import httpx
from prometheus_client import CollectorRegistry

from contracts.token_server import finishes_of, tokens_of
from fakes.serving import serving
from fakes.toy_fleet import SlowRunner, ToyServer
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.server import create
from fourhop.service import ServerConfig
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import open_session
from fourhop.tokens.join import JoinConfig, registration
from fourhop.wire.generate import GenerateRequest, SamplingParams

NUM_TOKENS = 150
REQUEST = GenerateRequest(
    token_ids=list(range(2, 19)), sampling_params=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=3)
)


async def until(client: httpx.AsyncClient, names: set[str]) -> None:
    """Until these engines get requests, and others are forgotten."""
    async with asyncio.timeout(10):
        while True:
            engines = (await client.get("/health")).json()["engines"]
            usable = {one["engine"] for one in engines if not one["down"] and not one["leaving"]}
            if usable == names and len(engines) == len(names):
                return
            await asyncio.sleep(0.02)


async def scenario() -> None:
    async with AsyncExitStack() as stack:
        servers = [ToyServer(runner=SlowRunner) for _ in range(2)]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.close)
        config = RouterConfig(engines_join=True, probe_interval_s=0.05)
        goodput = GoodputConfig(admin_key="root")
        app = create(config, goodput, ServerConfig(), CollectorRegistry())
        url = await stack.enter_async_context(serving(app))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        session = await stack.enter_async_context(open_session())
        assert (await client.get("/health")).status_code == 503

        members = []
        for server in servers:
            join = JoinConfig((url,), "decode", join_interval_s=2.0, join_key="root")
            members.append(await stack.enter_async_context(registration(join, server.url)))
        members[0].start()
        await until(client, {servers[0].url})

        received = []
        async with aclosing(RemoteTokenServer(url, session).generate(REQUEST)) as chunks:
            received += [await anext(chunks) for _ in range(3)]
            members[1].start()
            await until(client, {server.url for server in servers})
            await members[0].leave()
            received += [chunk async for chunk in chunks]
        await until(client, {servers[1].url})
        await servers[0].kill()

        alone = [chunk async for chunk in RemoteTokenServer(servers[1].url, session).generate(REQUEST)]
        assert tokens_of(received) == tokens_of(alone) and len(tokens_of(received)) == NUM_TOKENS
        assert finishes_of(received) == ["length"]
        metrics = (await client.get("/metrics")).text
        assert 'fourhop_router_moved_total{with="ticket"} 1.0' in metrics, "it was handed on, not ended where it was"
        assert "fourhop_router_owed_holds 0.0" in metrics and servers[0].url not in metrics
        assert servers[1].is_idle


def test_an_engine_joins_serves_and_leaves_while_it_streams() -> None:
    asyncio.run(scenario())
