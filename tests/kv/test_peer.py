"""What `shm` and `tcp` must bear from whatever is at the other end of a socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from contracts.connector import expect_refusal, pull
from fakes.kv_world import LAYOUT, WAIT_S, Party, World, make_ticket, num_bytes, world_of
from fourhop.kv import tcp
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import PullFailed, Released
from fourhop.kv.connectors import CONNECTORS, open_connector
from fourhop.kv.control import (
    HEADER,
    Channel,
    Claim,
    Confirmed,
    Granted,
    Ready,
    Refused,
    Release,
    Renew,
    SharedMemory,
    Sum,
    seal,
)
from fourhop.kv.layout import KVPool
from fourhop.kv.pulls import Conduct
from fourhop.kv.sockets import Listener
from fourhop.wire.errors import StartError
from fourhop.wire.ticket import KVTicket

QUICK = ConnectorOptions(pull_timeout_s=0.05)


@pytest.fixture(params=["shm", "tcp", "nixl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    opened = world_of(request.param)
    yield opened
    opened.close()


def frame(value: object, number: int = 0) -> bytes:
    return seal(msgspec.msgpack.encode(value), number)


def claim_of(ticket: KVTicket, **changes: Any) -> Claim:
    claim = Claim(
        connector=ticket.connector,
        ticket_id=ticket.ticket_id,
        epoch=ticket.epoch,
        geometry=LAYOUT.geometry(),
        skip_blocks=0,
        num_blocks=len(ticket.block_ids[0]),
    )
    return msgspec.structs.replace(claim, **changes)


def dial(ticket: KVTicket) -> socket.socket:
    return socket.create_connection((ticket.host, ticket.port), timeout=WAIT_S)


def hangs_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
        HEADER.pack(2**32 - 1, 0),
        HEADER.pack(0, 0),
        seal(b"\xc1\xc1\xc1\xc1", 0),
        frame({"type": "claim"}),
        frame({"type": "claim", "ticket_id": 7}),
        frame({"type": "launch"}),
        frame(Release()),
        frame([1, 2, 3]),
        frame(Renew("t", "epoch-1"), number=1),
        HEADER.pack(4, 0) + msgspec.msgpack.encode({"a": 1}),
    ],
)
def test_garbage_ends_its_own_connection_only(world: World, garbage: bytes) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    with dial(ticket) as sock:
        sock.sendall(garbage)
        assert hangs_up(sock)
    pull(producer, consumer, ticket, [1])


def test_silent_and_half_spoken_connections_delay_nobody(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    with dial(ticket), dial(ticket) as half:
        half.sendall(b"\x00\x00")
        pull(producer, consumer, ticket, [1])


def test_silent_connection_is_dropped_after_one_pulls_time(world: World) -> None:
    producer = world.party(options=QUICK)
    with dial(producer.publish("t", [1])) as sock:
        assert hangs_up(sock)


@pytest.mark.parametrize("num_ready", [0, 1])
def test_consumer_that_dies_after_its_claim_gives_the_blocks_back(world: World, num_ready: int) -> None:
    """Nobody else may claim them, so nobody is waited for; not by a producer that waits for its own blocks either."""
    producer, consumer = world.party(conduct=Conduct(keep_alive_s=0.001)), world.party("epoch-2")
    ticket = producer.progress(make_ticket("t", [1], producer.epoch), num_ready)
    with dial(ticket) as sock:
        sock.sendall(frame(claim_of(ticket)))
        assert sock.recv(4)
    assert producer.next_event() == Released("t")
    assert expect_refusal(consumer, ticket, [2]) == "used"
    assert producer.is_quiet()


def test_claim_of_another_protocol_version_is_refused(world: World) -> None:
    producer = world.party()
    ticket = producer.publish("t", [1])
    with dial(ticket) as sock:
        sock.sendall(frame(claim_of(ticket, version=1)))
        num_bytes, _ = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
        answer = msgspec.msgpack.decode(sock.recv(num_bytes, socket.MSG_WAITALL), type=Refused)
    assert answer.cause == "protocol"


def test_unknown_fields_of_a_claim_are_ignored(world: World) -> None:
    producer = world.party()
    ticket = producer.publish("t", [])
    with dial(ticket) as sock:
        sock.sendall(frame({**msgspec.to_builtins(claim_of(ticket)), "lease_s": 3}) + frame(Release(), 1))
        assert producer.next_event() == Released("t")


@pytest.fixture
def pretender() -> Iterator[Callable[[Callable[[Channel], None]], Listener]]:
    """Producers that are none: listeners that say whatever a test wants."""
    opened: list[Listener] = []

    def open_listener(converse: Callable[[Channel], None]) -> Listener:
        opened.append(Listener("127.0.0.1", 0, WAIT_S, converse))
        return opened[-1]

    yield open_listener
    for listener in opened:
        listener.close()


Pretender = Callable[[Callable[[Channel], None]], Listener]


def pull_from(listener: Listener, consumer: Party) -> str:
    """The cause with which a pull of one block from a pretender fails."""
    ticket = msgspec.structs.replace(
        make_ticket("t", [1], "epoch-1"), connector=consumer.connector.name, host=listener.host, port=listener.port
    )
    return expect_refusal(consumer, ticket, [1])


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"", "unreachable"),
        (b"\x00\x00\x00", "unreachable"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"),
        (seal(b"\xc1\xc1\xc1\xc1", 0), "protocol"),
        (frame(Confirmed()), "protocol"),
        (frame({"type": "granted", "memory": 5}), "protocol"),
        (frame(Refused("fire\nand water", "x" * 10_000)), "protocol"),
        (frame(Refused("layout", "no")), "layout"),
    ],
)
def test_nonsense_answers_fail_the_pull_by_name(world: World, pretender: Pretender, answer: bytes, cause: str) -> None:
    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send_buffers([memoryview(answer)] if answer else [])

    assert pull_from(pretender(converse), world.party()) == cause


def test_producer_that_never_answers_times_out(world: World, pretender: Pretender) -> None:
    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.receive(Release)

    assert pull_from(pretender(converse), world.party(options=QUICK)) == "timeout"


@pytest.mark.parametrize(("host", "port"), [("localhost", 1), ("", 1), ("127.0.0.1", 0), ("::1", 70_000)])
def test_address_that_is_none_is_unreachable(world: World, host: str, port: int) -> None:
    consumer = world.party()
    name = consumer.connector.name
    ticket = msgspec.structs.replace(make_ticket("t", [1], "epoch-1"), connector=name, host=host, port=port)
    assert expect_refusal(consumer, ticket, [1]) == "unreachable"


@pytest.mark.parametrize("options", [ConnectorOptions(peers=("192.0.2.1",)), ConnectorOptions(peers=("127.0.0.1:1",))])
def test_address_that_no_configuration_names_is_not_connected_to(
    world: World, pretender: Pretender, options: ConnectorOptions
) -> None:
    called: list[Channel] = []
    consumer = world.party(options=options)
    assert pull_from(pretender(called.append), consumer) == "forbidden"
    assert not called


def test_signed_tickets_may_name_any_address(world: World) -> None:
    producer = world.party()
    consumer = world.party("epoch-2", options=ConnectorOptions(peers=("192.0.2.1",), secret="s"))
    pull(producer, consumer, producer.publish("t", [1]), [1])


def test_ticket_for_a_foreign_host_is_forbidden_without_configuration(world: World) -> None:
    consumer = world.party()
    ticket = make_ticket("t", [1], "epoch-1")
    ticket = msgspec.structs.replace(ticket, connector=consumer.connector.name, host="192.0.2.1", port=9)
    assert expect_refusal(consumer, ticket, [1]) == "forbidden"


def test_tcp_stream_that_breaks_off_is_unreachable(pretender: Pretender) -> None:
    world = world_of("tcp")
    consumer = world.party()

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Granted())
        channel.send(Ready([1], b""))
        channel.send_buffers([memoryview(bytes(100))])

    listener = pretender(converse)
    ticket = make_ticket("t", [1], "epoch-1")
    ticket = msgspec.structs.replace(ticket, connector="tcp", host=listener.host, port=listener.port)
    consumer.connector.pull(ticket, [1], [])
    assert consumer.failure() == "unreachable"
    world.close()


def test_bytes_that_changed_on_the_way_are_noticed(pretender: Pretender) -> None:
    world = world_of("tcp")
    consumer = world.party(options=ConnectorOptions(checksum=True))
    payload = bytes(num_bytes(1))

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Granted())
        channel.send(Ready([1], b""))
        channel.send_buffers([memoryview(payload)])
        channel.send(Sum(xxh3_64_intdigest(b"x" + payload[1:])))

    listener = pretender(converse)
    ticket = msgspec.structs.replace(
        make_ticket("t", [1], "e"), connector="tcp", host=listener.host, port=listener.port
    )
    consumer.connector.pull(ticket, [1], [])
    assert consumer.failure() == "corrupt"
    world.close()


def test_pulls_with_checksums() -> None:
    """In whatever pieces the bytes are summed; each side has its own blocks, but the sums are of their contents."""
    world = world_of("tcp")
    producer, consumer = world.party(), world.party("epoch-2", options=ConnectorOptions(checksum=True))
    for number, block_ids in enumerate(([], [1], [3, 4, 5, 1], [0, 2, 4, 6, 8])):
        pull(producer, consumer, producer.publish(f"t{number}", block_ids), [15 - at for at in range(len(block_ids))])
    world.close()


@pytest.mark.parametrize("lengths", [[], [0], [1], [7], [8], [9], [3, 5], [3, 4, 20, 0, 1], [8, 8]])
def test_pieces_are_the_buffers(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PIECE_BYTES", 8)
    buffers = [memoryview(bytes([at] * length)) for at, length in enumerate(lengths)]
    cut = [b"".join(piece) for piece in tcp.pieces(buffers)]
    assert b"".join(cut) == b"".join(buffers)
    assert all(len(piece) == 8 for piece in cut[:-1])


@pytest.mark.parametrize("ready", [Ready([1, 2]), Ready([1, 2], b""), Ready([], b"")])
def test_other_blocks_than_were_asked_for(world: World, pretender: Pretender, ready: Ready) -> None:
    consumer = world.party()

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Granted(memory_of(consumer.pool)))
        channel.send(ready)

    assert pull_from(pretender(converse), consumer) == "protocol"


@pytest.mark.parametrize("block_id", [LAYOUT.num_blocks, -1])
def test_shm_blocks_outside_the_pool(pretender: Pretender, block_id: int) -> None:
    world = world_of("shm")
    consumer = world.party()

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Granted(memory_of(consumer.pool)))
        channel.send(Ready([block_id], b""))

    assert pull_from(pretender(converse), consumer) == "protocol"
    world.close()


def memory_of(pool: KVPool) -> SharedMemory:
    fd = pool.fileno()
    return SharedMemory(os.getpid(), fd, os.fstat(fd).st_ino, pool.layout.num_blocks)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"pool_blocks": 1}, "protocol"),
        ({"pool_blocks": LAYOUT.num_blocks + 1}, "protocol"),
        ({"inode": 1}, "unreachable"),
        ({"fd": 2**20}, "unreachable"),
        ({"pid": 2**30}, "unreachable"),
    ],
)
def test_shm_memory_that_is_not_as_said(pretender: Pretender, changes: dict[str, Any], cause: str) -> None:
    world = world_of("shm")
    memory = msgspec.structs.replace(memory_of(world.party().pool), **changes)

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Granted(memory))
        channel.send(Ready([1], b""))
        channel.receive(Release)

    assert pull_from(pretender(converse), world.party()) == cause
    world.close()


def test_shm_memory_that_could_shrink_is_refused(pretender: Pretender) -> None:
    """A file whose end can move would kill the process that reads it."""
    world = world_of("shm")
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, LAYOUT.num_bytes)

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Granted(SharedMemory(os.getpid(), fd, os.fstat(fd).st_ino, LAYOUT.num_blocks)))
        channel.send(Ready([1], b""))

    assert pull_from(pretender(converse), world.party()) == "protocol"
    world.close()
    os.close(fd)


def test_ticket_for_another_connector_is_refused_by_the_producer_too(world: World) -> None:
    producer = world.party()
    other = world_of(next(name for name in CONNECTORS if name != producer.connector.name))
    consumer = other.party("epoch-2")
    ticket = msgspec.structs.replace(producer.publish("t", [1]), connector=consumer.connector.name)
    assert expect_refusal(consumer, ticket, [1]) == "protocol"
    other.close()


def open_at(config: KVTransferConfig) -> None:
    pool = KVPool(replace(LAYOUT, num_blocks=1))
    try:
        open_connector(config, pool, "epoch-1", lambda: None).close()
    finally:
        pool.close()


def test_port_in_use_is_one_line(world: World) -> None:
    producer = world.party()
    port = producer.publish("t", [1]).port
    config = KVTransferConfig(producer.connector.name, kv_connector_extra_config=ConnectorOptions(port=port))
    with pytest.raises(StartError, match=f"KV port 127.0.0.1:{port}: Address already in use"):
        open_at(config)


def test_wildcard_host_is_refused_because_it_goes_into_tickets() -> None:
    config = KVTransferConfig("tcp", kv_connector_extra_config=ConnectorOptions(host="0.0.0.0"))
    with pytest.raises(StartError, match="an address that peers can reach"):
        open_at(config)


def test_host_that_is_not_ours_is_one_line() -> None:
    config = KVTransferConfig("tcp", kv_connector_extra_config=ConnectorOptions(host="192.0.2.1"))
    with pytest.raises(StartError, match=r"KV port 192\.0\.2\.1:0: Cannot assign requested address"):
        open_at(config)


def test_unknown_connector_names_the_known_ones() -> None:
    for name in ("mooncake", "MooncakeConnector", "NixlPushConnector"):
        with pytest.raises(StartError, match=f"no KV connector '{name}': .*; there are: shm, tcp"):
            open_at(KVTransferConfig(name))
    with pytest.raises(StartError, match="unknown KV connector 'pigeon'; there are: shm, tcp, nixl"):
        open_at(KVTransferConfig("pigeon"))


def test_refusal_messages_of_peers_are_cut(pretender: Pretender) -> None:
    world = world_of("tcp")
    consumer = world.party()

    def converse(channel: Channel) -> None:
        channel.receive_opening()
        channel.send(Refused("layout", "x" * 10_000))

    listener = pretender(converse)
    ticket = make_ticket("t", [1], "epoch-1")
    ticket = msgspec.structs.replace(ticket, connector="tcp", host=listener.host, port=listener.port)
    consumer.connector.pull(ticket, [1], [])
    assert consumer.next_event() == PullFailed("t", "layout", "x" * 300)
    world.close()
