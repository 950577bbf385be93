"""What every connector must do. A test module imports all of this and provides a `world` fixture of its connector."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.kv_world import LAYOUT, WAIT_S, Party, World, num_bytes
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import Pulled, PullFailed, Released
from fourhop.kv.layout import BlockLayout
from fourhop.kv.pulls import Conduct
from fourhop.wire.ticket import KVTicket


def check_copied(producer: Party, consumer: Party, source: list[int], target: list[int], before: bytes) -> None:
    """The target blocks hold the source blocks, and every other block of the consumer is as before."""
    expected = np.frombuffer(before, np.uint8).reshape(consumer.pool.planes.shape).copy()
    expected[:, target] = producer.pool.planes[:, source]
    assert np.array_equal(consumer.pool.planes, expected)


def pull(producer: Party, consumer: Party, ticket: KVTicket, target: list[int], skip: int = 0) -> None:
    """Pull and check all that must hold of a pull that succeeds."""
    before = consumer.pool.planes.tobytes()
    consumer.pull(ticket, target, skip)
    assert consumer.next_event() == Pulled(ticket.ticket_id, num_bytes(len(target)))
    assert producer.next_event() == Released(ticket.ticket_id)
    check_copied(producer, consumer, ticket.block_ids[0][skip:], target, before)


def test_blocks_arrive_in_place(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [3, 4, 5, 9]), [7, 0, 1, 2])
    assert producer.is_quiet()
    assert consumer.is_quiet()


def test_skipped_blocks_are_the_first_ones(world: World) -> None:
    """Case 65: of p0..p3 with two already there, p2 and p3 land in the two slots given."""
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [8, 9, 10, 11]), [2, 3], skip=2)


@pytest.mark.parametrize(("block_ids", "skip"), [([], 0), ([4, 5], 2)])
def test_nothing_to_copy_still_claims_and_releases(world: World, block_ids: list[int], skip: int) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", block_ids)
    pull(producer, consumer, ticket, [], skip)
    consumer.pull(ticket, [], skip)
    assert consumer.failure() == "used"


def test_pools_may_differ_in_number_of_blocks(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2", replace(LAYOUT, num_blocks=5))
    pull(producer, consumer, producer.publish("t", [14, 15]), [0, 4])


def test_engine_can_pull_from_itself(world: World) -> None:
    both = world.party()
    both.pull(both.publish("t", [1, 2]), [9, 8])
    assert {type(both.next_event()), type(both.next_event())} == {Pulled, Released}
    assert np.array_equal(both.pool.planes[:, [9, 8]], both.pool.planes[:, [1, 2]])


def test_caller_may_change_its_lists_after_the_call(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    source, target = [1, 2], [3, 4]
    ticket = producer.publish("t", source)
    source.clear()
    before = consumer.pool.planes.tobytes()
    consumer.pull(ticket, target)
    target[:] = [0, 0]
    assert consumer.next_event() == Pulled("t", num_bytes(2))
    check_copied(producer, consumer, [1, 2], [3, 4], before)


def test_random_block_lists_copy_exactly(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    names = (f"t{number}" for number in itertools.count())
    block_lists = st.permutations(range(LAYOUT.num_blocks))

    @settings(max_examples=30, deadline=None)
    @given(block_lists, block_lists, st.integers(0, LAYOUT.num_blocks), st.integers(0, LAYOUT.num_blocks))
    def copies(source: list[int], target: list[int], num_blocks: int, skip: int) -> None:
        skip = min(skip, num_blocks)
        ticket = producer.publish(next(names), source[:num_blocks])
        pull(producer, consumer, ticket, target[: num_blocks - skip], skip)

    copies()


def test_ticket_works_once(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    pull(producer, consumer, ticket, [1])
    consumer.pull(ticket, [2])
    assert consumer.failure() == "used"
    assert producer.is_quiet()


def test_ticket_is_used_from_the_claim_on(world: World) -> None:
    """The first pull is still copying when the second one asks."""
    second_causes: list[str] = []

    def pull_again(step: str, ticket_id: str) -> None:
        if step == "claimed":
            rival.pull(ticket, [2])
            second_causes.append(rival.failure())

    producer, rival = world.party(), world.party("epoch-3")
    consumer = world.party("epoch-2", conduct=Conduct(on_step=pull_again))
    ticket = producer.publish("t", [1])
    pull(producer, consumer, ticket, [1])
    assert second_causes == ["used"]


def expect_refusal(consumer: Party, ticket: KVTicket, target: list[int], skip: int = 0) -> str:
    """The cause of a pull that is refused; nothing may have been written."""
    before = consumer.pool.planes.tobytes()
    consumer.pull(ticket, target, skip)
    cause = consumer.failure()
    assert consumer.pool.planes.tobytes() == before
    return cause


@dataclass
class Hurry:
    """A clock that is a second further at every look."""

    now_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_unknown_ticket(world: World) -> None:
    """A store, which may be behind, waits for the ticket for as long as for any news."""
    producer, consumer = world.party(), world.party("epoch-2", conduct=Conduct(clock=Hurry()))
    ticket = producer.publish("t", [1])
    assert expect_refusal(consumer, msgspec.structs.replace(ticket, ticket_id="other"), [1]) == "unknown_ticket"


def test_refusals_leave_the_ticket_usable(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    stranger = world.party("epoch-3", replace(LAYOUT, head_dim=8))
    ticket = producer.publish("t", [1, 2])
    assert expect_refusal(consumer, msgspec.structs.replace(ticket, epoch="before"), [1, 2]) == "epoch"
    assert expect_refusal(stranger, ticket, [1, 2]) == "layout"
    assert expect_refusal(consumer, ticket, [1]) == "protocol"
    assert expect_refusal(consumer, ticket, [1], skip=2) == "protocol"
    assert expect_refusal(consumer, ticket, [1, 2, 3], skip=-1) == "protocol"
    assert expect_refusal(consumer, msgspec.structs.replace(ticket, connector="pigeon"), [1, 2]) == "protocol"
    pull(producer, consumer, ticket, [1, 2])
    assert producer.is_quiet()


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, num_layers=4),
        replace(LAYOUT, block_size=8),
        replace(LAYOUT, num_kv_heads=4, head_dim=2),
        replace(LAYOUT, head_dim=8, itemsize=2),
    ],
)
def test_other_geometry_is_refused_by_name(world: World, other: BlockLayout) -> None:
    """Case 74: also when a block has the same number of bytes on both sides."""
    producer, consumer = world.party(), world.party("epoch-2", other)
    consumer.pull(producer.publish("t", [1]), [1])
    event = consumer.next_event()
    assert isinstance(event, PullFailed)
    assert event.cause == "layout"
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "itemsize"):
        assert (name in event.message) == (getattr(LAYOUT, name) != getattr(other, name))


def test_release_after_the_pull_is_ignored(world: World) -> None:
    """Case 67: the completion came just before the abort."""
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [1]), [1])
    producer.connector.release("t")
    producer.connector.release("never published")
    assert producer.is_quiet()


def test_many_pulls_at_once(world: World) -> None:
    layout = replace(LAYOUT, num_blocks=120)
    producer, consumer = world.party(layout=layout), world.party("epoch-2", layout)
    names = [f"t{number}" for number in range(40)]
    tickets = [producer.publish(name, [3 * n, 3 * n + 1, 3 * n + 2]) for n, name in enumerate(names)]
    for n, ticket in enumerate(tickets):
        consumer.pull(ticket, [119 - 3 * n, 118 - 3 * n, 117 - 3 * n])
    pulled = {consumer.next_event() for _ in names}
    released = {producer.next_event() for _ in names}
    assert pulled == {Pulled(name, num_bytes(3)) for name in names}
    assert released == {Released(name) for name in names}
    assert np.array_equal(consumer.pool.planes, producer.pool.planes[:, ::-1])
    assert consumer.is_quiet()
    assert producer.is_quiet()


def test_one_ticket_for_many_consumers_works_for_one(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    for block_id in range(8):
        consumer.pull(ticket, [block_id])
    events = [consumer.next_event() for _ in range(8)]
    assert sum(isinstance(event, Pulled) for event in events) == 1
    assert [event.cause for event in events if isinstance(event, PullFailed)] == ["used"] * 7
    assert producer.next_event() == Released("t")
    assert producer.is_quiet()


def test_close_is_idempotent_and_fails_later_pulls(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    consumer.connector.close()
    consumer.connector.close()
    assert expect_refusal(consumer, ticket, [1]) == "unreachable"


def test_close_ends_every_pending_pull(world: World) -> None:
    """More pulls than workers, some held at their claim: each ends in exactly one event, and no thread stays."""
    at_claim, go_on = threading.Semaphore(0), threading.Event()

    def hold(step: str, ticket_id: str) -> None:
        if step == "claimed":
            at_claim.release()
            assert go_on.wait(WAIT_S)

    producer = world.party()
    consumer = world.party("epoch-2", conduct=Conduct(on_step=hold, num_workers=8))
    num_threads = threading.active_count()
    for number in range(40):
        consumer.pull(producer.publish(f"t{number}", [1]), [1])
    assert at_claim.acquire(timeout=WAIT_S)
    closing = threading.Thread(target=consumer.connector.close)
    closing.start()
    go_on.set()
    closing.join()
    ended = [consumer.next_event().ticket_id for _ in range(40)]
    assert sorted(ended) == sorted(f"t{number}" for number in range(40))
    assert consumer.is_quiet()
    producer.connector.close()
    assert threading.active_count() <= num_threads


def test_pull_that_comes_too_late_times_out(world: World) -> None:
    producer = world.party()
    consumer = world.party("epoch-2", options=ConnectorOptions(pull_timeout_s=0.0))
    assert expect_refusal(consumer, producer.publish("t", [1]), [1]) == "timeout"


def test_bug_in_a_pull_ends_it_and_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def break_down(step: str, ticket_id: str) -> None:
        raise ZeroDivisionError

    producer = world.party()
    consumer = world.party("epoch-2", conduct=Conduct(on_step=break_down))
    consumer.pull(producer.publish("t", [1]), [1])
    assert consumer.failure() == "internal"
    assert "ZeroDivisionError" in caplog.text


def open_sockets() -> int:
    links = [str(path) for path in Path("/proc/self/fd").iterdir()]
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)  # noqa: PTH114, PTH115


def test_close_leaves_no_socket_and_no_thread(world: World) -> None:
    num_sockets, num_threads = open_sockets(), threading.active_count()
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [1]), [1])
    world.close()
    assert (open_sockets(), threading.active_count()) == (num_sockets, num_threads)
