"""What is special about NIXL: agents that are strange, and reads that hang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from contracts.connector import expect_refusal, pull
from fakes.kv_world import LAYOUT, WAIT_S, World, make_ticket, world_of
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import Released
from fourhop.kv.control import Agent, Channel, Claim, Granted, Ready, Release
from fourhop.kv.nixl import load_nixl
from fourhop.kv.pulls import Conduct
from fourhop.kv.sockets import Listener
from fourhop.wire.errors import StartError
from fourhop.wire.ticket import KVTicket

PRODUCER = Path(__file__).parents[1] / "fakes" / "kv_producer.py"


@pytest.fixture
def world() -> Iterator[World]:
    opened = world_of("nixl")
    yield opened
    opened.close()


def test_missing_package_is_one_line_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourhop.kv.nixl.BUILDS", ("no_such_build",))
    with pytest.raises(StartError, match=r"^the nixl connector needs NIXL: pip install --no-deps nixl-cu12$"):
        load_nixl()


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"metadata": b"nonsense"}, "protocol"),
        ({"metadata": b""}, "protocol"),
        ({"address": 4096}, "protocol"),
        ({"pool_blocks": 10_000}, "protocol"),
        ({"pool_blocks": 1}, "protocol"),
        ({"pool_blocks": 0}, "protocol"),
        ({"address": 2**64 - 1}, "protocol"),
    ],
)
def test_agents_that_are_not_as_said(world: World, changes: dict[str, Any], cause: str) -> None:
    honest, consumer = world.party(), world.party("epoch-2")
    card = ask_for_agent(honest.publish("t", [1]))
    assert honest.next_event() == Released("t")

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Granted(agent=msgspec.structs.replace(card, **changes)))
        channel.send(Ready([1], b""))
        channel.receive(Release)

    listener = Listener("127.0.0.1", 0, WAIT_S, converse)
    ticket = make_ticket("t", [1], "epoch-1")
    ticket = msgspec.structs.replace(ticket, connector="nixl", host=listener.host, port=listener.port)
    assert expect_refusal(consumer, ticket, [1]) == cause
    listener.close()
    pull(honest, consumer, honest.publish("u", [1]), [1])


def ask_for_agent(ticket: KVTicket) -> Agent:
    """What a producer grants. Its ticket is used afterwards."""
    with socket.create_connection((ticket.host, ticket.port)) as sock:
        channel = Channel(sock, WAIT_S)
        claim = Claim(
            connector="nixl",
            ticket_id=ticket.ticket_id,
            epoch=ticket.epoch,
            geometry=LAYOUT.geometry(),
            skip_blocks=0,
            num_blocks=1,
        )
        granted = channel.ask(claim, Granted)
    assert granted.agent is not None
    return granted.agent


@pytest.mark.slow
def test_hung_read_times_out_and_writes_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX over TCP: a producer that is frozen between its word and its bytes. Cancelling does not stop the bytes."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    child = subprocess.Popen(
        [sys.executable, str(PRODUCER), "nixl", "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    tickets = [msgspec.json.decode(child.stdout.readline(), type=KVTicket) for _ in range(2)]

    def freeze(step: str, ticket_id: str) -> None:
        if (step, ticket_id) == ("ready", "t1"):
            os.kill(child.pid, signal.SIGSTOP)

    world = world_of("nixl")
    consumer = world.party("this process", options=ConnectorOptions(pull_timeout_s=1.0), conduct=Conduct(freeze))
    before = consumer.pool.planes.copy()
    consumer.connector.pull(tickets[1], [9, 4], [])
    assert consumer.failure() == "timeout"
    os.kill(child.pid, signal.SIGCONT)
    consumer.connector.pull(tickets[0], [1, 2], [])  # lets UCX work on both sides, if the other one bears it
    consumer.next_event()
    untouched = [block_id for block_id in range(16) if block_id not in (1, 2)]
    assert np.array_equal(consumer.pool.planes[:, untouched], before[:, untouched])
    world.close()
    child.kill()
    child.communicate()
