"""The machines, the router and the clients of a run, and what happens to them."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from faults import orders
from faults.connector import NAME, Place
from faults.direct import DirectClient
from faults.leftovers import leftovers_at, leftovers_of
from faults.machine import BOOT_S, Build, Machine
from faults.network import MACHINE, Network, by_name
from faults.reply import Reply, Wrong, check_reply
from faults.requests import Ask, draw_asks, draw_last_asks, right_answers
from faults.virtual_loop import VirtualLoop
from faults.weather import HANG_S, PAUSE_S, Storm
from fourhop.engine.config import EngineConfig
from fourhop.engine.toy import FIRST_TOKEN, NUM_TOKENS
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.dial import dial_http
from fourhop.tokens.connection import Session, open_session
from fourhop.wire.errors import FourhopError

BLOCK_SIZE = 4
STORM_S = 3.0
BURST_S = 0.05
"""About how long after the first request of a burst the others come: so soon that they are in each other's way."""

LONGEST_ANSWER_S = 150.0
"""No request may take longer, whatever happens: retries times patience."""

LONGEST_SETTLE_S = 60.0


class World:
    """Drawn whole when it is made; `run` plays it. `replies` fills up with what the clients got."""

    router: Router
    session: Session

    def __init__(self, rng: random.Random, storm: Storm, network: Network, loop: VirtualLoop) -> None:
        self.replies: list[Reply] = []
        self._rng = rng
        self._storm = storm
        self._network = network
        self._loop = loop
        self._window = rng.randrange(24, 65)
        self._eos = frozenset(rng.randrange(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS) for _ in range(3))
        self._machines = self._draw_machines()
        self._bursts_s = [rng.uniform(0.1, STORM_S * 0.7) for _ in range(2)]
        self._asks = draw_asks(rng, self._window, self._eos, self._draw_time_s)
        self._chores: set[asyncio.Task[None]] = set()
        storm.crash = self._crash

    def _draw_machines(self) -> dict[str, Machine]:
        rng = self._rng
        read_s = self._storm.read_s
        place = Place(self._network, {}, rng.random() < 0.4, rng.random() < 0.5, read_s, keep_alive_s=0.2)
        # Bytes that are changed on the way are noticed where they have a checksum; memory that is read has no way.
        self._storm.tampers = place.reads_memory or place.has_checksums
        options = ConnectorOptions(
            kv_lease_duration=rng.uniform(0.3, 4.0),
            pull_timeout_s=rng.uniform(0.6, 3.0),
            secret=rng.choice(("", "a secret")),
        )
        transfer = KVTransferConfig(NAME, "kv_both", rng.choice(("fail", "recompute")), "", options)
        names = [f"{role}{index}" for role in "pd" for index in range(rng.randrange(1, 4))]
        return {name: Machine(self._draw_build(name, transfer), place, self._storm) for name in names}

    def _draw_build(self, name: str, transfer: KVTransferConfig) -> Build:
        """An engine with little room: a window's worth of blocks, or not much more."""
        rng = self._rng
        enough = -(-(self._window + 1) // BLOCK_SIZE)
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=rng.choice((4, 8, 16, 64)),
            max_num_seqs=rng.choice((3, 4, 8)),
            enable_prefix_caching=rng.random() < 0.8,
        )
        return Build(name, enough + rng.choice((0, 0, 1, 2, 8, 40)), self._window, config, transfer, self._eos)

    def _draw_time_s(self) -> float:
        """When a request comes, or a fault: in a burst of them."""
        return self._rng.choice(self._bursts_s) + self._rng.expovariate(1.0 / BURST_S)

    async def run(self) -> None:
        """Raises Wrong where an invariant does not hold."""
        for machine in self._machines.values():
            machine.skew_s = self._rng.choice((0.0, 0.0, self._rng.uniform(-2.0, 2.0)))
        await asyncio.gather(*(machine.boot() for machine in self._machines.values()))
        context = contextvars.copy_context()
        context.run(MACHINE.set, "router")
        await self._loop.create_task(self._play(), context=context)
        await asyncio.sleep(2 * HANG_S[1])
        if self._network.connections:
            raise Wrong(f"{len(self._network.connections)} connections are left open")
        for machine in self._machines.values():
            await machine.stop()

    async def _play(self) -> None:
        """The storm, and the calm after it."""
        async with self._running_router() as self.router, open_session(look_up=by_name) as self.session:
            disturbances = self._loop.create_task(self._disturb())
            done = [asyncio.Event() for _ in self._asks]
            await asyncio.gather(*(self._client(ask, done) for ask in self._asks))
            await disturbances
            await self._recover()
            await self._settle()
            for reply in self.replies:
                check_reply(reply, right_answers(reply.ask.request, self._window, self._eos))
                if reply.error is not None and not reply.ask.is_direct and not self._storm.num_faults:
                    raise Wrong(f"request {reply.ask.number} failed on a calm day: {reply.outcome}")
            await self._check_service()
            await self._settle()

    @asynccontextmanager
    async def _running_router(self) -> AsyncIterator[Router]:
        machines = self._machines.values()
        config = RouterConfig(
            tuple(one.url for one in machines if one.role == "prefill"),
            tuple(one.url for one in machines if one.role == "decode"),
            connect_timeout_s=0.5,
            first_chunk_timeout_s=10.0,
            idle_timeout_s=5.0,
            probe_timeout_s=0.5,
            probe_interval_s=1.5,
            probe_backoff_s=1.0,
            dead_after_s=3.0,
            kv_recompute_threshold=self._rng.choice((4, 8, 64)),
            prefix_timeout_s=0.3,
        )
        goodput = GoodputConfig(
            placement=self._rng.choice(("split", "auto", "auto", "local")),
            ttft_ms=self._rng.choice((0.0, 0.0, 1e6)),
            itl_ms=self._rng.choice((0.0, 1e5)),
        )
        router = Router(
            config,
            goodput,
            registry=CollectorRegistry(),
            clock=self._loop.time,
            wall_clock=lambda: self._storm.wall_s(0.0),
            draw_seed=lambda: 4,
            router_id="router",
            dial=partial(dial_http, look_up=by_name),
        )
        async with router.running():
            yield router

    # Clients.

    async def _client(self, ask: Ask, done: list[asyncio.Event]) -> None:
        if ask.after is not None:
            await done[ask.after].wait()
        else:
            await asyncio.sleep(ask.at_s)
        try:
            await self._ask(ask)
        finally:
            done[ask.number].set()

    async def _ask(self, ask: Ask) -> Reply:
        """Send a request and wait for its end, or leave before."""
        reply, began_s = Reply(ask), self._loop.time()
        self.replies.append(reply)
        self._storm.note(f"request {ask.number}: {ask.describe()}")
        try:
            async with asyncio.timeout(ask.patience_s):
                await (self._ask_engines(reply) if ask.is_direct else self._ask_router(reply))
        except FourhopError as error:
            reply.error = error
        except TimeoutError:
            reply.left = True
        self._storm.note(f"request {ask.number}: {reply.outcome}")
        if (took_s := self._loop.time() - began_s) > LONGEST_ANSWER_S:
            raise Wrong(f"request {ask.number} took {took_s:.0f} s")
        return reply

    async def _ask_router(self, reply: Reply) -> None:
        async with aclosing(self.router.generate(reply.ask.request)) as chunks:
            async for chunk in chunks:
                reply.add(chunk)

    async def _ask_engines(self, reply: Reply) -> None:
        """Without the router: two engines or more, chosen by the client."""
        client = DirectClient(self._rng, self.session, reply.ask.request)
        prefill, *decodes = self._rng.choices(list(self._machines.values()), k=4)
        reply.token_ids[0] = client.tokens
        await client.run(prefill, decodes)
        if client.finish is None:
            reply.left = True
        else:
            reply.finishes[0], reply.has_usage = client.finish, True

    # What goes wrong, beside the wires.

    async def _disturb(self) -> None:
        rng = self._rng
        num_times = 0 if self._storm.is_over else rng.choice((0, 0, 1, 2, 4, 8))
        for at_s in sorted(self._draw_time_s() + rng.uniform(0.0, 0.2) for _ in range(num_times)):
            await asyncio.sleep(at_s - self._loop.time())
            self._storm.num_faults += 1
            machine = rng.choice(list(self._machines.values()))
            match rng.choice(("clock", "crash", "stop", "drain", "leave", "leave", "move", "move")):
                case "leave":
                    self._spawn(orders.leave(self.router, machine, rng, self._storm))
                case "drain":
                    self._spawn(orders.drain(self.router, machine, rng, self._storm))
                case "move":
                    ask = rng.choice(self._asks)
                    self._storm.note(f"request {ask.number} is moved to {machine.name}")
                    self._spawn(orders.move(self.router, machine, ask.request.request_id))
                case "clock":
                    machine.skew_s += rng.uniform(-60.0, 60.0)
                    self._storm.note(f"the wall clock of {machine.name} jumps: {machine.skew_s:.1f} s off")
                case "crash":
                    self._crash(machine.name)
                case "stop":
                    self._spawn(self._restart(machine, machine.stop))
        await asyncio.sleep(STORM_S - self._loop.time())

    def _crash(self, name: str) -> None:
        """End a machine between two turns of the loop. Names that are no machine's are the router's and clients'."""
        machine = self._machines.get(name)
        if machine is not None and not self._storm.is_over:
            silently = self._rng.random() < 0.3
            self._spawn(self._restart(machine, partial(machine.crash, silently=silently)))

    async def _restart(self, machine: Machine, end: Callable[[], Awaitable[None]]) -> None:
        if machine.engine is None:
            return
        await end()
        await asyncio.sleep(BOOT_S + self._rng.expovariate(1.0))
        if machine.engine is None:
            await machine.boot()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    # Afterwards.

    async def _recover(self) -> None:
        """The storm ends; all machines are up, with true clocks."""
        self._storm.end()
        await asyncio.sleep(PAUSE_S[1])
        while self._chores:
            await asyncio.gather(*self._chores)
        for machine in self._machines.values():
            machine.skew_s = 0.0

    async def _settle(self) -> None:
        """Wait until nothing is left of what was, which must not take long."""
        give_up_s = self._loop.time() + LONGEST_SETTLE_S
        while left := self._leftovers():
            if self._loop.time() > give_up_s:
                raise Wrong("left over: " + "; ".join(left))
            await asyncio.sleep(0.5)
        for machine in self._machines.values():
            assert machine.engine is not None
            machine.engine.loop.scheduler.pool.check()

    def _leftovers(self) -> list[str]:
        left = [each for machine in self._machines.values() for each in leftovers_of(machine)]
        roles = {machine.url: machine.role for machine in self._machines.values()}
        return left + leftovers_at(self.router, roles, self._storm.wall_s(0.0))

    async def _check_service(self) -> None:
        """Nothing is poisoned: every request is served, and where all are split its KV goes from engine to engine."""
        before = self.num_transfers
        last = draw_last_asks(self._rng, self._window, count=len(self._machines))
        for ask in last:
            reply = await self._ask(ask)
            if reply.error is not None:
                raise Wrong(f"after the storm: {reply.outcome}")
            check_reply(reply, right_answers(ask.request, self._window, self._eos))
        if self.router.placer.config.placement == "split" and self.num_transfers - before != len(last):
            raise Wrong(f"after the storm {self.num_transfers - before} hand-overs for {len(last)} requests")

    @property
    def num_transfers(self) -> int:
        return sum(machine.num_transfers for machine in self._machines.values())
