"""What is written of a prompt's ids is the same, whether it is kept or written anew."""

from __future__ import annotations

import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fourhop.tokens.dialect import GENERATE
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.prompt import TOKEN_BYTES, Prompt, encoded, packed
from fourhop.wire.ticket import hash_tokens

IDS = st.lists(st.integers(0, 2**62), max_size=20)


@given(IDS)
def test_a_prompt_is_written_as_its_list_is(ids: list[int]) -> None:
    prompt = Prompt(ids)
    for _ in range(2):
        assert packed(prompt) == packed(ids) == b"".join(struct.pack("<q", one) for one in ids)
        assert bytes(encoded(prompt)) == bytes(encoded(ids)) == msgspec.json.encode(ids)
        assert hash_tokens(prompt) == hash_tokens(ids)
    assert len(packed(prompt)) == TOKEN_BYTES * len(prompt)


def test_it_is_written_once() -> None:
    prompt = Prompt([1, 2, 3])
    assert packed(prompt) is packed(prompt) and encoded(prompt) is encoded(prompt)


@given(IDS)
def test_a_request_is_sent_as_it_was(ids: list[int]) -> None:
    request = GenerateRequest(token_ids=ids, sampling_params=SamplingParams(max_tokens=3), request_id="é")
    body = msgspec.json.encode(request)
    assert GENERATE.encode(request) == body
    assert GENERATE.encode(msgspec.structs.replace(request, token_ids=Prompt(ids))) == body
