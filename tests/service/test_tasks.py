"""What runs beside a request's task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fourhop.service.tasks import Aside


class Bell(Exception):
    """What a coroutine fails with."""


async def rings(bells: list[asyncio.Future[None]], heard: list[str]) -> None:
    """Waits for one bell after the other."""
    try:
        for bell in bells:
            await bell
            await asyncio.sleep(0)
            heard.append("bell")
    finally:
        heard.append("end")


def played(strikes: list[Exception | None], num_bells: int, *, closes: bool = False) -> tuple[list[str], Aside]:
    """What was heard when these bells rang, each well or not, and what was closed then or ended by itself."""

    async def main() -> tuple[list[str], Aside]:
        heard: list[str] = []
        bells = [asyncio.get_running_loop().create_future() for _ in range(num_bells)]
        waits: Coroutine[Any, None, None] = rings(bells, heard)
        aside = Aside(waits, lambda: heard.append("then"))
        for bell, strike in zip(bells, strikes, strict=False):
            if strike is None:
                bell.set_result(None)
            else:
                bell.set_exception(strike)
            if closes:
                aside.close()
            for _ in range(5):
                await asyncio.sleep(0)
        aside.close()
        return heard, aside

    return asyncio.run(main())


def test_what_ended_is_told_of() -> None:
    heard, aside = played([None, None], 2)
    assert heard == ["bell", "bell", "end", "then"] and aside.failure is None


def test_what_waits_for_nothing_ends_after_who_began_it() -> None:
    async def main() -> list[str]:
        heard: list[str] = []
        Aside(rings([], heard), lambda: heard.append("then"))
        assert heard == ["end"]
        await asyncio.sleep(0)
        return heard

    assert asyncio.run(main()) == ["end", "then"]


@pytest.mark.parametrize("num_rung", [0, 1])
def test_what_is_closed_is_told_of_no_more(num_rung: int) -> None:
    heard, aside = played([None] * num_rung, 2)
    assert heard == ["bell"] * num_rung + ["end"] and aside.failure is None


def test_what_is_closed_with_its_bell_rung_does_not_go_on() -> None:
    heard, _ = played([None], 1, closes=True)
    assert heard == ["end"]


def test_what_failed_is_told_of_with_its_failure() -> None:
    heard, aside = played([Bell()], 1)
    assert heard == ["end", "then"] and isinstance(aside.failure, Bell)
