"""A few machines on a calm day, for tests that want one fault at one moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from faults.connector import NAME, Place
from faults.leftovers import leftovers_of
from faults.machine import Build, Machine, SteppedLoop
from faults.network import Network, by_name
from faults.virtual_loop import VirtualLoop, run_virtual
from faults.weather import CALM, Storm
from fourhop.engine.config import EngineConfig
from fourhop.engine.toy import toy_output
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.router.app import Router
from fourhop.router.config import RouterConfig
from fourhop.router.dial import dial_http
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Session, open_session
from fourhop.tokens.server import TokenServer, collect
from fourhop.wire.generate import GenerateRequest, GenerateResponse, SamplingParams

CONFIG = EngineConfig(block_size=4)
OPTIONS = ConnectorOptions(kv_lease_duration=1.0, pull_timeout_s=2.0)
LIMIT_S = 300.0
SETTLE_S = 30.0


@dataclass(frozen=True)
class Plan:
    """What the machines of a test are like. Their window is as large as the smallest pool."""

    num_blocks: dict[str, int] = field(default_factory=lambda: {"p0": 64, "d0": 64})
    config: EngineConfig = CONFIG
    options: ConnectorOptions = OPTIONS
    recompute: bool = False
    reads_memory: bool = False
    read_s: float = 0.001


class Calm:
    """Machines that are up, and clients of them."""

    def __init__(self, plan: Plan, network: Network, storm: Storm, session: Session) -> None:
        policy: Any = "recompute" if plan.recompute else "fail"
        transfer = KVTransferConfig(NAME, "kv_both", policy, "", plan.options)
        place = Place(network, {}, plan.reads_memory, False, lambda: plan.read_s, keep_alive_s=0.2)
        window = min(plan.num_blocks.values()) * plan.config.block_size
        self.network = network
        self.machines = {
            name: Machine(Build(name, num_blocks, window, plan.config, transfer, frozenset()), place, storm)
            for name, num_blocks in plan.num_blocks.items()
        }
        self._storm = storm
        self._session = session

    def server(self, name: str) -> TokenServer:
        return RemoteTokenServer(self.machines[name].url, self._session)

    async def answer(self, name: str, request: GenerateRequest) -> GenerateResponse:
        return await collect(self.server(name).generate(request), model=None, created=0)

    async def tokens(self, name: str, request: GenerateRequest) -> list[int]:
        return (await self.answer(name, request)).choices[0].token_ids

    def set_pace(self, name: str, step_s: float) -> None:
        """Let every step of a machine take so long."""
        engine = self.machines[name].engine
        assert engine is not None and isinstance(engine.loop, SteppedLoop)
        engine.loop.pace = lambda: step_s

    def new_router(self) -> Router:
        urls = {role: tuple(one.url for one in self.machines.values() if one.name[0] == role) for role in "pd"}
        config = RouterConfig(urls["p"], urls["d"], probe_interval_s=0.5, probe_backoff_s=0.5)
        clock = asyncio.get_running_loop().time
        return Router(
            config,
            registry=CollectorRegistry(),
            clock=clock,
            wall_clock=lambda: self._storm.wall_s(0.0),
            router_id="router",
            dial=partial(dial_http, look_up=by_name),
        )

    async def settle(self) -> None:
        """Wait until nothing is left at any machine that is up."""
        up = [machine for machine in self.machines.values() if machine.engine is not None]
        async with asyncio.timeout(SETTLE_S):
            while any(leftovers_of(machine) for machine in up):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


Scenario = Callable[[Calm], Coroutine[Any, Any, None]]


def on_a_calm_day(scenario: Scenario, plan: Plan | None = None) -> None:
    """Play a scenario in virtual time; nothing may be left of it."""
    storm = Storm(random.Random(0), CALM)
    network = Network(storm)
    loop = VirtualLoop(LIMIT_S, network)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            calm = Calm(plan or Plan(), network, storm, await stack.enter_async_context(open_session(look_up=by_name)))
            for machine in calm.machines.values():
                stack.push_async_callback(machine.stop)
                await machine.boot()
            await scenario(calm)
            await calm.settle()

    run_virtual(main(), loop)


def request_of(prompt: list[int], max_tokens: int = 6, **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(token_ids=prompt, sampling_params=params, **fields)


def right(request: GenerateRequest) -> list[int]:
    assert request.sampling_params.max_tokens is not None
    return toy_output(request.token_ids, request.sampling_params.max_tokens)
