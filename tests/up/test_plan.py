"""What `up` decides before it starts anything."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.kv.config import KVTransferConfig
from fourhop.up.plan import UpConfig, backoff_s, engines_per_core, flags_of, plan_engines, share_cores


def test_each_engine_gets_a_command_that_a_user_could_type() -> None:
    config = UpConfig(prefill=1, decode=2, connector="tcp")
    plans = plan_engines(config, "m", ports=[81, 82, 83], cores=[0, 1, 2, 3], flags=["--block-size", "8"])
    assert [(plan.name, plan.role, plan.url, plan.cores) for plan in plans] == [
        ("prefill-0", "prefill", "http://127.0.0.1:81", (1,)),
        ("decode-0", "decode", "http://127.0.0.1:82", (2,)),
        ("decode-1", "decode", "http://127.0.0.1:83", (3,)),
    ]
    assert engines_per_core(plans) == 1
    *head, transfer, flag, value = plans[0].arguments
    assert head == ["engine", "m", "--port", "81", "--kv-transfer-config"]
    assert (flag, value) == ("--block-size", "8")
    decoded = msgspec.json.decode(transfer, type=KVTransferConfig)
    assert (decoded.kv_connector, decoded.kv_role) == ("tcp", "kv_producer")
    assert msgspec.json.decode(plans[1].arguments[5], type=KVTransferConfig).kv_role == "kv_consumer"


@given(st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True), st.integers(1, 9), st.integers(1, 4))
def test_cores_are_shared_only_when_there_are_too_few(cores: list[int], num_engines: int, each: int) -> None:
    shares = share_cores(cores, num_engines, each)
    assert len(shares) == num_engines
    assert all(set(share) <= set(cores) and len(share) == min(each, len(cores)) for share in shares)
    if num_engines * each <= len(cores):
        taken = [core for share in shares for core in share]
        assert len(set(taken)) == len(taken)
        assert taken == cores[-len(taken) :]
    else:
        # Too few cores: engines take turns, and no group of cores has two more engines than another.
        counts = [shares.count(share) for share in set(shares)]
        assert max(counts) - min(counts) <= 1


def test_without_prefill_engines_each_engine_does_whole_requests() -> None:
    plans = plan_engines(UpConfig(prefill=0, decode=2), "m", ports=[81, 82], cores=[0, 1], flags=["--block-size", "8"])
    assert [(plan.name, plan.role, plan.cores) for plan in plans] == [
        ("engine-0", "decode", (0,)),
        ("engine-1", "decode", (1,)),
    ]
    assert plans[0].arguments == ("engine", "m", "--port", "81", "--block-size", "8")


@pytest.mark.parametrize("wrong", [{"prefill": -1}, {"decode": 0}, {"cores_per_engine": 0}])
def test_a_plan_without_engines_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        UpConfig(**wrong)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Flags:
    size: int = 3
    limit: int | None = None
    cache: bool = True
    names: tuple[str, ...] = ()


def test_flags_are_those_that_differ_from_the_default() -> None:
    assert flags_of(Flags()) == []
    given = Flags(size=4, limit=0, cache=False, names=("a", "b"))
    assert flags_of(given) == ["--size", "4", "--limit", "0", "--no-cache", "--names", "a", "--names", "b"]


def test_pauses_grow_and_stay_bounded() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 7, 1000)] == [0.5, 1.0, 2.0, 30.0, 30.0]
