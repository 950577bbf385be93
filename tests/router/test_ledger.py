"""The ledger: a hold ends once, and nothing that is owed is forgotten."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fourhop.router.handoff.protocol import Handle
from fourhop.router.ledger import ASKED_LEASE_S, Hold, HoldState, Ledger
from fourhop.wire.worker import Lease, Leases


def handle(handle_id: str, expires_at_s: float) -> Handle:
    return Handle({}, handle_id, "epoch-1", expires_at_s)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of asking, issuing, ending and expiring keeps the books balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.holds: list[Hold] = []
        self.now_s = 0.0

    @rule()
    def ask(self) -> None:
        self.holds.append(self.ledger.ask(f"r{len(self.holds)}", "engine", "epoch-1", self.now_s))

    @rule(pick=st.randoms(use_true_random=False), lease_s=st.floats(0.1, 50))
    def issue(self, pick: Random, lease_s: float) -> None:
        asked = [hold for hold in self.holds if hold.state is HoldState.ASKED]
        if asked:
            hold = pick.choice(asked)
            self.ledger.issue(hold, handle(f"t-{hold.request_id}", self.now_s + lease_s), self.now_s)

    @rule(pick=st.randoms(use_true_random=False), state=st.sampled_from([HoldState.RELEASED, HoldState.EXPIRED]))
    def end(self, pick: Random, state: HoldState) -> None:
        if self.holds:
            self.ledger.end(pick.choice(self.holds), state)

    @rule(pick=st.randoms(use_true_random=False))
    def leave(self, pick: Random) -> None:
        if self.holds:
            pick.choice(self.holds).is_left = True

    @rule(pick=st.randoms(use_true_random=False))
    def renew(self, pick: Random) -> None:
        for hold in self.ledger.due(self.now_s):
            assert hold.is_owed and not hold.is_left and hold.ticket_id is not None
            if pick.random() < 0.5:
                self.ledger.renew(hold, {}, self.now_s)
                assert not hold.is_due(self.now_s)

    @rule()
    def restart(self) -> None:
        self.ledger.forget_old("engine", "epoch-2")
        assert all(hold.state is HoldState.ASKED and not hold.is_left for hold in self.ledger.owed.values())

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)
        assert all(hold.expires_at_s > self.now_s or not hold.is_left for hold in self.ledger.owed.values())

    @invariant()
    def every_hold_is_owed_or_ended_once(self) -> None:
        owed = [hold for hold in self.holds if hold.is_owed]
        assert list(self.ledger.owed.values()) == owed
        assert sum(self.ledger.ended.values()) == len(self.holds) - len(owed)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_a_pull_needs_a_ticket() -> None:
    ledger = Ledger()
    hold = ledger.ask("r", "engine", "epoch-1", 0.0)
    with pytest.raises(ValueError, match="asked to pulled"):
        ledger.end(hold, HoldState.PULLED)
    ledger.issue(hold, handle("t", 30.0), 0.0)
    assert hold.ids == ["t", "r"]
    ledger.end(hold, HoldState.PULLED)
    ledger.end(hold, HoldState.RELEASED)
    assert ledger.ended == {HoldState.PULLED: 1}
    with pytest.raises(ValueError, match="pulled to issued"):
        ledger.issue(hold, handle("t", 30.0), 0.0)


def test_a_hold_whose_ticket_was_never_seen_expires_too_once_nobody_wants_it() -> None:
    ledger = Ledger()
    hold = ledger.ask("r", "engine", "epoch-1", 0.0)
    ledger.expire(2 * ASKED_LEASE_S)
    assert len(ledger.owed) == 1
    hold.is_left = True
    ledger.expire(ASKED_LEASE_S - 1)
    assert len(ledger.owed) == 1
    ledger.expire(ASKED_LEASE_S)
    assert ledger.owed == {}


def test_a_lease_is_due_at_a_third_of_it_unless_an_engine_has_the_ticket() -> None:
    ledger = Ledger()
    hold = ledger.ask("r", "engine", "epoch-1", 0.0)
    ledger.issue(hold, handle("t", 30.0), 0.0)
    assert [ledger.due(now_s) for now_s in (0.0, 9.9, 10.1)] == [[], [], [hold]]
    ledger.renew(hold, {"again": True}, 10.1)
    assert hold.ticket == {"again": True}
    assert [ledger.due(now_s) for now_s in (20.0, 20.2)] == [[], [hold]]
    hold.is_taken = True
    assert ledger.due(29.0) == []


def test_strays_are_leases_of_ours_that_the_ledger_does_not_know() -> None:
    ledger = Ledger()
    ledger.ask("ours-1", "engine", "epoch-1", 0.0)
    listed = Leases(
        engine_id="engine",
        epoch="epoch-1",
        leases=[
            Lease(ticket_id=f"t-{name}", request_id=name, num_tokens=1, num_blocks=1, expires_in_s=None)
            for name in ("ours-1", "ours-2", "theirs-1", "")
        ],
    )
    assert [lease.ticket_id for lease in ledger.strays(listed, "ours-")] == ["t-ours-2"]
