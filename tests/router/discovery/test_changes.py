"""What follows for the fleet from which engines are wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakes.stub_engine import StubEngine
from fourhop.router.discovery.changes import Changes, changes, differing, is_gone
from fourhop.router.discovery.source import union
from fourhop.router.ledger import Ledger
from fourhop.router.policy import EngineRole
from fourhop.router.worker import Worker


def worker(name: str, role: EngineRole = "decode", *, leaves: bool = False) -> Worker:
    engine = StubEngine(name)
    return Worker(name, role, engine, engine, down=None, is_leaving=leaves)


def test_what_is_wanted_joins_and_what_is_not_leaves() -> None:
    there = [worker("a"), worker("b")]
    assert changes({"a": "decode", "c": "prefill"}, there) == Changes({"c": "prefill"}, ["b"], [])
    assert changes({}, there) == Changes({}, ["a", "b"], [])
    assert changes({"a": "decode", "b": "decode"}, there) == Changes()


def test_one_that_comes_back_while_it_leaves_stays() -> None:
    assert changes({"a": "decode"}, [worker("a", leaves=True)]) == Changes({}, [], ["a"])
    assert changes({}, [worker("a", leaves=True)]) == Changes()


def test_another_role_is_another_engine_once_the_first_is_gone() -> None:
    assert changes({"a": "prefill"}, [worker("a")]) == Changes({}, ["a"], [])
    assert changes({"a": "prefill"}, [worker("a", leaves=True)]) == Changes()
    assert changes({"a": "prefill"}, []) == Changes({"a": "prefill"}, [], [])


roles = st.sampled_from(["prefill", "decode"])
engines = st.dictionaries(st.sampled_from("abcdef"), roles)


@given(wanted=engines, there=engines, leaving=st.sets(st.sampled_from("abcdef")))
def test_followed_to_the_end_the_fleet_is_what_is_wanted(
    wanted: dict[str, EngineRole], there: dict[str, EngineRole], leaving: set[str]
) -> None:
    fleet = {name: worker(name, role, leaves=name in leaving) for name, role in there.items()}
    for _ in range(3):
        found = changes(wanted, fleet.values())
        for name in found.leaves:
            fleet[name].is_leaving = True
        for name in found.stays:
            fleet[name].is_leaving = False
        assert not set(found.joins) & set(fleet), "nothing joins while it is there"
        fleet |= {name: worker(name, role) for name, role in found.joins.items()}
        fleet = {name: one for name, one in fleet.items() if not one.is_leaving}
    assert {name: one.role for name, one in fleet.items()} == wanted


def test_an_engine_is_gone_when_nothing_refers_to_it() -> None:
    ledger, one = Ledger(), worker("a", leaves=True)
    assert is_gone(one, ledger.at("a"), 0.0)
    one.in_flight = 1
    assert not is_gone(one, ledger.at("a"), 0.0)
    one.in_flight = 0
    hold = ledger.ask("r", "a", "epoch", now_s=0.0)
    assert not is_gone(one, ledger.at("a"), hold.expires_at_s + 1), "an engine that is up tells of its holds itself"
    one.down = "it is dead"
    assert not is_gone(one, ledger.at("a"), hold.expires_at_s - 1)
    assert is_gone(one, ledger.at("a"), hold.expires_at_s)
    one.in_flight = 1
    assert not is_gone(one, ledger.at("a"), hold.expires_at_s)


def test_of_two_sources_the_first_is_right() -> None:
    answers = {"flags": {"a": "prefill"}, "file": {"a": "decode", "b": "decode"}, "dns": {"b": "decode"}}
    assert union(answers.values()) == {"a": "prefill", "b": "decode"}  # type: ignore[arg-type]
    assert differing(answers) == {"a": ["flags", "file"]}  # type: ignore[arg-type]
