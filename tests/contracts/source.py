"""What every source of engines does, whatever it asks; see `fourhop.router.discovery.source.Source`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from fourhop.router.discovery.source import Engines, Source, SourceError

ONE, TWO = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


@dataclass(frozen=True)
class World:
    """A source of prefill engines and what it asks. `tell` has these URLs named from now on; `fail` has nothing named,
    in a way that is a failure, None if it cannot fail."""

    source: Source
    tell: Callable[[Sequence[str]], None]
    fail: Callable[[], None] | None = None


def prefill(*urls: str) -> Engines:
    return dict.fromkeys(urls, "prefill")


async def check_source(world: World) -> None:
    """The whole contract."""
    source = world.source
    assert source.name and source.interval_s > 0
    for urls in ([ONE], [ONE, TWO], [TWO], [TWO, ONE]):
        world.tell(urls)
        await source.look()
        assert source.engines == prefill(*urls)
    if world.fail is not None:
        world.fail()
        for _ in range(2):
            with pytest.raises(SourceError) as failure:
                await source.look()
            assert str(failure.value) and "\n" not in str(failure.value)
            assert source.engines == prefill(ONE, TWO), "a source that fails empties no fleet"
    world.tell([TWO])
    await source.look()
    assert source.engines == prefill(TWO)
