"""A program: real processes of a fleet, one of which is killed in the middle of requests, again and again.

    python tests/faults/kills.py [--count 1000] [--seed 0] [--connector shm|tcp]

Two prefill and two decode engines over the toy model, and `fourhop router` before them. A round sends some greedy
requests, kills one process at a random moment, starts it again at its address, and looks: every stream has its tokens
or ended with an error after a correct beginning, no block stays in use, and the next request is split and whole. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fourhop.engine.toy import toy_output
from fourhop.tokens.client import RemoteTokenServer
from fourhop.tokens.connection import Session, Timeouts, open_session
from fourhop.tokens.worker import RemoteWorker
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.moments import Moment

TOY_SERVER = Path(__file__).with_name("toy_server.py")
NUM_REQUESTS = 6
NUM_TOKENS = 60
KILL_WITHIN_S = 0.25
START_S = 120.0
TELL_EVERY = 50
PORTS = range(20_000, 32_000)
SETTLE_S = 20.0
END_S = 30.0
"""A request that has no end after that hangs."""

ROUTER_FLAGS = ("--first-chunk-timeout-s", "10", "--idle-timeout-s", "5")
QUICK_PROBES = ("--probe-interval-s", "0.1", "--probe-backoff-s", "0.2", "--kv-recompute-threshold", "100000")


class Wrong(Exception):
    """Something happened that must not."""


class Child:
    """A server's process, at an address that it keeps."""

    def __init__(self, name: str, port: int, arguments: tuple[str, ...]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it accepts connections."""
        nowhere = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._arguments, stdin=nowhere, stdout=nowhere, stderr=nowhere
        )
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            with suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.close()
                return
            if self._process.returncode is not None:
                raise Wrong(f"{self.name} ended with {self._process.returncode} while it started")
            await asyncio.sleep(0.02)
        raise Wrong(f"{self.name} does not listen after {START_S:.0f} s")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@dataclass(frozen=True)
class Outcome:
    """How a request ended; `was_split` if its KV was pulled."""

    error: FourhopError | None
    was_split: bool


@dataclass
class Tally:
    """What happened in all rounds."""

    kills: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    errors: int = 0


@dataclass(frozen=True)
class Fleet:
    children: list[Child]
    router: RemoteTokenServer
    engines: list[RemoteWorker]
    tally: Tally

    async def play(self, rng: random.Random) -> None:
        """One round. Raises Wrong."""
        prompts = [[rng.randrange(10, 107) for _ in range(rng.randrange(1, 80))] for _ in range(NUM_REQUESTS)]
        asking = asyncio.gather(*(self.ask(prompt) for prompt in prompts))
        await asyncio.sleep(rng.uniform(0.0, KILL_WITHIN_S))
        victim = rng.choice(self.children)
        self.tally.kills[victim.name] += 1
        await victim.kill()
        await victim.start()
        outcomes = await asking
        self.tally.streams += len(outcomes)
        self.tally.errors += sum(outcome.error is not None for outcome in outcomes)
        await self.nothing_is_left()
        await self.is_well(prompts[0])

    async def ask(self, prompt: list[int]) -> Outcome:
        """Tokens that came before an error must be right, and all of them if there was none."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        request = GenerateRequest(token_ids=prompt, sampling_params=params)
        tokens: list[int] = []
        error, was_split = None, False
        try:
            async with asyncio.timeout(END_S):
                async with aclosing(self.router.generate(request)) as chunks:
                    async for chunk in chunks:
                        tokens += [token for choice in chunk.choices for token in choice.token_ids]
                        was_split = was_split or Moment.KV_READY in (chunk.moments or {})
        except FourhopError as caught:
            error = caught
        except TimeoutError:
            raise Wrong(f"a request of {len(prompt)} tokens had no end after {END_S:.0f} s") from None
        expected = toy_output(prompt, NUM_TOKENS)
        if tokens != (expected if error is None else expected[: len(tokens)]):
            raise Wrong(f"{prompt}: {tokens} instead of {expected}; error: {error}")
        return Outcome(error, was_split)

    async def nothing_is_left(self) -> None:
        """Every engine is up, does nothing and has all its blocks."""
        busy: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while busy := [engine.url for engine in self.engines if not await is_free(engine)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        if busy:
            raise Wrong(f"blocks or requests stay at {', '.join(busy)}")

    async def is_well(self, prompt: list[int]) -> None:
        """Before long a request is split again, and whole."""
        outcome = None
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while (outcome := await self.ask(prompt)).error is not None or not outcome.was_split:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                return
        raise Wrong(f"no request is split again: {outcome}")


async def is_free(engine: RemoteWorker) -> bool:
    try:
        info = await engine.check()
    except FourhopError:
        return False
    return info is not None and info.num_free_blocks == info.num_blocks and not (info.num_running or info.num_waiting)


@asynccontextmanager
async def fleet(connector: str) -> AsyncIterator[Fleet]:
    """All processes, started, and killed on the way out."""
    ports = free_ports()
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    engines = [engine_child(name, connector, next(ports), next(ports)) for name in names]
    urls = [part for child in engines for part in (f"--{child.name.partition('-')[0]}", child.url)]
    port = next(ports)
    router = Child(
        "router", port, ("-m", "fourhop", "router", "--port", str(port), *urls, *ROUTER_FLAGS, *QUICK_PROBES)
    )
    children = [*engines, router]
    try:
        await asyncio.gather(*(child.start() for child in children))
        async with open_session() as session:
            yield joined(children, router, engines, session)
    finally:
        for child in children:
            await child.kill()


def joined(children: list[Child], router: Child, engines: list[Child], session: Session) -> Fleet:
    server = RemoteTokenServer(router.url, session, timeouts=Timeouts(1.0, END_S, END_S))
    return Fleet(children, server, [RemoteWorker(child.url, session) for child in engines], Tally())


def engine_child(name: str, connector: str, port: int, kv_port: int) -> Child:
    return Child(name, port, (str(TOY_SERVER), connector, str(port), str(kv_port)))


def free_ports() -> Iterator[int]:
    """Different ports that nobody listens at, below those that the system gives to outgoing connections: a process that
    was killed finds its own again."""
    return filter(is_free_port, random.SystemRandom().sample(PORTS, len(PORTS)))


def is_free_port(port: int) -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


async def play_all(connector: str, count: int, seed: int) -> Tally:
    """So many rounds. Raises Wrong with the number of the round."""
    rng = random.Random(f"{connector} {seed}")
    async with fleet(connector) as one:
        await one.is_well([20, 30, 40])
        for number in range(count):
            try:
                await one.play(rng)
            except Wrong as error:
                raise Wrong(f"seed {seed}, round {number}: {error}") from None
            if (number + 1) % TELL_EVERY == 0:
                print(f"{number + 1} kills, {one.tally.streams} streams, {one.tally.errors} errors", flush=True)
        return one.tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes of a fleet under load.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--connector", choices=("shm", "tcp"), default="shm")
    options = parser.parse_args()
    started_s = time.monotonic()
    try:
        tally = asyncio.run(play_all(options.connector, options.count, options.seed))
    except Wrong as error:
        print(error)
        return 1
    figures = {"kills": sum(tally.kills.values()), **tally.kills, "streams": tally.streams, "errors": tally.errors}
    print(json.dumps({**figures, "wrong": 0, "seconds": round(time.monotonic() - started_s, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
