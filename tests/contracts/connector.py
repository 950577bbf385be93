"""What every connector must do. A test module imports all of this and provides a `world` fixture of its connector."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.kv_world import LAYOUT, WAIT_S, Party, World, make_ticket, num_bytes
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import MAX_TAIL_BYTES, Progress, Pulled, PullFailed, Released
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
    consumer.connector.pull(ticket, target, [], skip)
    assert consumer.next_event() == Pulled(ticket.ticket_id, num_bytes(len(target)))
    assert producer.next_event() == Released(ticket.ticket_id)
    check_copied(producer, consumer, ticket.block_ids[0][skip:], target, before)


def test_blocks_arrive_in_place(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [3, 4, 5, 9]), [7, 0, 1, 2])
    assert producer.is_quiet()
    assert consumer.is_quiet()


def test_published_ticket_names_the_connector_and_its_address(world: World) -> None:
    producer = world.party()
    ticket = producer.publish("t", [1])
    assert ticket.connector == producer.connector.name
    assert ticket.host
    assert ticket.port > 0


def test_skipped_blocks_are_the_first_ones(world: World) -> None:
    """Case 65: of p0..p3 with two already there, p2 and p3 land in the two slots given."""
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [8, 9, 10, 11]), [2, 3], skip=2)


@pytest.mark.parametrize(("block_ids", "skip"), [([], 0), ([4, 5], 2)])
def test_nothing_to_copy_still_claims_and_releases(world: World, block_ids: list[int], skip: int) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", block_ids)
    pull(producer, consumer, ticket, [], skip)
    consumer.connector.pull(ticket, [], [], skip)
    assert consumer.failure() == "used"


def test_pools_may_differ_in_number_of_blocks(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2", replace(LAYOUT, num_blocks=5))
    pull(producer, consumer, producer.publish("t", [14, 15]), [0, 4])


def test_engine_can_pull_from_itself(world: World) -> None:
    both = world.party()
    both.connector.pull(both.publish("t", [1, 2]), [9, 8], [])
    assert {type(both.next_event()), type(both.next_event())} == {Pulled, Released}
    assert np.array_equal(both.pool.planes[:, [9, 8]], both.pool.planes[:, [1, 2]])


def test_caller_may_change_its_lists_after_the_call(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    source, target = [1, 2], [3, 4]
    ticket = producer.publish("t", source)
    source.clear()
    before = consumer.pool.planes.tobytes()
    consumer.connector.pull(ticket, target, [])
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
    consumer.connector.pull(ticket, [2], [])
    assert consumer.failure() == "used"
    assert producer.is_quiet()


def test_ticket_is_used_from_the_claim_on(world: World) -> None:
    """The first pull is still copying when the second one asks."""
    second_causes: list[str] = []

    def pull_again(step: str, ticket_id: str) -> None:
        if step == "claimed":
            rival.connector.pull(ticket, [2], [])
            second_causes.append(rival.failure())

    producer, rival = world.party(), world.party("epoch-3")
    consumer = world.party("epoch-2", conduct=Conduct(on_step=pull_again))
    ticket = producer.publish("t", [1])
    pull(producer, consumer, ticket, [1])
    assert second_causes == ["used"]


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        (Progress([1], []), "takes back"),
        (Progress([1, 3], []), "takes back"),
        (Progress([1, 2, 3, 4], []), "4 blocks, but 11 tokens take 3"),
        (Progress([1, 2], [], b"early"), "5 bytes at 2 of 3 blocks"),
        (Progress([1, 2, 3], [], bytes(MAX_TAIL_BYTES + 1)), "65537 bytes at 3 of 3 blocks"),
    ],
)
def test_progress_that_cannot_be_is_a_bug(world: World, progress: Progress, message: str) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.progress(make_ticket("t", [1, 2, 3], producer.epoch), 2)
    with pytest.raises(ValueError, match=message):
        producer.connector.publish(ticket, progress)
    producer.progress(ticket, 3, b"")
    pull(producer, consumer, ticket, [4, 5, 6])


def test_tail_may_not_change(world: World) -> None:
    producer = world.party()
    producer.publish("t", [1], b"one")
    producer.publish("t", [1], b"one")
    with pytest.raises(ValueError, match="takes back"):
        producer.publish("t", [1], b"two")


def test_progress_of_an_ended_ticket_is_ignored(world: World) -> None:
    """The engine has not yet heard that the consumer is done with it."""
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    pull(producer, consumer, ticket, [1])
    producer.progress(ticket, 1, b"")
    assert expect_refusal(consumer, ticket, [2]) == "used"


def expect_refusal(consumer: Party, ticket: KVTicket, target: list[int], skip: int = 0) -> str:
    """The cause of a pull that is refused; nothing may have been written."""
    before = consumer.pool.planes.tobytes()
    consumer.connector.pull(ticket, target, [], skip)
    cause = consumer.failure()
    assert consumer.pool.planes.tobytes() == before
    return cause


def test_unknown_ticket(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
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
    assert producer.is_quiet()
    pull(producer, consumer, ticket, [1, 2])


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
    consumer.connector.pull(producer.publish("t", [1]), [1], [])
    event = consumer.next_event()
    assert isinstance(event, PullFailed)
    assert event.cause == "layout"
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "itemsize"):
        assert (name in event.message) == (getattr(LAYOUT, name) != getattr(other, name))


def test_withdrawn_before_the_pull(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    producer.connector.release("t")
    producer.connector.release("t")
    assert expect_refusal(consumer, ticket, [1]) == "withdrawn"
    assert producer.is_quiet()


@pytest.mark.parametrize("moment", ["claimed", "ready", "copied"])
def test_withdrawn_during_the_pull(world: World, moment: str) -> None:
    """Case 67: the producer's blocks are recycled while the consumer reads, and it cannot go unnoticed."""

    def withdraw(step: str, ticket_id: str) -> None:
        if step == moment:
            producer.connector.release(ticket_id)
            producer.pool.planes[:] = 0

    producer = world.party()
    consumer = world.party("epoch-2", conduct=Conduct(on_step=withdraw))
    consumer.connector.pull(producer.publish("t", [1, 2]), [1, 2], [])
    assert consumer.failure() == "withdrawn"
    assert producer.is_quiet()


