"""`fourhop check transfer`: what it measures between two engines, what it refuses, and what it advises."""

from __future__ import annotations

import asyncio

import pytest

from fakes.engines import toy_engine
from fakes.serving import serving
from fourhop.check import CheckConfig, Sample, check_transfer, verdict
from fourhop.engine.app import create
from fourhop.kv.config import KVTransferConfig
from fourhop.service import ServerConfig
from fourhop.wire.errors import StartError

SHM, TCP = KVTransferConfig("shm"), KVTransferConfig("tcp")
QUICK = CheckConfig(lengths=(5, 64, 10_000), repeats=1)


async def run(
    prefill: KVTransferConfig | None, decode: KVTransferConfig | None, fingerprint: str = "toy", key: str | None = None
) -> None:
    async with (
        toy_engine(transfer=prefill) as left,
        toy_engine(transfer=decode, fingerprint=fingerprint) as right,
        serving(create(left, ServerConfig())) as a,
        serving(create(right, ServerConfig(api_key=() if key is None else (key,)))) as b,
    ):
        await check_transfer(a, b, QUICK)


@pytest.mark.parametrize("transfer", [SHM, TCP])
def test_it_prints_a_row_for_each_length_that_fits(
    transfer: KVTransferConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(run(transfer, transfer))
    printed = capsys.readouterr().out
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert rows == ["5", "64"]
    assert f"over {transfer.kv_connector}" in printed


@pytest.mark.parametrize(
    ("prefill", "decode", "fingerprint", "reason"),
    [
        (None, SHM, "toy", "need a KV connector"),
        (SHM, TCP, "toy", "different connectors: shm and tcp"),
        (SHM, SHM, "another", "weights, dtype or block size differ"),
    ],
)
def test_a_pair_that_cannot_hand_over_is_refused(
    prefill: KVTransferConfig | None, decode: KVTransferConfig | None, fingerprint: str, reason: str
) -> None:
    with pytest.raises(StartError, match=reason):
        asyncio.run(run(prefill, decode, fingerprint))


def test_an_engine_that_needs_a_key_and_one_that_is_not_there_are_one_line_each() -> None:
    with pytest.raises(StartError, match=r"^http://127\.0\.0\.1:\d+ needs another key: --api-key$"):
        asyncio.run(run(SHM, SHM, key="right"))
    with pytest.raises(StartError, match=r"^cannot connect to http://127\.0\.0\.1:1: Connect"):
        asyncio.run(check_transfer("http://127.0.0.1:1", "http://127.0.0.1:2", QUICK))


@pytest.mark.parametrize(
    ("transfer_s", "handover_s", "expected"),
    [(0.03, 0.035, "Good"), (0.5, 0.6, "Slow: 500 ms for 2048 tokens"), (0.02, 0.4, "95% of the hand-over")],
)
def test_the_verdict(transfer_s: float, handover_s: float, expected: str) -> None:
    assert expected in verdict(Sample(2048, 94_000_000, transfer_s, handover_s), "tcp")
