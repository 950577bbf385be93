"""Tickets: what travels, what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourhop.wire.errors import ClientError, TransferError
from fourhop.wire.ticket import FirstToken, HoldRequest, KVTicket, hash_tokens, parse_transfer_params, sign, verify

TOKENS = [5, 6, 7]


def make_ticket(**changes: Any) -> KVTicket:
    ticket = KVTicket(
        ticket_id="t",
        connector="shm",
        epoch="e",
        fingerprint="f",
        token_hash=hash_tokens(TOKENS),
        expires_at_s=100.0,
        engine_id="p",
        request_id="r",
        host="127.0.0.1",
        port=1,
        num_tokens=3,
        block_ids=[[4]],
        first_token=FirstToken(8),
    )
    return msgspec.structs.replace(ticket, **changes)


def check(ticket: KVTicket, **changes: Any) -> None:
    facts: dict[str, Any] = {"fingerprint": "f", "token_ids": [*TOKENS, 9], "now_s": 50.0}
    verify(ticket, **(facts | changes))


def test_a_ticket_travels_under_vllm_names_and_comes_back() -> None:
    params = msgspec.json.decode(msgspec.json.encode(make_ticket()))
    assert params["remote_num_tokens"] == 3
    assert params["do_remote_prefill"] is True
    assert parse_transfer_params(params) == make_ticket()


@pytest.mark.parametrize(
    ("params", "parsed"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": False, "remote_host": None}, None),
        ({"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}, HoldRequest()),
    ],
)
def test_requests_to_hold(params: dict[str, Any] | None, parsed: HoldRequest | None) -> None:
    assert parse_transfer_params(params) == parsed


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"remote_port": "x"}, "kv_transfer_params.remote_port"),
        ({"surprise": 1}, "kv_transfer_params"),
        ({"remote_block_ids": [1]}, "kv_transfer_params.remote_block_ids[0]"),
    ],
)
def test_a_malformed_ticket_is_refused_by_path(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ClientError) as caught:
        parse_transfer_params(msgspec.to_builtins(make_ticket()) | change)
    assert caught.value.param == param


def test_a_good_ticket_verifies() -> None:
    check(make_ticket())
    check(sign(make_ticket(), "key"), secret="key")
    check(sign(make_ticket(), "key"))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"expires_at_s": 50.0}, "expired"),
        ({"fingerprint": "g"}, "fingerprint"),
        ({"num_tokens": 0}, "token_count"),
        ({"num_tokens": 5}, "token_count"),
        ({"num_tokens": 2}, "token_hash"),
        ({"token_hash": hash_tokens([5, 6, 8])}, "token_hash"),
    ],
)
def test_a_mismatch_is_named(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(TransferError) as caught:
        check(make_ticket(**change))
    assert caught.value.cause == cause


@pytest.mark.parametrize(
    "forged",
    [
        make_ticket(),
        sign(make_ticket(), "another key"),
        msgspec.structs.replace(sign(make_ticket(), "key"), host="203.0.113.9"),
        msgspec.structs.replace(sign(make_ticket(), "key"), expires_at_s=1e9),
        msgspec.structs.replace(sign(make_ticket(), "key"), first_token=FirstToken(1)),
    ],
)
def test_with_a_secret_only_its_signature_counts(forged: KVTicket) -> None:
    with pytest.raises(TransferError) as caught:
        check(forged, secret="key")
    assert caught.value.cause == "signature"


@given(st.lists(st.integers(0, 2**40), max_size=20), st.lists(st.integers(0, 2**40), max_size=20))
def test_hashes_tell_token_lists_apart(left: list[int], right: list[int]) -> None:
    assert (hash_tokens(left) == hash_tokens(right)) == (left == right)
