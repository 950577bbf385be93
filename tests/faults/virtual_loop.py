"""An event loop without a clock and without I/O: when nothing is ready, time jumps to the next timer.

Everything runs in one thread in an order that only the program decides, and an hour of waiting costs nothing. What
would hang for ever, or spin without time going on, raises `Stuck`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

MAX_TURNS_AT_ONCE = 100_000
"""Turns of the loop at one moment; more than that is a loop that waits for itself."""


class Stuck(Exception):
    """Nothing will ever happen again, or time does not go on, or it went on for too long."""


class Net(Protocol):
    """What connections are made with; see `faults.network`."""

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]: ...


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` begins at 0. `limit_s` is the time after which a run is taken for one that hangs."""

    def __init__(self, limit_s: float, network: Net) -> None:
        super().__init__()
        self._network = network
        self._now_s = 0.0
        self._limit_s = limit_s
        self._num_turns = 0
        self._selector = self  # what `BaseEventLoop` waits on

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[object]:
        """In place of a selector's: nothing is ever readable, and waiting is moving the clock."""
        if timeout is None:
            raise Stuck("nothing is left to wait for, yet the program has not ended")
        self._num_turns = 0 if timeout > 0 else self._num_turns + 1
        self._now_s += max(0.0, timeout)
        if self._num_turns > MAX_TURNS_AT_ONCE:
            raise Stuck(f"{self._num_turns} turns at {self._now_s:.3f} s")
        if self._now_s > self._limit_s:
            raise Stuck(f"not done after {self._limit_s:.0f} s")
        return []

    def _process_events(self, event_list: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There is no other thread that could have to wake this one."""

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **kwargs: Any) -> Any:
        return await self._network.connect(protocol_factory, host, port)


def run_virtual(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run to the end. Raises Stuck, or whatever `main` raises."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
