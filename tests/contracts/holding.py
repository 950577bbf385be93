"""What connectors must do whose consumers read the producer's own blocks: those are held until the consumer is done.

A test module imports all of this and provides a `world` fixture of its connector.
"""

from __future__ import annotations

import msgspec
import pytest

from contracts.connector import check_copied, expect_refusal, pull
from contracts.progress import SOURCE, TARGET, Early
from fakes.kv_world import World
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.pulls import Conduct


def test_published_ticket_names_the_connector_and_its_address(world: World) -> None:
    producer = world.party()
    ticket = producer.publish("t", [1])
    assert ticket.connector == producer.connector.name
    assert ticket.host
    assert ticket.port > 0


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
    consumer.pull(producer.publish("t", [1, 2]), [1, 2])
    assert consumer.failure() == "withdrawn"
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
    consumer.pull(producer.publish("t", [1]), [1])
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


def test_tail_may_not_change(world: World) -> None:
    producer = world.party()
    producer.publish("t", [1], b"one")
    producer.publish("t", [1], b"one")
    with pytest.raises(ValueError, match="takes back"):
        producer.publish("t", [1], b"two")


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
