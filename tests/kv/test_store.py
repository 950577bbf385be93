"""What is special about a store: it outlives its engines, is shared and bounded, and gives only what was put in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.connector import Hurry, expect_refusal, pull
from fakes.kv_world import LAYOUT, Party, World, make_ticket, num_bytes, world_of
from fourhop.kv.config import ConnectorOptions, KVTransferConfig
from fourhop.kv.connector import Progress, Pulled, PullFailed, Released, Renewed
from fourhop.kv.connectors import open_connector
from fourhop.kv.folders import LocalFolder, UrlFolder, changed_at_s
from fourhop.kv.layout import KVPool
from fourhop.kv.pulls import Conduct
from fourhop.kv.records import HEADER, DamagedError, key_of, seal, unseal
from fourhop.kv.shelf import Shelf, TicketState
from fourhop.kv.store import StoreConnector
from fourhop.wire.errors import StartError
from fourhop.wire.ticket import KVTicket

BLOCK_BYTES = num_bytes(1)


def store_at(url: Path | str) -> World:
    return world_of("store", url=str(url))


def stored(producer: Party, ticket_id: str, block_ids: list[int], **changes: str) -> KVTicket:
    """A ticket that is in the store, so that its producer is done with it."""
    ticket = msgspec.structs.replace(make_ticket(ticket_id, block_ids, producer.epoch), **changes)
    published = producer.progress(ticket, len(block_ids), b"tail")
    assert producer.next_event() == Released(ticket_id)
    return published


def pull_stored(consumer: Party, ticket: KVTicket, block_ids: list[int]) -> None:
    consumer.pull(ticket, block_ids)
    assert consumer.next_event() == Pulled(ticket.ticket_id, num_bytes(len(block_ids)), b"tail")


def block_files(root: Path) -> list[Path]:
    return [path for path in (root / "blocks").rglob("*") if path.is_file()]


def test_blocks_outlive_their_producer(tmp_path: Path) -> None:
    """Over a restart of everything: what was stored can be pulled, though its producer's life is over."""
    world = store_at(tmp_path)
    producer = world.party("life-1")
    ticket = stored(producer, "t", [3, 4])
    expected = producer.pool.planes[:, [3, 4]].copy()
    producer.connector.close()
    consumer = world.party("epoch-2")
    pull_stored(consumer, ticket, [1, 9])
    assert np.array_equal(consumer.pool.planes[:, [1, 9]], expected)
    world.close()


def test_producer_may_reuse_its_blocks_when_they_are_stored(tmp_path: Path) -> None:
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = stored(producer, "t", [3])
    expected = producer.pool.planes[:, 3].copy()
    producer.pool.planes[:] = 0
    pull_stored(consumer, ticket, [5])
    assert np.array_equal(consumer.pool.planes[:, 5], expected)
    world.close()


def test_equal_blocks_are_stored_once(tmp_path: Path) -> None:
    world = store_at(tmp_path)
    first, second = world.party(), world.party("epoch-2")
    second.pool.planes[:] = first.pool.planes
    stored(first, "a", [1, 2])
    before = {path: path.stat().st_ino for path in block_files(tmp_path)}
    stored(second, "b", [1, 2, 3])
    assert len(block_files(tmp_path)) == 3
    assert all(path.stat().st_ino == inode for path, inode in before.items())
    world.close()


def test_models_never_share_blocks(tmp_path: Path) -> None:
    """Even for the same tokens under the same name: here the same ticket, but for another model."""
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = stored(producer, "t", [3], fingerprint="one model")
    assert expect_refusal(consumer, msgspec.structs.replace(ticket, fingerprint="another"), [1]) == "withdrawn"
    world.close()


def test_find_counts_leading_blocks_of_that_model(tmp_path: Path) -> None:
    world = store_at(tmp_path)
    producer = world.party()
    stored(producer, "t", [3, 4, 5])
    names = producer.names["t"].of_blocks
    store = producer.connector
    assert isinstance(store, StoreConnector)
    assert store.find("tiny", names) == 3
    assert store.find("tiny", [*names[:2], b"other", names[2]]) == 2
    assert store.find("tiny", [b"other", *names]) == 0
    assert store.find("another model", names) == 0
    world.close()


def test_ticket_of_another_store_is_refused_at_once(tmp_path: Path) -> None:
    here, there = store_at(tmp_path / "here"), store_at(tmp_path / "there")
    ticket = stored(here.party(), "t", [1])
    assert expect_refusal(there.party("epoch-2"), ticket, [1]) == "unreachable"
    here.close()
    there.close()


def test_pull_without_names_is_refused(tmp_path: Path) -> None:
    world = store_at(tmp_path)
    ticket = stored(world.party(), "t", [1])
    consumer = world.party("epoch-2")
    consumer.connector.pull(ticket, [1], [])
    assert consumer.failure() == "protocol"
    pull_stored(consumer, ticket, [1])
    world.close()


