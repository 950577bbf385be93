"""What an operator has a router do in the middle of everything: drain an engine, let it leave, move a request."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from faults.machine import Machine
from faults.weather import Storm
from fourhop.router.app import Router
from fourhop.router.migration import MoveRequest
from fourhop.router.policy import EngineRole
from fourhop.wire.errors import FourhopError

OTHER: dict[EngineRole, EngineRole] = {"prefill": "decode", "decode": "prefill"}


async def drain(router: Router, machine: Machine, rng: random.Random, storm: Storm) -> None:
    """Take an engine out of service for a while."""
    storm.note(f"{machine.name} is drained")
    with suppress(FourhopError):
        await router.migration.drain(machine.url)
    await asyncio.sleep(rng.expovariate(1.0))
    with suppress(FourhopError):  # it may have left meanwhile, and joins anew
        await router.migration.undrain(machine.url)
    worker = router.fleet.find(machine.url)
    if worker is not None:
        worker.is_draining = False
    storm.note(f"{machine.name} is back in service")


async def leave(router: Router, machine: Machine, rng: random.Random, storm: Storm) -> None:
    """Have an engine leave, or take the other role, and join again as it was."""
    discovery, role = router.discovery, machine.role
    other = dict.fromkeys([machine.url] if rng.random() < 0.3 else [], OTHER[role])
    storm.note(f"{machine.name} leaves" + (f" and joins as {OTHER[role]}" if other else ""))
    discovery.listed = {url: was for url, was in discovery.listed.items() if url != machine.url} | other
    await asyncio.sleep(rng.expovariate(0.5))
    discovery.listed = {**discovery.listed, machine.url: role}
    storm.note(f"{machine.name} is to join again")


async def move(router: Router, machine: Machine, request_id: str) -> None:
    """Move some client's request to some engine, whichever it is."""
    with suppress(FourhopError):
        await router.migration.move(MoveRequest(request_id, machine.url))
