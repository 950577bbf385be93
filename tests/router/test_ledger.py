"""The ledger: a hold ends once, and nothing that is owed is forgotten."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fourhop.router.ledger import ASKED_LEASE_S, Hold, HoldState, Ledger


class LedgerMachine(RuleBasedStateMachine):
    """Any order of asking, issuing, ending and expiring keeps the books balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.holds: list[Hold] = []
        self.now_s = 0.0

    @rule()
    def ask(self) -> None:
        self.holds.append(self.ledger.ask(f"r{len(self.holds)}", "engine", self.now_s))

    @rule(pick=st.randoms(use_true_random=False), lease_s=st.floats(0.1, 50))
    def issue(self, pick: Random, lease_s: float) -> None:
        asked = [hold for hold in self.holds if hold.state is HoldState.ASKED]
        if asked:
            hold = pick.choice(asked)
            self.ledger.issue(hold, f"t-{hold.request_id}", self.now_s + lease_s)

    @rule(pick=st.randoms(use_true_random=False), state=st.sampled_from([HoldState.RELEASED, HoldState.EXPIRED]))
    def end(self, pick: Random, state: HoldState) -> None:
        if self.holds:
            self.ledger.end(pick.choice(self.holds), state)

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)

    @invariant()
    def every_hold_is_owed_or_ended_once(self) -> None:
        owed = [hold for hold in self.holds if hold.is_owed]
        assert list(self.ledger.owed.values()) == owed
        assert sum(self.ledger.ended.values()) == len(self.holds) - len(owed)
        assert all(hold.expires_at_s > self.now_s for hold in owed) or self.now_s == 0.0


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_a_pull_needs_a_ticket() -> None:
    ledger = Ledger()
    hold = ledger.ask("r", "engine", 0.0)
    with pytest.raises(ValueError, match="asked to pulled"):
        ledger.end(hold, HoldState.PULLED)
    ledger.issue(hold, "t", 30.0)
    assert hold.ids == ["t", "r"]
    ledger.end(hold, HoldState.PULLED)
    ledger.end(hold, HoldState.RELEASED)
    assert ledger.ended == {HoldState.PULLED: 1}
    with pytest.raises(ValueError, match="pulled to issued"):
        ledger.issue(hold, "t", 30.0)


def test_a_hold_whose_ticket_was_never_seen_expires_too() -> None:
    ledger = Ledger()
    ledger.ask("r", "engine", 0.0)
    ledger.expire(ASKED_LEASE_S - 1)
    assert len(ledger.owed) == 1
    ledger.expire(ASKED_LEASE_S)
    assert ledger.owed == {}