def test_withdrawn_ticket_says_so_and_recycled_blocks_never_get_in(tmp_path: Path) -> None:
    """The engine takes its blocks back while they are waiting to be written."""
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.progress(make_ticket("t", [1, 2], producer.epoch), 1)
    consumer.pull(ticket, [5, 6])
    assert producer.next_renewal() == "t"
    producer.connector.release("t")
    producer.pool.planes[:] = 0
    assert consumer.failure() == "withdrawn"
    producer.progress(ticket, 2, b"")
    assert producer.is_quiet()
    producer.connector.close()
    for path in block_files(tmp_path):
        assert np.frombuffer(path.read_bytes()[HEADER.size :], np.uint8).any()
    world.close()


def test_producer_that_dies_leaves_its_consumer_to_time_out(tmp_path: Path) -> None:
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2", conduct=Conduct(clock=Hurry()))
    ticket = stored(producer, "t", [1])
    shelf = Shelf(LocalFolder(tmp_path), LAYOUT, 2**30)
    shelf.put_state("t", TicketState(producer.epoch, LAYOUT.geometry(), num_blocks=1))
    assert expect_refusal(consumer, ticket, [1]) == "timeout"
    world.close()


def test_full_disk_ends_the_ticket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    (tmp_path / "blocks").write_text("in the way")
    ticket = producer.publish("t", [1])
    assert producer.next_event() == Released("t")
    assert expect_refusal(consumer, ticket, [1]) == "unreachable"
    assert "KV ticket t cannot be stored" in caplog.text
    world.close()


def test_bug_in_a_save_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = store_at(tmp_path)
    producer = world.party()
    producer.connector.publish(make_ticket("t", [99], producer.epoch), Progress([99], [b"name"], b""))
    producer.connector.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    world.close()


damage: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda data: b"",
    "torn": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\x00",
    "zeroed": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}


@pytest.mark.parametrize("how", damage)
def test_damaged_block_fails_the_pull_and_is_stored_anew(tmp_path: Path, how: str) -> None:
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = stored(producer, "t", [3])
    (path,) = block_files(tmp_path)
    path.write_bytes(damage[how](path.read_bytes()))
    assert expect_refusal(consumer, ticket, [1]) == "corrupt"
    pull_stored(consumer, stored(producer, "again", [3]), [1])
    assert np.array_equal(consumer.pool.planes[:, 1], producer.pool.planes[:, 3])
    world.close()


def test_block_filed_under_another_name_is_damage(tmp_path: Path) -> None:
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = stored(producer, "t", [3])
    (path,) = block_files(tmp_path)
    other = stored(producer, "u", [4])
    (new,) = set(block_files(tmp_path)) - {path}
    new.write_bytes(path.read_bytes())
    assert expect_refusal(consumer, other, [1]) == "corrupt"
    pull_stored(consumer, ticket, [1])
    world.close()


def test_block_of_another_size_is_damage(tmp_path: Path) -> None:
    shelf = Shelf(LocalFolder(tmp_path), LAYOUT, 2**30)
    shelf.put_block("model", b"name", b"short")
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = stored(producer, "t", [3])
    consumer.connector.pull(msgspec.structs.replace(ticket, fingerprint="model"), [1], [b"name"])
    assert consumer.failure() == "corrupt"
    world.close()


@settings(max_examples=200)
@given(body=st.binary(max_size=300), data=st.data())
def test_any_changed_byte_is_noticed(body: bytes, data: st.DataObject) -> None:
    key = key_of("a", b"b")
    record = seal(key, body)
    assert bytes(unseal(key, record)) == body
    where = data.draw(st.integers(0, len(record) - 1))
    changed = bytearray(record)
    changed[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError):
        unseal(key, bytes(changed))


@settings(max_examples=200)
@given(body=st.binary(max_size=300), data=st.data())
def test_any_cut_or_addition_is_noticed(body: bytes, data: st.DataObject) -> None:
    key = key_of("key")
    record = seal(key, body)
    for changed in (record[: data.draw(st.integers(0, len(record) - 1))], record + data.draw(st.binary(min_size=1))):
        with pytest.raises(DamagedError):
            unseal(key, changed)


def test_flipping_any_byte_of_a_file_never_gives_wrong_blocks(tmp_path: Path) -> None:
    """The same end to end: for bytes all over a block's file the pull fails."""
    world = store_at(tmp_path)
    producer, consumer = world.party(), world.party("epoch-2")
    stored(producer, "t", [3])
    (path,) = block_files(tmp_path)
    good = path.read_bytes()
    for number, where in enumerate([*range(HEADER.size), *range(HEADER.size, len(good), 37), len(good) - 1]):
        ticket = stored(producer, f"t{number}", [3])
        path.write_bytes(good[:where] + bytes([good[where] ^ 0x20]) + good[where + 1 :])
        assert expect_refusal(consumer, ticket, [1]) == "corrupt"
    world.close()