class Steps:
    """Stops a consumer's pulls at its steps: each `reached` step waits for its `go_on`, until `open` lets all pass."""

    def __init__(self) -> None:
        self.conduct = Conduct(on_step=self._wait, keep_alive_s=WAIT_S)
        self._reached: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._passes = threading.Semaphore(0)

    def reached(self, step: str) -> None:
        assert self._reached.get(timeout=WAIT_S) == step

    def go_on(self, num_steps: int = 1) -> None:
        self._passes.release(num_steps)

    def _wait(self, step: str, ticket_id: str) -> None:
        self._reached.put(step)
        assert self._passes.acquire(timeout=WAIT_S)


@dataclass
class Early:
    """A ticket of six blocks, of which the first two are ready, and a consumer that has them and waits for more."""

    producer: Party
    consumer: Party
    steps: Steps
    ticket: KVTicket
    before: bytes

    def finish(self) -> None:
        """Publish the rest; everything must be as if the ticket had been published whole."""
        self.producer.progress(self.ticket, 6, b"the tail")
        self.steps.go_on(9)
        assert self.consumer.next_event() == Pulled("t", num_bytes(6), b"the tail")
        assert self.producer.next_event() == Released("t")
        check_copied(self.producer, self.consumer, SOURCE, TARGET, self.before)


SOURCE, TARGET = [3, 4, 5, 9, 8, 7], [7, 0, 1, 2, 15, 14]


@pytest.fixture
def early(world: World) -> Early:
    steps = Steps()
    producer = world.party()
    consumer = world.party("epoch-2", conduct=steps.conduct)
    ticket = producer.progress(make_ticket("t", SOURCE, producer.epoch), 2)
    early = Early(producer, consumer, steps, ticket, consumer.pool.planes.tobytes())
    consumer.connector.pull(ticket, TARGET, [])
    steps.reached("claimed")
    steps.go_on()
    steps.reached("ready")
    return early


def test_blocks_are_copied_as_they_become_ready(early: Early) -> None:
    """At each "ready", everything announced before is in place, and nothing else was touched."""
    early.producer.progress(early.ticket, 3)
    early.steps.go_on()
    early.steps.reached("ready")
    check_copied(early.producer, early.consumer, SOURCE[:2], TARGET[:2], early.before)
    early.producer.progress(early.ticket, 4)
    early.producer.progress(early.ticket, 5)
    early.steps.go_on()
    early.steps.reached("ready")
    check_copied(early.producer, early.consumer, SOURCE[:3], TARGET[:3], early.before)
    early.finish()


def test_consumer_that_is_behind_is_told_all_progress_at_once(early: Early) -> None:
    for num_ready in (3, 4, 5):
        early.producer.progress(early.ticket, num_ready)
    early.steps.go_on()
    early.steps.reached("ready")
    early.producer.progress(early.ticket, 6, b"the tail")
    early.steps.go_on()
    early.steps.reached("ready")
    check_copied(early.producer, early.consumer, SOURCE[:5], TARGET[:5], early.before)
    early.steps.go_on()
    early.steps.reached("copied")
    early.finish()


