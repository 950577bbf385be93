"""What every connector must do with tickets that are pulled while they grow, given up or renewed.

A test module imports all of this and provides a `world` fixture of its connector.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from contracts.connector import check_copied, expect_refusal, pull
from fakes.kv_world import LAYOUT, WAIT_S, Party, World, make_ticket, num_bytes
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import MAX_TAIL_BYTES, Progress, Pulled, Released
from fourhop.kv.pulls import Conduct
from fourhop.wire.ticket import KVTicket


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


def test_progress_of_an_ended_ticket_is_ignored(world: World) -> None:
    """The engine has not yet heard that the consumer is done with it."""
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.publish("t", [1])
    pull(producer, consumer, ticket, [1])
    producer.progress(ticket, 1, b"")
    assert expect_refusal(consumer, ticket, [2]) == "used"


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
    consumer.pull(ticket, TARGET)
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


def test_tail_may_come_after_the_last_block(early: Early) -> None:
    early.producer.progress(early.ticket, 6)
    early.steps.go_on()
    early.steps.reached("ready")
    early.finish()


def test_ticket_without_a_ready_block_can_be_claimed(world: World) -> None:
    producer, consumer = world.party(), world.party("epoch-2")
    ticket = producer.progress(make_ticket("t", [3, 4], producer.epoch), 0)
    consumer.pull(ticket, [1], 1)
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
    consumer.pull(ticket, [], skip)
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
    first = producer.progress(make_ticket("first", [1], producer.epoch), 0)
    consumer.pull(first, [1])
    steps.reached("claimed")
    consumer.pull(producer.publish("second", [2]), [2])
    consumer.connector.release("second")
    assert consumer.failure() == "cancelled"
    assert producer.next_event() == Released("second")
    producer.progress(first, 1, b"")
    steps.go_on(9)
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
    consumer.pull(ticket, [1])
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
        consumer.pull(ticket, [number])
    claimed: set[str] = set()
    while len(claimed) < num_waiting:
        claimed.add(producer.next_renewal())
    pull(producer, consumer, producer.publish("ready", [num_waiting]), [num_waiting])
    for ticket in reversed(tickets):
        producer.progress(ticket, 1, ticket.ticket_id.encode())
    pulled = {consumer.next_event() for _ in tickets}
    assert pulled == {Pulled(ticket.ticket_id, num_bytes(1), ticket.ticket_id.encode()) for ticket in tickets}
    assert np.array_equal(consumer.pool.planes, producer.pool.planes)
