"""Engines leave while requests run: no request is lost to it, nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing

import pytest

from contracts.token_server import chunks_of, finishes_of, tokens_of, until
from fakes.fleet import Bench, bench
from fakes.joining import D0, D1, P0, P1, REQUEST, ask, expected, join, join_and_see, leave, tidy
from fourhop.router.ledger import HoldState
from fourhop.router.prefixes import Holder
from fourhop.wire.errors import ClientError, PeerError
from fourhop.wire.generate import GenerateRequest, SamplingParams


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


@pytest.mark.parametrize("num_read", range(12))
def test_an_engine_leaves_at_any_token_and_the_stream_goes_on(num_read: int) -> None:
    """It gets nothing more, keeps its place while something refers to it, and is then forgotten, whole."""

    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            one.start(D1, "decode")
            await join_and_see(one, D1, "decode")
            one.router.fleet.workers[D0].is_draining = True  # so that D1 has it
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks) for _ in range(num_read)]
                one.router.fleet.workers[D0].is_draining = False
                await leave(one, D1)
                await tidy(one)
                is_busy = one.router.fleet.find(D1) is not None
                assert is_busy == bool(num_read), "it is there as long as it has something to do"
                received += [chunk async for chunk in chunks]
            assert tokens_of(received) == expected() and finishes_of(received) == ["length"]
            await one.settle()
            await tidy(one)
            assert D1 not in one.router.fleet.workers
            assert one.router.discovery.wanted() == {P0: "prefill", D0: "decode"}
            assert one.registry.get_sample_value("fourhop_router_engine_up", {"engine": D1, "role": "decode"}) is None
            await ask(one.router)
            await one.settle()

    run(scenario())


def test_a_prefill_engine_that_leaves_is_kept_until_its_blocks_are_pulled() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            one.start(P1, "prefill").gives_early_tickets = False
            await join_and_see(one, P1, "prefill")
            one.router.fleet.workers[P0].is_draining = True
            one.decode[0].gate = asyncio.Event()
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks)]
                rest = asyncio.create_task(anext(chunks))
                await until(lambda: one.decode[0].num_open == 1)
                await leave(one, P1)
                await tidy(one)
                worker = one.router.fleet.workers[P1]
                assert worker.in_flight == 0 and [hold.engine for hold in one.router.ledger.owed.values()] == [P1]
                one.decode[0].gate.set()
                received += [await rest, *[chunk async for chunk in chunks]]
            assert tokens_of(received) == expected()
            assert one.router.ledger.ended[HoldState.PULLED] == 1
            await tidy(one)
            assert P1 not in one.router.fleet.workers
            await one.settle()

    run(scenario())


def test_what_a_dead_engine_held_ends_with_its_lease_and_the_engine_with_it() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            dead = one.start(P1, "prefill")
            await join_and_see(one, P1, "prefill")
            one.router.fleet.workers[P0].is_draining = True
            one.decode[0].gate = asyncio.Event()
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                await anext(chunks)
                dead.abort_error = PeerError("cannot connect")
            await until(lambda: one.router.ledger.num_leaked == 1)
            dead.die()
            await one.look()
            await one.look()
            await leave(one, P1)
            await tidy(one)
            assert P1 in one.router.fleet.workers, "its lease is not over"
            one.clock.now_s += 121.0
            await tidy(one)
            assert P1 not in one.router.fleet.workers and not one.router.ledger.owed
            assert one.router.ledger.ended[HoldState.EXPIRED] == 1

    run(scenario())


def test_leaked_holds_of_any_engine_end_by_themselves() -> None:
    async def scenario() -> None:
        async with bench(1, 1) as one:
            one.prefill[0].abort_error = PeerError("cannot connect")
            one.decode[0].gate = asyncio.Event()
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                await anext(chunks)
            await until(lambda: one.router.ledger.num_leaked == 1)
            await tidy(one)
            assert one.router.ledger.owed
            one.clock.now_s += 121.0
            await one.router.housekeeping.do("expire")
            assert not one.router.ledger.owed
            one.prefill[0].holds.clear()

    run(scenario())


def test_one_that_comes_back_while_it_leaves_stays_and_an_operators_drain_is_left_alone() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            one.start(D1, "decode").gate = asyncio.Event()
            await join_and_see(one, D1, "decode")
            one.router.fleet.workers[D0].is_draining = True
            reading = asyncio.create_task(ask(one.router))
            await until(lambda: one.known[D1].num_open == 1)
            await leave(one, D1)
            worker = one.router.fleet.workers[D1]
            assert worker.is_leaving and not worker.is_usable
            with pytest.raises(ClientError, match="is leaving this router"):
                await one.router.migration.undrain(D1)
            await tidy(one)
            join(one, D1, "decode")
            assert one.router.fleet.workers[D1] is worker and worker.is_usable
            one.known[D1].gate.set()
            await reading
            await tidy(one)
            assert one.router.fleet.workers[D1] is worker and one.router.fleet.workers[D0].is_draining
            await one.settle()

    run(scenario())


def test_another_role_is_another_engine_once_the_first_has_gone() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            engine = one.start(P1, "decode")
            await join_and_see(one, P1, "decode")
            join(one, P1, "prefill")
            old = one.router.fleet.workers[P1]
            assert old.role == "decode" and old.is_leaving
            engine.role = "prefill"
            await tidy(one)
            new = one.router.fleet.workers[P1]
            assert new is not old and new.role == "prefill"
            await until(lambda: new.is_usable)
            one.router.fleet.workers[P0].is_draining = True
            await ask(one.router)
            assert len(engine.requests) == 1
            await one.settle()

    run(scenario())


def test_a_request_that_was_placed_on_an_engine_that_is_forgotten_meanwhile_is_placed_again() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            one.start(P1, "prefill")
            await join_and_see(one, P1, "prefill")
            one.router.fleet.workers[P0].is_draining = True
            router, find = one.router, one.router.conversations.find

            async def find_while_it_leaves(*args: object) -> None:
                router.conversations.find = find  # type: ignore[method-assign]
                router.fleet.workers[P0].is_draining = False
                await leave(one, P1)
                await tidy(one)
                assert P1 not in router.fleet.workers

            router.conversations.find = find_while_it_leaves  # type: ignore[method-assign, assignment]
            await ask(router)
            assert one.known[P1].requests == []
            await one.settle()

    run(scenario())


def test_names_of_engines_that_are_gone_are_harmless() -> None:
    async def scenario() -> None:
        async with bench(4, 4, engines_join=True) as one:
            fleet = one.router.fleet
            assert fleet.find("http://gone") is None and fleet.find(None) is None
            names = [candidate.name for candidate in fleet.shortlist(frozenset(), "http://gone", None, "http://d3")]
            assert "http://gone" not in names and "http://d3" in names
            many = [f"http://gone{number}" for number in range(9)]
            assert fleet.few(frozenset(), *many)
            one.router.conversations.index.record([7], Holder("http://d3", "epoch-1"))
            worker = fleet.workers["http://d3"]
            one.router.membership._forget(worker)
            worker.begin()
            worker.end()
            assert "http://d3" not in fleet.ranks.least(lambda name: True)
            assert len(one.router.conversations.index) == 0
            assert one.router.leases.num_strays == 0

    run(scenario())


def test_a_fleet_may_grow_and_shrink_over_the_size_from_which_it_is_kept_in_order() -> None:
    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            names = [f"http://d{number}" for number in range(1, 6)]
            for name in names:
                one.start(name, "decode")
                await join_and_see(one, name, "decode")
            assert one.router.fleet.is_large and one.router.fleet.num_prefill == 1
            for _ in range(6):
                await ask(one.router)
            assert [len(engine.requests) for engine in one.known.values()] == [6, 1, 1, 1, 1, 1, 1]
            for name in names:
                await leave(one, name)
                await tidy(one)
            assert list(one.router.fleet.workers) == [P0, D0]
            await ask(one.router)
            await one.settle()

    run(scenario())


def test_engines_of_a_large_fleet_leave_and_come_again() -> None:
    """A choice among many looks at those with the least to do (`ranks`): one that left must not be among them."""
    urls = [f"http://x{number}" for number in range(6)]

    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            for url in urls:
                one.start(url, "prefill")
            for _ in range(2):
                for url in urls:
                    await join_and_see(one, url, "prefill")
                    await ask(one.router)
                for url in urls:
                    await leave(one, url)
                    await tidy(one)
                    assert url not in one.router.fleet.workers
                    await ask(one.router)
            await one.settle()
            assert set(one.router.fleet.workers) == {P0, D0}

    run(scenario())


def test_a_look_at_an_engine_that_left_is_over() -> None:
    """Its connections are cut: nobody waits for the answer of one that is gone."""

    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            engine = one.start(D1, "decode")
            await join_and_see(one, D1, "decode")
            cuts: list[str] = []
            engine.cut = lambda: cuts.append(D1)  # type: ignore[method-assign]
            await leave(one, D1)
            await tidy(one)
            assert cuts == [D1]

    run(scenario())


def test_what_a_request_may_ask_for_is_what_every_engine_can_take() -> None:
    """As engines join, leave, and start anew with another model's window."""

    async def refused(one: Bench, num_prompt: int) -> bool:
        params = SamplingParams(max_tokens=2, seed=1)
        try:
            await chunks_of(one.router, GenerateRequest(token_ids=[1] * num_prompt, sampling_params=params))
        except ClientError:
            return True
        return False

    async def scenario() -> None:
        async with bench(1, 1, engines_join=True) as one:
            assert not await refused(one, 20)
            engine = one.start(D1, "decode")
            engine.window = 16
            await join_and_see(one, D1, "decode")
            assert await refused(one, 20)
            engine.window = 64
            await one.router.fleet.look(one.router.fleet.workers[D1])
            assert not await refused(one, 20) and await refused(one, 63)
            await leave(one, D1)
            await tidy(one)
            assert not await refused(one, 63)
            await one.settle()

    run(scenario())
