"""What is still there of requests that are over: nothing, before long."""

from __future__ import annotations

from collections.abc import Mapping

from faults.machine import Machine
from fourhop.router.app import Router
from fourhop.router.policy import EngineRole


def leftovers_of(machine: Machine) -> list[str]:
    """Of an engine: blocks, sequences, tickets, pulls, connections."""
    engine, connector = machine.engine, machine.connector
    if engine is None or connector is None:
        return [f"{machine.name} is down"]
    loop = engine.loop
    assert loop.transfers is not None
    now = loop.scheduler.occupancy()
    table = {
        "used blocks": now.num_blocks - now.num_free_blocks,
        "sequences": now.num_running + now.num_waiting + now.num_loading + now.num_held,
        "jobs": len(list(loop.jobs)),
        "leases": len(loop.leases()),
        "tickets to pull": len(loop.transfers.pulls),
        "pulls": len(connector.pulls),
        "conversations": len(connector.tasks),
        "published tickets": connector.holds.num_standing,
        "requests": len(machine.server.tasks),
    }
    return [f"{machine.name} has {number} {what}" for what, number in table.items() if number]


def leftovers_at(router: Router, roles: Mapping[str, EngineRole], now_s: float) -> list[str]:
    """Of a router that has these engines, whose leases are over by `now_s` (Unix time) if they are."""
    left = []
    found = {worker.name: worker.role for worker in router.fleet.workers.values() if not worker.is_leaving}
    if found != roles:
        left.append(f"the router's engines are {found}")
    for worker in router.fleet.workers.values():
        if worker.in_flight:
            left.append(f"the router has {worker.in_flight} requests at {worker.name}")
        backlog = worker.backlog
        if backlog.prompts or backlog.coming or backlog.streams or backlog.late:
            left.append(f"the router expects work of {worker.name}: {backlog}")
        if worker.down is not None:
            left.append(f"the router has {worker.name} down: {worker.down}")
    if len(router.queue):
        left.append(f"{len(router.queue)} requests wait at the router")
    router.ledger.expire(now_s)
    if router.ledger.owed:
        left.append(f"the router's ledger has {list(router.ledger.owed.values())}")
    return left
