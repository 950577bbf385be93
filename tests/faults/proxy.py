"""A TCP proxy that cuts, stops, delays and changes what passes, as a seed says. Runs in the event loop of a test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

Fate = Literal["well", "refused", "cut", "stalled", "changed", "late"]

FATES: tuple[Fate, ...] = ("well", "well", "refused", "cut", "stalled", "changed", "late")
CHUNK_BYTES = 4096


@dataclass(frozen=True)
class Passage:
    """What happens to one direction of a connection, from the byte `at` on."""

    fate: Fate
    at: int

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the end of the stream, or of the connection. Raises ConnectionError where it is cut."""
        num_bytes = 0
        while data := await reader.read(CHUNK_BYTES):
            begin, num_bytes = num_bytes, num_bytes + len(data)
            if begin <= self.at < num_bytes:
                data = await self._meet(data, self.at - begin, writer)
            writer.write(data)
            await writer.drain()

    async def _meet(self, data: bytes, at: int, writer: asyncio.StreamWriter) -> bytes:
        match self.fate:
            case "cut":
                writer.write(data[:at])
                await writer.drain()
                raise ConnectionResetError
            case "stalled":
                writer.write(data[:at])
                await asyncio.Event().wait()
            case "changed":
                return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            case "late":
                await asyncio.sleep(0.02)
        return data


@asynccontextmanager
async def faulty_proxy(rng: random.Random, port: int, longest: int) -> AsyncIterator[int]:
    """The port of a proxy before `port` of this host. Faults begin within the first `longest` bytes of a direction."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        fate = rng.choice(FATES)
        try:
            if fate != "refused":
                await join(reader, writer, [Passage(rng.choice(("well", fate)), rng.randrange(longest)) for _ in "ab"])
        finally:
            writer.transport.abort()
            tasks.discard(task)

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ways: list[Passage]) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        carriers = [
            asyncio.ensure_future(ways[0].carry(reader, far_writer)),
            asyncio.ensure_future(ways[1].carry(far_reader, writer)),
        ]
        try:
            with suppress(OSError):
                await asyncio.wait(carriers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for carrier in carriers:
                carrier.cancel()
            await asyncio.gather(*carriers, return_exceptions=True)
            far_writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
