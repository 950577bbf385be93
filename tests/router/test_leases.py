"""What the router holds it keeps alive; what an engine holds for it and nobody wants is released."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing

import msgspec

from contracts.token_server import chunks_of, tokens_of, until
from fakes.fleet import Bench, bench
from fourhop.router.ledger import HoldState
from fourhop.wire.errors import ErrorBody, PeerError, PeerRefused
from fourhop.wire.generate import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(
    token_ids=[1, 2, 3, 4, 5], sampling_params=SamplingParams(max_tokens=8, seed=11), request_id="r"
)


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def look_again(one: Bench) -> None:
    """Every engine is looked at as if it had been down for long."""
    for worker in one.router.fleet.workers.values():
        worker.down = worker.down or "away"
    one.clock.now_s += 60
    await one.look()


def pass_time(one: Bench, seconds: float) -> None:
    """For the router, and for the engines, which refuse tickets that are out of date."""
    one.clock.now_s += seconds
    for engine in [*one.prefill, *one.decode]:
        engine.now_s += seconds


def test_a_ticket_that_waits_for_the_client_is_renewed_until_decode_has_it() -> None:
    """The serial form, and a client that reads one token and then nothing for a minute."""

    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gives_early_tickets = False
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                await anext(chunks)
                [ticket] = one.prefill[0].holds
                for _ in range(6):
                    await one.router.leases.renew()
                    pass_time(one, 11)
                assert one.prefill[0].renewed == [ticket] * 5
                assert one.router.ledger.num_leaked == 0
                await anext(chunks)
                one.clock.now_s += 60
                await one.router.leases.renew()
                assert len(one.prefill[0].renewed) == 5
                assert one.decode[0].num_pulled == 1
            await one.settle()

    run(scenario())


def test_a_ticket_that_its_engine_forgot_is_over_and_the_request_goes_on() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gives_early_tickets = False
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks)]
                one.prefill[0].holds.clear()
                one.clock.now_s += 11
                await one.router.leases.renew()
                assert one.router.ledger.ended == {HoldState.EXPIRED: 1}
                received += [chunk async for chunk in chunks]
            assert len(tokens_of(received)) == 8
            await one.settle()

    run(scenario())


def test_a_renewal_that_fails_is_tried_again() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gives_early_tickets = False
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                await anext(chunks)
                one.prefill[0].control_error = PeerError("no answer")
                one.clock.now_s += 11
                await one.router.leases.renew()
                one.prefill[0].control_error = None
                await one.router.leases.renew()
                assert len(one.prefill[0].renewed) == 1
            await one.settle()

    run(scenario())


def test_leases_of_ours_that_nobody_wants_are_released_and_those_of_others_are_not() -> None:
    async def scenario() -> None:
        async with bench() as one:
            engine = one.prefill[0]
            engine.holds = {"t1": "ours-99", "t2": "theirs-1", "t3": ""}
            engine.gives_early_tickets = False
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                await anext(chunks)
                [wanted] = set(engine.holds) - {"t1", "t2", "t3"}
                await look_again(one)
                assert engine.aborted == ["t1"]
                assert set(engine.holds) == {wanted, "t2", "t3"}
            assert one.count("fourhop_router_stray_holds") == 1
            assert set(engine.holds) >= {"t2", "t3"}
            engine.holds.clear()
            await one.settle()

    run(scenario())


def test_what_an_earlier_life_of_an_engine_held_is_forgotten() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gives_early_tickets = False
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                received = [await anext(chunks)]
                one.prefill[0].die()
                one.prefill[0].restart()
                await one.look()
                assert one.router.ledger.owed == {}
                assert one.router.ledger.ended == {HoldState.LOST: 1}
                received += [chunk async for chunk in chunks]
            assert len(tokens_of(received)) == 8
            await one.settle()

    run(scenario())


def test_an_engine_without_leases_is_not_asked_twice_and_one_that_fails_is_not_fatal() -> None:
    async def scenario() -> None:
        async with bench() as one:
            for error in (PeerRefused(404, ErrorBody("?", "NotFoundError", None, 404)), PeerError("no answer")):
                one.prefill[0].control_error = error
                await look_again(one)
                assert all(worker.down is None for worker in one.router.fleet.workers.values())
                assert len(tokens_of(await chunks_of(one.router, REQUEST))) == 8
            await one.settle()

    run(scenario())


def test_housekeeping_renews_by_itself() -> None:
    async def scenario() -> None:
        async with bench() as one:
            one.prefill[0].gives_early_tickets = False
            naps = asyncio.Semaphore(0)
            await asyncio.sleep(0)  # the router's own tasks have begun, and never wake up

            async def sleep(seconds: float) -> None:
                await naps.acquire()
                one.clock.now_s += 11

            one.router.fleet.sleep = sleep
            keeping = asyncio.create_task(one.router.housekeeping._repeat("leases"))
            async with aclosing(one.router.generate(REQUEST)) as chunks:
                await anext(chunks)
                naps.release()
                await until(lambda: len(one.prefill[0].renewed) == 1)
                naps.release()
                await until(lambda: len(one.prefill[0].renewed) == 2)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await one.settle()

    run(scenario())


def test_an_engine_that_hangs_keeps_no_other_from_renewing() -> None:
    """Two holds at two engines; the one that is asked first never answers."""

    async def scenario() -> None:
        async with bench(2, 1) as one:
            for engine in one.prefill:
                engine.gives_early_tickets = False
            readers = [one.router.generate(msgspec.structs.replace(REQUEST, request_id=name)) for name in "ab"]
            for reader in readers:
                await anext(reader)
            assert [len(engine.holds) for engine in one.prefill] == [1, 1]
            one.prefill[0].renewal_gate = asyncio.Event()
            pass_time(one, 25)
            renewing = asyncio.create_task(one.router.leases.renew())
            await until(lambda: len(one.prefill[1].renewed) == 1)
            assert one.prefill[0].renewed == [] and not renewing.done()
            one.prefill[0].renewal_gate.set()
            await renewing
            for reader in readers:
                await reader.aclose()
            await one.settle()

    run(scenario())
