"""An engine's cache events reach the router's index whatever is missed: late, over a gap, after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
import zmq

from contracts.token_server import until
from fakes.engines import toy_engine
from fakes.toy_fleet import toy_fleet
from fourhop.engine.publisher import EventPublisher
from fourhop.kv.config import KVEventsConfig
from fourhop.router.cacheindex import CacheIndex, chain
from fourhop.router.caches import reachable
from fourhop.router.subscriber import Lost, Subscriptions
from fourhop.wire.errors import StartError
from fourhop.wire.events import BlockRemoved, BlockStored, sequence_bytes
from fourhop.wire.generate import GenerateRequest, SamplingParams

ANYWHERE = "tcp://127.0.0.1:*"
BOTH = KVEventsConfig(enable_kv_cache_events=True, endpoint=ANYWHERE, replay_endpoint=ANYWHERE)
LIVE_ONLY = KVEventsConfig(enable_kv_cache_events=True, endpoint=ANYWHERE)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def nothing(engine: str, cause: str, why: str) -> None:
    """Nobody wants to know what was lost."""


def block(name: int, parent: int | None = None) -> BlockStored:
    """A block of one token, which is its name."""
    return BlockStored(block_hashes=[name], parent_block_hash=parent, token_ids=[name], block_size=1)


@asynccontextmanager
async def publisher(config: KVEventsConfig) -> AsyncIterator[EventPublisher]:
    one = EventPublisher(config, lambda: 1.0)
    try:
        yield one
    finally:
        one.close()


@asynccontextmanager
async def following(index: CacheIndex, one: EventPublisher, lost: Lost = nothing) -> AsyncIterator[Subscriptions]:
    subscriptions = Subscriptions(index, lost)
    try:
        subscriptions.follow("e", one.endpoint, one.replay_endpoint)
        yield subscriptions
    finally:
        await subscriptions.close()


async def connected(index: CacheIndex, one: EventPublisher, names: Callable[[int], int]) -> None:
    """Publish until something arrives: a subscription takes its time."""
    for number in range(1000):
        one.publish([block(names(number))])
        await asyncio.sleep(0.005)
        if len(index):
            return
    raise AssertionError("nothing arrives")


def test_what_was_published_before_is_replayed() -> None:
    async def scenario() -> None:
        index = CacheIndex()
        async with publisher(BOTH) as one:
            for name in range(1, 6):
                one.publish([block(name, name - 1 or None)])
            one.publish([BlockRemoved(block_hashes=[5])])
            async with following(index, one):
                await until(lambda: index.num_blocks("e", chain([1, 2, 3, 4, 5], 1)) == 4)
                assert len(index) == 4
            assert "e" not in index

    run(scenario())


def test_without_replay_it_is_known_from_now_on() -> None:
    async def scenario() -> None:
        index = CacheIndex()
        async with publisher(LIVE_ONLY) as one:
            one.publish([block(1)])
            async with following(index, one):
                await connected(index, one, lambda number: 100 + number)
                assert index.holders(chain([1], 1)) == ([], 0)

    run(scenario())


def test_a_gap_is_filled() -> None:
    async def scenario() -> None:
        index = CacheIndex()
        async with publisher(BOTH) as one, following(index, one):
            await connected(index, one, lambda number: 1)
            send = one._publish.send_multipart
            one._publish.send_multipart = lambda *args: None  # type: ignore[method-assign]
            one.publish([block(2)])
            one.publish([block(3)])
            one._publish.send_multipart = send  # type: ignore[method-assign]
            one.publish([block(4)])
            await until(lambda: len(index) == 4)

    run(scenario())


def test_a_gap_that_is_too_old_costs_all_that_was_known() -> None:
    async def scenario() -> None:
        index = CacheIndex()
        config = KVEventsConfig(True, endpoint=ANYWHERE, replay_endpoint=ANYWHERE, buffer_steps=1)
        lost: list[str] = []
        async with publisher(config) as one, following(index, one, lambda engine, cause, why: lost.append(cause)):
            await connected(index, one, lambda number: 1)
            lost.clear()  # what was published before the subscription stood
            send = one._publish.send_multipart
            one._publish.send_multipart = lambda *args: None  # type: ignore[method-assign]
            one.publish([block(2)])
            one._publish.send_multipart = send  # type: ignore[method-assign]
            one.publish([block(3)])
            await until(lambda: index.holders(chain([3], 1)) == (["e"], 1))
            assert len(index) == 1 and lost == ["missed"]

    run(scenario())


def test_an_engine_that_counts_anew_is_known_anew() -> None:
    async def scenario() -> None:
        index = CacheIndex()
        async with publisher(BOTH) as one, following(index, one):
            await connected(index, one, lambda number: 1)
            one.publish([block(2)])
            await until(lambda: len(index) == 2)
            one._sent.clear()
            one._next = 0
            one.publish([block(7)])
            await until(lambda: index.holders(chain([7], 1)) == (["e"], 1))
            assert len(index) == 1

    run(scenario())


def test_an_address_that_makes_no_sense_is_told_and_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        index, lost = CacheIndex(), list[str]()
        subscriptions = Subscriptions(index, lambda engine, cause, why: lost.append(cause))
        try:
            subscriptions.follow("e", "127.0.0.1:5557", "")
            await until(lambda: lost == ["unheard"])
            assert "cannot be heard" in caplog.text
            assert "e" not in index
        finally:
            await subscriptions.close()

    run(scenario())


def test_an_engine_is_reached_where_its_url_says() -> None:
    url = "http://10.0.0.1:8000"
    for told in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"):
        assert reachable(told, url) == "tcp://10.0.0.1:5557"
    assert reachable("tcp://10.0.0.9:5557", url) == "tcp://10.0.0.9:5557"
    assert reachable("ipc:///tmp/x", url) == "ipc:///tmp/x"
    assert reachable("", url) == ""


def test_nonsense_is_skipped() -> None:
    async def scenario() -> None:
        index, lost = CacheIndex(), list[str]()
        async with publisher(BOTH) as one, following(index, one, lambda engine, cause, why: lost.append(cause)):
            await connected(index, one, lambda number: 1)
            for frames in ([b""], [b"", b"short", b""], [b"", sequence_bytes(one._next), b"\xc1"]):
                one._publish.send_multipart(frames)
            one.publish([block(2)])
            await until(lambda: len(index) == 2)
            assert lost == ["unreadable"] * 3

    run(scenario())


def test_an_address_in_use_is_one_line() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(StartError, match=f"KV events at tcp://127.0.0.1:{port}: Address already in use"):
            EventPublisher(KVEventsConfig(True, endpoint=f"tcp://127.0.0.1:{port}"), lambda: 1.0)


def test_a_router_hears_what_its_engines_have_and_sends_prompts_where_they_are_known() -> None:
    async def scenario() -> None:
        async with toy_fleet(2, 1, events=BOTH) as fleet:
            prompt = [20 + number % 7 for number in range(40)]
            params = SamplingParams(max_tokens=4, temperature=0.0)

            prefill_urls = {server.url for server in fleet.prefill}
            asking = GenerateRequest(token_ids=prompt, sampling_params=params)
            async for _ in fleet.router.generate(asking):
                pass
            links = chain(prompt, 4)
            index = fleet.router.caches.index
            await until(lambda: any(index.num_blocks(url, links) == 10 for url in prefill_urls))
            (knows,) = [url for url in prefill_urls if index.num_blocks(url, links)]
            for _ in range(3):
                async for _ in fleet.router.generate(asking):
                    pass
            assert [url for url in prefill_urls if index.num_blocks(url, links)] == [knows]
            await fleet.settle()

    run(scenario())


def test_an_engine_publishes_what_it_keeps() -> None:
    async def scenario() -> None:
        index = CacheIndex()
        async with toy_engine(events=BOTH) as engine:
            info = engine.info()
            subscriptions = Subscriptions(index, nothing)
            try:
                subscriptions.follow("e", info.kv_events_endpoint, info.kv_replay_endpoint)
                prompt = [20 + number % 5 for number in range(3 * info.block_size + 1)]
                params = SamplingParams(max_tokens=2, temperature=0.0)
                async for _ in engine.generate(GenerateRequest(token_ids=prompt, sampling_params=params)):
                    pass
                await until(lambda: index.num_blocks("e", chain(prompt, info.block_size)) == 3)
            finally:
                await subscriptions.close()

    run(scenario())