def test_keys_depend_on_every_part_and_where_it_ends() -> None:
    parts = [("ab", b"c"), ("a", b"bc"), ("abc", b""), ("ab", b"c", 1), ((1, 2), "x"), ((1,), 2, "x")]
    assert len({key_of(*each) for each in parts}) == len(parts)


def test_store_stays_within_its_size_and_keeps_what_is_used(tmp_path: Path) -> None:
    world = world_of("store", url=str(tmp_path), max_bytes=12 * BLOCK_BYTES)
    producer, consumer = world.party(), world.party("epoch-2", conduct=Conduct(clock=Hurry()))
    old, used = stored(producer, "old", [0]), stored(producer, "used", [1])
    for place, age_s in zip(sorted(block_files(tmp_path), key=os.path.getmtime), (2000, 1000), strict=True):
        os.utime(place, (0, place.stat().st_mtime - age_s))
    pull_stored(consumer, used, [1])
    for number in range(2, 16):
        stored(producer, f"t{number}", [number])
    producer.connector.close()
    assert sum(path.stat().st_size for path in block_files(tmp_path)) <= 12 * BLOCK_BYTES
    assert expect_refusal(consumer, old, [2]) in ("withdrawn", "unknown_ticket")
    store = consumer.connector
    assert isinstance(store, StoreConnector)
    assert store.find("tiny", producer.names["t15"].of_blocks) == 1
    world.close()


def test_reading_a_block_makes_it_the_last_to_go(tmp_path: Path) -> None:
    shelf = Shelf(LocalFolder(tmp_path), LAYOUT, 3 * BLOCK_BYTES)
    for age_s, name in ((300, b"a"), (200, b"b"), (100, b"c")):
        shelf.put_block("model", name, bytes(BLOCK_BYTES))
        newest = max(block_files(tmp_path), key=os.path.getmtime)
        os.utime(newest, (0, newest.stat().st_mtime - age_s))
    shelf.get_block("model", b"a")
    shelf.put_block("model", b"d", bytes(BLOCK_BYTES))
    shelf.make_room()
    assert [shelf.has_block("model", name) for name in (b"a", b"b", b"c", b"d")] == [True, False, False, True]


def test_two_engines_open_one_store(tmp_path: Path) -> None:
    assert Shelf(LocalFolder(tmp_path), LAYOUT, 1).store_id == Shelf(LocalFolder(tmp_path), LAYOUT, 1).store_id


def test_store_behind_fsspec(tmp_path: Path) -> None:
    world = store_at(f"memory://{tmp_path.name}")
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [3, 4]), [1, 9])
    ticket = producer.publish("u", [5])
    consumer.pull(ticket, [5])
    assert consumer.next_event() == Pulled("u", num_bytes(1))
    consumer.pull(ticket, [5])
    assert consumer.failure() == "used"
    world.close()


def test_fsspec_folder_drops_the_oldest(tmp_path: Path) -> None:
    shelf = Shelf(UrlFolder(f"memory://{tmp_path.name}"), LAYOUT, 3 * BLOCK_BYTES)
    for name in (b"a", b"b", b"c", b"d"):
        shelf.put_block("model", name, bytes(BLOCK_BYTES))
    shelf.make_room()
    assert [shelf.has_block("model", name) for name in (b"a", b"b", b"c", b"d")] == [False, False, True, True]


@pytest.mark.parametrize(
    ("info", "expected_s"),
    [({"mtime": 5.5}, 5.5), ({"LastModified": "1970-01-01T00:00:07+00:00"}, 7.0), ({"size": 1}, 0.0)],
)
def test_times_of_changes(info: dict[str, object], expected_s: float) -> None:
    assert changed_at_s(info) == expected_s


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", r"the store connector needs kv_connector_extra_config\.url"),
        ("/proc/no such folder", "KV store /proc/no such folder: "),
        ("gopher://hole", "KV store gopher://hole: "),
    ],
)
def test_store_that_cannot_be_opened_is_one_line(url: str, message: str) -> None:
    pool = KVPool(replace(LAYOUT, num_blocks=1))
    config = KVTransferConfig("store", kv_connector_extra_config=ConnectorOptions(url=url))
    with pytest.raises(StartError, match=message):
        open_connector(config, pool, "epoch-1", lambda: None)
    pool.close()


def test_events_of_a_save_are_renewals_then_the_release(tmp_path: Path) -> None:
    """The lease runs while a slow store is written: the store itself asks for time."""
    world = store_at(tmp_path)
    producer = world.party()
    producer.publish("t", [1, 2])
    assert producer.next_renewal() == "t"
    assert producer.next_event() == Released("t")
    assert not any(isinstance(event, Renewed | PullFailed) for event in producer.connector.poll())
    world.close()
