"""What is special about a chain: pulls fall to the next member, and the producer waits for all of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from contracts.connector import expect_refusal
from fakes.kv_world import LAYOUT, Party, make_ticket, multi_world, num_bytes, world_of
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import Pulled, PullFailed, Released
from fourhop.kv.connectors import open_connector
from fourhop.kv.layout import KVPool
from fourhop.kv.multi import Place, verdict
from fourhop.wire.errors import StartError
from fourhop.wire.ticket import KVTicket


def places(ticket: KVTicket) -> list[Place]:
    return msgspec.json.decode(ticket.address, type=list[Place])


def pulled(consumer: Party, ticket: KVTicket, block_ids: list[int]) -> None:
    consumer.pull(ticket, block_ids)
    assert consumer.next_event() == Pulled(ticket.ticket_id, num_bytes(len(block_ids)))


def test_ticket_says_where_each_member_has_it(tmp_path: Path) -> None:
    world = multi_world("store", url=str(tmp_path))
    ticket = world.party().publish("t", [1])
    (shm, store) = places(ticket)
    assert (shm.connector, shm.host, shm.port) == ("shm", ticket.host, ticket.port)
    assert (store.connector, store.address) == ("store", (tmp_path / "store.id").read_text())
    world.close()


def test_next_member_serves_when_the_producer_is_gone(tmp_path: Path) -> None:
    """Its blocks are in the store, and nobody is at its address any more."""
    store, world = world_of("store", url=str(tmp_path)), multi_world("store", url=str(tmp_path))
    producer, consumer = store.party(), world.party("epoch-2")
    stored = producer.publish("t", [3, 4])
    assert producer.next_event() == Released("t")
    gone = Place("shm", "127.0.0.1", 1, "")
    address = msgspec.json.encode([gone, Place("store", "", 0, stored.address)]).decode()
    consumer.names.update(producer.names)
    pulled(consumer, msgspec.structs.replace(stored, connector="multi", address=address), [1, 9])
    assert np.array_equal(consumer.pool.planes[:, [1, 9]], producer.pool.planes[:, [3, 4]])
    store.close()
    world.close()


def test_first_member_serves_while_it_can_and_the_rest_is_declined(tmp_path: Path) -> None:
    """The producer hears of it once, when the store, too, is done with the blocks."""
    world = multi_world("store", url=str(tmp_path))
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.progress(make_ticket("t", [3, 4], producer.epoch), 1)
    consumer.pull(ticket, [1, 9])
    producer.progress(ticket, 2, b"tail")
    assert consumer.next_event() == Pulled("t", num_bytes(2), b"tail")
    assert producer.next_event() == Released("t")
    assert consumer.is_quiet()
    assert producer.is_quiet()
    world.close()


def test_chain_of_another_order_and_length_meets_by_name() -> None:
    """The producer's chain is shm, tcp; the consumer's only tcp."""
    world = multi_world()
    producer = world.party()
    ticket = producer.publish("t", [3])
    short = world_of("multi", connectors=(KVTransferConfig("tcp"),))
    consumer = short.party("epoch-2")
    pulled(consumer, ticket, [5])
    assert np.array_equal(consumer.pool.planes[:, 5], producer.pool.planes[:, 3])
    assert producer.is_quiet()  # shm still holds the blocks: its lease will end
    short.close()
    world.close()


def test_nothing_in_common(tmp_path: Path) -> None:
    world = world_of("multi", connectors=(KVTransferConfig("tcp"),))
    other = world_of("multi", connectors=(KVTransferConfig("shm"),))
    ticket = world.party().publish("t", [3])
    assert expect_refusal(other.party("epoch-2"), ticket, [1]) == "unreachable"
    other.close()
    world.close()


@pytest.mark.parametrize("address", ["", "nonsense", "{}", '[["shm"]]', '[["shm","127.0.0.1","x",""]]'])
def test_address_that_is_none(address: str) -> None:
    world = multi_world()
    ticket = world.party().publish("t", [3])
    consumer = world.party("epoch-2")
    consumer.connector.renew(msgspec.structs.replace(ticket, address=address))
    assert expect_refusal(consumer, msgspec.structs.replace(ticket, address=address), [1]) == "protocol"
    world.close()


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        (["unreachable", "unreachable"], "unreachable"),
        (["unreachable", "timeout"], "timeout"),
        (["epoch", "unreachable"], "epoch"),
        (["timeout", "used"], "used"),
        (["corrupt", "withdrawn"], "corrupt"),
    ],
)
def test_verdict_is_the_most_telling_cause(causes: list[str], expected: str) -> None:
    failures = [PullFailed("t", cause, f"{number}: {cause}") for number, cause in enumerate(causes)]
    assert verdict(failures).cause == expected
    assert all(failure.message in verdict(failures).message for failure in failures)


def test_secret_of_the_chain_is_its_members() -> None:
    """With it, a signed ticket may name addresses that no member's configuration does."""
    producers = world_of("multi", connectors=(KVTransferConfig("tcp"),))
    ticket = producers.party().publish("t", [3])
    nobody = ConnectorOptions(peers=("192.0.2.1",))
    member = KVTransferConfig("tcp", kv_connector_extra_config=nobody)
    closed, signed = world_of("multi", connectors=(member,)), world_of("multi", connectors=(member,), secret="s")
    assert expect_refusal(closed.party("epoch-2"), ticket, [1]) == "forbidden"
    pulled(signed.party("epoch-3"), ticket, [1])
    for world in (closed, signed, producers):
        world.close()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((), r"the multi connector needs kv_connector_extra_config\.connectors"),
        ((KVTransferConfig("tcp"), KVTransferConfig("store")), r"the store connector needs"),
        ((KVTransferConfig("pigeon"),), "unknown KV connector 'pigeon'"),
    ],
)
def test_chain_that_cannot_be_opened_is_one_line_and_leaves_nothing(
    members: tuple[KVTransferConfig, ...], message: str
) -> None:
    pool = KVPool(LAYOUT)
    config = KVTransferConfig("multi", kv_connector_extra_config=ConnectorOptions(connectors=members))
    with pytest.raises(StartError, match=message):
        open_connector(config, pool, "epoch-1", lambda: None)
    pool.close()
