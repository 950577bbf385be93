"""Sources are asked in their time, apart from one another, and what they fail at is told once."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from fakes import virtual_time
from fourhop.router.discovery.follow import Discovery, DiscoveryCollector
from fourhop.router.discovery.registrations import Registrations
from fourhop.router.discovery.source import Engines, SourceError


@dataclass
class Scripted:
    """Fails with the errors in turn, None for none; hangs when there is none left."""

    name: str
    errors: list[Exception | None] = field(default_factory=list)
    interval_s: float = 5.0
    engines: Engines = field(default_factory=dict)
    num_looks: int = 0

    async def look(self) -> None:
        self.num_looks += 1
        if not self.errors:
            await asyncio.Event().wait()
        if (error := self.errors.pop(0)) is not None:
            raise error


def test_one_that_hangs_holds_up_no_other() -> None:
    async def scenario() -> None:
        hangs, goes = Scripted("hangs"), Scripted("goes", [None] * 100)
        discovery = Discovery({}, [hangs, goes], asyncio.sleep)
        discovery.start()
        await asyncio.sleep(21)
        assert (hangs.num_looks, goes.num_looks) == (1, 5)
        await discovery.close()

    virtual_time.run(scenario())


def test_a_failure_is_told_when_it_changes_and_shown_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        a, b, bug = SourceError("a"), SourceError("b"), KeyError("x")
        source = Scripted("file", [None, a, a, b, bug, bug, None, None], engines={"http://a": "decode"})
        discovery = Discovery({}, [source], asyncio.sleep)
        registry = CollectorRegistry()
        registry.register(DiscoveryCollector(discovery))
        told = []
        for _ in range(8):
            caplog.clear()
            await discovery.look(source)
            assert registry.get_sample_value("fourhop_router_source_engines", {"source": "file"}) == 1
            up = registry.get_sample_value("fourhop_router_source_up", {"source": "file"})
            assert all(bool(one.exc_info) == ("unexpected" in one.getMessage()) for one in caplog.records)
            told.append((up, [record.getMessage() for record in caplog.records]))
        assert told == [
            (1, []),
            (0, ["engines (file) stay as they are: a"]),
            (0, []),
            (0, ["engines (file) stay as they are: b"]),
            (0, ["engines (file) stay as they are: an unexpected KeyError"]),
            (0, []),
            (1, ["engines (file): well again"]),
            (1, []),
        ]

    asyncio.run(scenario())


def test_engines_are_those_of_all_and_a_disagreement_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    one = Scripted("one", engines={"http://a": "decode", "http://b": "decode"})
    discovery = Discovery({"http://a": "prefill"}, [one], asyncio.sleep)
    for _ in range(2):
        assert discovery.wanted() == {"http://a": "prefill", "http://b": "decode"}
    assert [record.getMessage() for record in caplog.records] == [
        "http://a has another role by each of: flags, one; the first is right"
    ]


def test_a_registration_lasts_three_intervals() -> None:
    async def scenario() -> None:
        known = Registrations(virtual_time.now)
        known.put("http://a", "decode", 5.0)
        known.put("http://b", "prefill", None)
        await asyncio.sleep(14)
        known.put("http://c", "decode", 5.0)
        await known.look()
        assert set(known.engines) == {"http://a", "http://b", "http://c"}
        await asyncio.sleep(1)
        await known.look()
        assert known.engines == {"http://b": "prefill", "http://c": "decode"}
        known.put("http://c", "decode", 5.0)
        await asyncio.sleep(14)
        await known.look()
        assert known.remove("http://c") and not known.remove("http://c")
        assert known.engines == {"http://b": "prefill"}, "said once, for as long as it is not taken back"

    virtual_time.run(scenario())