def test_tail_may_come_after_the_last_block(early: Early) -> None:
    early.producer.progress(early.ticket, 6)
    early.steps.go_on()
    early.steps.reached("ready")
    early.finish()


def test_ticket_without_a_ready_block_can_be_claimed(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.progress(make_ticket("t", [3, 4], producer.epoch), 0)
    consumer.connector.pull(ticket, [1], [], 1)
    assert producer.next_renewal() == "t"
    producer.progress(ticket, 1)
    producer.progress(ticket, 2, b"tail")
    assert consumer.next_event() == Pulled("t", num_bytes(1), b"tail")
    assert producer.next_event() == Released("t")
    assert np.array_equal(consumer.pool.planes[:, 1], producer.pool.planes[:, 4])


@pytest.mark.parametrize("skip", [0, 2])
def test_empty_pull_waits_for_the_tail(world: World, skip: int) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.progress(make_ticket("t", [4, 5][:skip], producer.epoch), 0)
    consumer.connector.pull(ticket, [], [], skip)
    assert producer.next_renewal() == "t"
    assert consumer.is_quiet()
    producer.progress(ticket, skip, b"tail")
    assert consumer.next_event() == Pulled("t", 0, b"tail")
    assert producer.next_event() == Released("t")


def test_withdrawn_while_the_pull_waits(early: Early) -> None:
    early.steps.go_on()
    early.producer.connector.release("t")
    assert early.consumer.failure() == "withdrawn"
    assert early.producer.is_quiet()


def test_producer_closed_while_the_pull_waits(early: Early) -> None:
    early.steps.go_on()
    early.producer.connector.close()
    assert early.consumer.failure() == "unreachable"
    assert early.producer.is_quiet()


def test_consumer_closed_while_the_pull_waits(early: Early) -> None:
    early.steps.go_on()
    early.consumer.connector.close()
    assert early.consumer.failure() == "unreachable"


@pytest.mark.parametrize("when", ["copying", "waiting"])
def test_pull_given_up(early: Early, when: str) -> None:
    """Nothing is written after the event, and the producer has its blocks back at once."""
    if when == "waiting":
        early.steps.go_on()
    early.consumer.connector.release("t")
    early.steps.go_on()
    assert early.consumer.failure() == "cancelled"
    assert early.producer.next_event() == Released("t")
    after = early.consumer.pool.planes.tobytes()
    early.producer.progress(early.ticket, 6, b"")
    assert early.consumer.is_quiet()
    assert early.producer.is_quiet()
    assert expect_refusal(early.consumer, early.ticket, TARGET) == "used"
    assert early.consumer.pool.planes.tobytes() == after


def test_pull_given_up_before_it_began(world: World) -> None:
    """The producer is told even though no worker ever took the pull."""
    steps = Steps()
    producer = world.party()
    consumer = world.party("epoch-2", conduct=replace(steps.conduct, num_workers=1))
    consumer.connector.pull(producer.publish("first", [1]), [1], [])
    steps.reached("claimed")
    consumer.connector.pull(producer.publish("second", [2]), [2], [])
    consumer.connector.release("second")
    assert consumer.failure() == "cancelled"
    assert producer.next_event() == Released("second")
    steps.go_on(3)
    assert consumer.next_event() == Pulled("first", num_bytes(1))
    assert producer.next_event() == Released("first")


def test_giving_up_a_finished_pull_is_ignored(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [1]), [1])
    consumer.connector.release("t")
    assert consumer.is_quiet()
    assert producer.is_quiet()


