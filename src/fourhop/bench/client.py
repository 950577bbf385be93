"""Sending a request and reading its answer: the only place of the benchmark that touches the network for tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from fourhop.bench.hops import parse_server_timing
from fourhop.bench.reading import Reading
from fourhop.bench.record import Record
from fourhop.wire import sse
from fourhop.wire.errors import FourhopError

CANCELLED = "cancelled"


class Answer(Protocol):
    """An answer with status 200, its body still to be read."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case."""

    async def read(self) -> bytes:
        """What has arrived, at least one byte; nothing at the end. Raises FourhopError."""


Send = Callable[[bytes, dict[str, str]], AbstractAsyncContextManager[Answer]]
"""Sends body and headers to the target. Raises FourhopError, also for any other status than 200."""


@dataclass(frozen=True)
class Call:
    """One request, ready to be sent. `num_asked` are the prompt's tokens as far as we chose them."""

    name: str
    body: bytes
    num_asked: int
    turn: int
    due_s: float
    ready_s: float


class Client:
    """Makes a Record of a Call. Counts what is open, so that a progress line can tell.

    `estimate` gives the number of tokens of a text, for servers that tell no number. `clock` is in seconds.
    """

    def __init__(self, send: Send, clock: Callable[[], float], estimate: Callable[[str], int]) -> None:
        self.clock = clock
        self.num_open = 0
        self._send = send
        self._estimate = estimate

    async def ask(self, call: Call, on_token: Callable[[], None]) -> tuple[Record, list[int]]:
        """The record of the call and the token ids of its answer. `on_token` is called as output arrives.

        Whatever goes wrong is the record's error. A cancelled call is a record too, and the cancellation passes on
        with the next wait.
        """
        reading, moments = Reading(), {}
        sent_s = self.clock()
        self.num_open += 1
        try:
            async with self._send(call.body, {"X-Request-Id": call.name}) as answer:
                moments = parse_server_timing(answer.headers.get("server-timing", ""))
                await self._read(answer, reading, on_token)
        except FourhopError as error:
            reading.fail(_cause(error))
        except asyncio.CancelledError:
            reading.fail(CANCELLED)
        finally:
            self.num_open -= 1
        return self._record(call, reading, sent_s, moments), reading.ids

    async def _read(self, answer: Answer, reading: Reading, on_token: Callable[[], None]) -> None:
        content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != sse.CONTENT_TYPE:
            reading.fail(f"the answer is {content_type or 'of no type'}, not a stream")
            return
        num_chunks = 0
        while data := await answer.read():
            reading.feed(data, self.clock())
            if len(reading.chunk_at_s) > num_chunks:
                num_chunks = len(reading.chunk_at_s)
                on_token()
            if reading.failure is not None:
                return
        reading.close(self.clock())

    def _record(self, call: Call, reading: Reading, sent_s: float, moments: Mapping[str, float]) -> Record:
        now_s = self.clock()
        said = reading.said(self._estimate)
        source, num_output = next(iter(said.items()))
        chunk_tokens = None if reading.failure else reading.place_tokens(num_output, source)
        usage = reading.usage
        return Record(
            name=call.name,
            due_s=call.due_s,
            ready_s=call.ready_s,
            sent_s=sent_s,
            end_s=now_s if reading.failure or reading.last_at_s is None else reading.last_at_s,
            error=reading.failure,
            turn=call.turn,
            num_asked=call.num_asked,
            num_input=usage.prompt_tokens if usage is not None and usage.prompt_tokens else call.num_asked,
            num_output=num_output,
            source=source,
            said=said,
            chunk_at_s=reading.chunk_at_s,
            chunk_tokens=chunk_tokens,
            num_cached=reading.num_cached,
            moments=moments,
            text=reading.text,
        )


def _cause(error: FourhopError) -> str:
    return f"{error.status} {error.message}"
