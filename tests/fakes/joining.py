"""Engines that join and leave a bench, and a request that is served meanwhile."""

from __future__ import annotations

from contracts.token_server import tokens_of, until
from fakes.fleet import Bench
from fakes.stub_engine import next_token
from fourhop.router.app import Router
from fourhop.router.policy import EngineRole
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.join import JoinRequest, LeaveRequest

P0, P1, D0, D1 = "http://p0", "http://p1", "http://d0", "http://d1"
REQUEST = GenerateRequest(
    token_ids=[1, 2, 3, 4, 5], sampling_params=SamplingParams(max_tokens=12, seed=11), request_id="r"
)


def expected() -> list[int]:
    output: list[int] = []
    for _ in range(12):
        output.append(next_token(REQUEST, output))
    return output


async def ask(router: Router) -> None:
    received = [chunk async for chunk in router.generate(REQUEST)]
    assert tokens_of(received) == expected()


async def tidy(one: Bench) -> None:
    """What housekeeping does in a second."""
    for task in ("expire", "leaks", "leases", "members", "move", "gate"):
        await one.router.housekeeping.do(task)


def join(one: Bench, url: str, role: EngineRole, every_s: float | None = None) -> None:
    one.router.membership.join(JoinRequest(url, role, every_s))


async def join_and_see(one: Bench, url: str, role: EngineRole) -> None:
    join(one, url, role)
    await until(lambda: one.router.fleet.workers[url].down is None)


async def leave(one: Bench, url: str) -> None:
    await one.router.membership.leave(LeaveRequest(url))