@dataclass
class Clock:
    """Seconds that pass when a pull says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_waiting_pull_is_kept_alive(world: World) -> None:
    """Far longer than its timeout, because the producer speaks; and the producer is told to keep the blocks."""
    clock, num_waits = Clock(), 5

    def let_time_pass(step: str, ticket_id: str) -> None:
        clock.now_s += 0.6 * ConnectorOptions().pull_timeout_s
        waits.put(step)

    waits: queue.SimpleQueue[str] = queue.SimpleQueue()
    producer = world.party(conduct=Conduct(keep_alive_s=0.001))
    consumer = world.party("epoch-2", conduct=Conduct(let_time_pass, clock, keep_alive_s=0.001))
    ticket = producer.progress(make_ticket("t", [1], producer.epoch), 0)
    consumer.connector.pull(ticket, [1], [])
    for _ in range(num_waits):
        assert waits.get(timeout=WAIT_S) in ("claimed", "ready")
        assert producer.next_renewal() == "t"
    producer.progress(ticket, 1, b"")
    assert consumer.next_event() == Pulled("t", num_bytes(1))
    assert producer.next_event() == Released("t")
    assert clock.now_s > 2 * ConnectorOptions().pull_timeout_s


def test_pulls_that_wait_delay_no_other(world: World) -> None:
    """200 wait for blocks while another one goes through; then all end, in whatever order they become ready."""
    num_waiting = 200
    layout = replace(LAYOUT, num_blocks=num_waiting + 1)
    producer, consumer = world.party(layout=layout), world.party("epoch-2", layout)
    tickets = [
        producer.progress(make_ticket(f"t{number}", [number], producer.epoch), 0) for number in range(num_waiting)
    ]
    for number, ticket in enumerate(tickets):
        consumer.connector.pull(ticket, [number], [])
    claimed: set[str] = set()
    while len(claimed) < num_waiting:
        claimed.add(producer.next_renewal())
    pull(producer, consumer, producer.publish("ready", [num_waiting]), [num_waiting])
    for ticket in reversed(tickets):
        producer.progress(ticket, 1, ticket.ticket_id.encode())
    pulled = {consumer.next_event() for _ in tickets}
    assert pulled == {Pulled(ticket.ticket_id, num_bytes(1), ticket.ticket_id.encode()) for ticket in tickets}
    assert np.array_equal(consumer.pool.planes, producer.pool.planes)


def test_renew_tells_the_producer(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    consumer.connector.renew(ticket)
    assert producer.next_renewal() == "t"
    pull(producer, consumer, ticket, [1])


def test_renew_of_what_is_gone_is_silent(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    standing, ended = producer.publish("standing", [1]), producer.publish("ended", [2])
    producer.connector.release("ended")
    consumer.connector.renew(ended)
    consumer.connector.renew(msgspec.structs.replace(standing, epoch="before"))
    consumer.connector.renew(msgspec.structs.replace(standing, ticket_id="never published"))
    pull(producer, consumer, standing, [1])
    producer.connector.close()
    consumer.connector.renew(standing)
    consumer.connector.close()
    consumer.connector.renew(standing)
    assert consumer.is_quiet()
    assert "ended" not in producer.renewed


def test_release_after_the_pull_is_ignored(world: World) -> None:
    """Case 67: the completion came just before the abort."""
    producer, consumer = world.party(), world.party("epoch-2")
    pull(producer, consumer, producer.publish("t", [1]), [1])
    producer.connector.release("t")
    producer.connector.release("never published")
    assert producer.is_quiet()


def test_producer_closed_before_the_pull(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    producer.connector.close()
    assert expect_refusal(consumer, ticket, [1]) == "unreachable"


@pytest.mark.parametrize("moment", ["claimed", "ready", "copied"])
def test_producer_closed_during_the_pull(world: World, moment: str) -> None:
    def close(step: str, ticket_id: str) -> None:
        if step == moment:
            producer.connector.close()

    producer = world.party()
    consumer = world.party("epoch-2", conduct=Conduct(on_step=close))
    consumer.connector.pull(producer.publish("t", [1]), [1], [])
    assert consumer.failure() == "unreachable"
    assert producer.is_quiet()


def test_peer_restarted_at_the_same_port(world: World) -> None:
    """Case 70: tickets of the old life fail by name; those of the new one work at once."""
    consumer = world.party("epoch-2")
    old = world.party("life-1")
    spent, stale = old.publish("a", [1]), old.publish("b", [1])
    pull(old, consumer, spent, [1])
    old.connector.close()
    old.pool.close()
    new = world.party("life-2", options=ConnectorOptions(port=stale.port))
    fresh = new.publish("b", [5])
    assert expect_refusal(consumer, stale, [1]) == "epoch"
    pull(new, consumer, fresh, [1])


def test_many_pulls_at_once(world: World) -> None:
    layout = replace(LAYOUT, num_blocks=120)
    producer, consumer = world.party(layout=layout), world.party("epoch-2", layout)
    names = [f"t{number}" for number in range(40)]
    tickets = [producer.publish(name, [3 * n, 3 * n + 1, 3 * n + 2]) for n, name in enumerate(names)]
    for n, ticket in enumerate(tickets):
        consumer.connector.pull(ticket, [119 - 3 * n, 118 - 3 * n, 117 - 3 * n], [])
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
        consumer.connector.pull(ticket, [block_id], [])
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
        consumer.connector.pull(producer.publish(f"t{number}", [1]), [1], [])
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
    consumer.connector.pull(producer.publish("t", [1]), [1], [])
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
