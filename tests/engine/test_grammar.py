"""Outputs under a grammar: always of its language, wherever the engine stopped and went on."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fakes.models import write_tiny_checkpoint
from fakes.toy import BOS, END_THINK, EOS, THINK, TOOL_CALL, VOCAB_SIZE, write_toy_checkpoint
from fourhop.engine.config import EngineConfig
from fourhop.engine.grammar import Constraint, Grammars
from fourhop.engine.open import open_engine
from fourhop.engine.server import Engine
from fourhop.kv.config import KVTransferConfig
from fourhop.tokens.limits import Limits, check_request
from fourhop.tokens.server import collect
from fourhop.wire.errors import ClientError
from fourhop.wire.generate import GenerateRequest, GenerateResponse, SamplingParams
from fourhop.wire.structure import GrammarStart

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}, "kind": {"enum": ["é", "b"]}},
    "required": ["name", "ok", "kind"],
    "additionalProperties": False,
}
NARROW: dict[str, Any] = {"json": SCHEMA, "disable_any_whitespace": True}
LIMITS = Limits(vocab_size=VOCAB_SIZE, max_model_len=2048, max_num_choices=8, max_logprobs=20)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = write_toy_checkpoint(tmp_path_factory.mktemp("toy"))
    return Grammars(folder, VOCAB_SIZE, frozenset({EOS}))


def make_request(structure: dict[str, Any], *, start: GrammarStart | None = None, **params: Any) -> GenerateRequest:
    fields = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "structured_outputs": structure, **params}
    return GenerateRequest(
        request_id="r",
        token_ids=[BOS, *b"prompt"],
        sampling_params=msgspec.convert(fields, SamplingParams),
        grammar_start=start,
    )


def begin(grammars: Grammars, structure: dict[str, Any], start: GrammarStart | None = None) -> Constraint:
    constraint = grammars.constraint(make_request(structure, start=start))
    assert constraint is not None
    return constraint


def ids(constraint: Constraint, output: list[int]) -> set[int] | None:
    mask = constraint.allowed(output)
    return None if mask is None else set(np.flatnonzero(mask).tolist())


def walk(constraint: Constraint, seed: int) -> str:
    """A random output of the grammar, ended by EOS."""
    source, output = random.Random(seed), list[int]()
    while EOS not in output:
        allowed = ids(constraint, output)
        assert allowed, bytes(output)
        output.append(EOS if EOS in allowed else source.choice(sorted(allowed)))
    return bytes(output[:-1]).decode()


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "ok", "kind"] and len(value["name"]) <= 5 and value["kind"] in ("é", "b")


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_stay_in_the_language(grammars: Grammars, seed: int) -> None:
    assert is_of_schema(walk(begin(grammars, NARROW), seed))
    assert is_of_schema(walk(begin(grammars, {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}), seed))
    assert re.fullmatch(r"[ab]{2,4}!?", walk(begin(grammars, {"regex": "[ab]{2,4}!?"}), seed))
    assert walk(begin(grammars, {"choice": ['yes "1"', "nö", "n/a\n"]}), seed) in ('yes "1"', "nö", "n/a\n")
    assert re.fullmatch(r"x+y", walk(begin(grammars, {"grammar": 'root ::= "x" root | "xy"'}), seed))
    assert re.fullmatch(r"x+y", walk(begin(grammars, {"grammar": 'start: "x" start | "xy"'}), seed))
    assert ids(begin(grammars, {"json_object": True}), []) == {ord("{")}


def test_a_complete_structure_allows_the_end_only(grammars: Grammars) -> None:
    assert ids(begin(grammars, {"regex": "ab"}), [*b"ab"]) == {EOS}


def test_state_follows_from_the_output(grammars: Grammars) -> None:
    """As after a preemption or on another engine: token by token, or all that came before at once."""
    output = [*b'{"name":"a","ok":']
    stepwise, moved = begin(grammars, NARROW), begin(grammars, NARROW)
    for size in range(len(output)):
        stepwise.allowed(output[:size])
    assert ids(stepwise, output) == ids(moved, output) == {ord("t"), ord("f")}
    assert ids(stepwise, output) == {ord("t"), ord("f")}


def test_nothing_is_asked_while_thinking_goes_on(grammars: Grammars) -> None:
    inside = begin(grammars, {"regex": "ab"}, GrammarStart(closing_token_ids=[END_THINK]))
    assert ids(inside, [*b"hm"]) is None
    assert ids(inside, [*b"hm", END_THINK]) == {ord("a")}
    assert ids(inside, [*b"hm", END_THINK, ord("a")]) == {ord("b")}


def test_several_tokens_may_end_thinking_together(grammars: Grammars) -> None:
    constraint = begin(grammars, {"regex": "ab"}, GrammarStart(closing_token_ids=[1, 2, 3]))
    assert ids(constraint, [1, 2, 1, 2, 1]) is None
    assert ids(constraint, [1, 2, 1, 2, 1, 2, 3]) == {ord("a")}


def test_thinking_may_be_opened_once(grammars: Grammars) -> None:
    start = GrammarStart(opening_token_id=THINK, closing_token_ids=[END_THINK])
    at_once, thinks = begin(grammars, {"regex": "ab"}, start), begin(grammars, {"regex": "ab"}, start)
    assert ids(at_once, []) == {ord("a"), THINK}
    assert ids(at_once, [ord("a")]) == {ord("b")}
    assert ids(thinks, [THINK]) is None
    assert ids(thinks, [THINK, 1, END_THINK]) == {ord("a")}


def test_a_call_may_stand_where_the_grammar_begins(grammars: Grammars) -> None:
    start = GrammarStart(free_token_ids=[TOOL_CALL])
    constraint = begin(grammars, {"regex": "ab"}, start)
    assert ids(constraint, []) == {ord("a"), TOOL_CALL}
    assert ids(constraint, [TOOL_CALL]) is None
    assert ids(constraint, [TOOL_CALL, 1, 2]) is None
    assert TOOL_CALL not in (ids(begin(grammars, {"regex": "ab"}, start), [ord("a")]) or ())


@pytest.mark.parametrize(
    ("structure", "field"),
    [
        ({"json": {"type": "nothing"}}, "json"),
        ({"json": {"not": {"type": "string"}}}, "json"),
        ({"json": {"$ref": "#/nowhere"}}, "json"),
        ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "json"),
        ({"regex": "["}, "regex"),
        ({"grammar": 'start: "a" b'}, "grammar"),
        ({"grammar": "no grammar"}, "grammar"),
        ({"grammar": ""}, "grammar"),
    ],
)
def test_a_grammar_that_is_none_is_refused_by_path(grammars: Grammars, structure: dict[str, Any], field: str) -> None:
    with pytest.raises(ClientError) as refusal:
        grammars.constraint(make_request(structure))
    assert refusal.value.param == f"sampling_params.structured_outputs.{field}"
    assert refusal.value.message.startswith(f"sampling_params.structured_outputs.{field}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"jsons": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
def test_what_a_grammar_excludes_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ClientError) as refusal:
        check_request(make_request({}, **fields), LIMITS)
    assert refusal.value.param == f"sampling_params.{param}"


@pytest.mark.parametrize(
    ("start", "param"),
    [
        (GrammarStart(closing_token_ids=[VOCAB_SIZE]), "grammar_start.closing_token_ids[0]"),
        (GrammarStart(free_token_ids=[1, -1]), "grammar_start.free_token_ids[1]"),
        (GrammarStart(opening_token_id=-1, closing_token_ids=[1]), "grammar_start.opening_token_id"),
        (GrammarStart(opening_token_id=1), "grammar_start.closing_token_ids"),
    ],
)
def test_marks_must_be_tokens(start: GrammarStart, param: str) -> None:
    with pytest.raises(ClientError) as refusal:
        check_request(make_request({"regex": "a"}, start=start), LIMITS)
    assert refusal.value.param == param


# The engine


CONFIG = EngineConfig(block_size=8, num_blocks=256, num_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


async def whole(engine: Engine, request: GenerateRequest) -> GenerateResponse:
    return await collect(engine.generate(request), model=None, created=0)


async def answer(engine: Engine, request: GenerateRequest) -> list[int]:
    choice = (await whole(engine, request)).choices[0]
    assert choice.finish_reason == "stop" and choice.token_ids[-1] == EOS
    return choice.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_has_its_structure_whatever_its_neighbours(model: Path, temperature: float) -> None:
    async def main() -> None:
        async with open_engine(CONFIG, model, name="llama") as engine:
            request = make_request(NARROW, temperature=temperature)
            alone = await answer(engine, request)
            assert is_of_schema(bytes(alone[:-1]).decode())
            free = msgspec.structs.replace(request, sampling_params=SamplingParams(max_tokens=40, seed=5))
            beside = await asyncio.gather(
                *(whole(engine, each) for each in [free, request, make_request({"regex": "[ab]{9}"}), free])
            )
            assert beside[1].choices[0].token_ids == alone
            assert re.fullmatch("[ab]{9}", bytes(beside[2].choices[0].token_ids[:-1]).decode())
            assert beside[0].choices[0].token_ids == beside[3].choices[0].token_ids
            several = await whole(engine, make_request(NARROW, temperature=temperature, n=3))
            assert all(is_of_schema(bytes(choice.token_ids[:-1]).decode()) for choice in several.choices)

    asyncio.run(main())


def test_a_grammar_survives_preemption(model: Path) -> None:
    async def main() -> None:
        requests = [make_request({"regex": "[a-f]{90}"}, seed=seed, max_tokens=120) for seed in range(4)]
        async with open_engine(CONFIG, model, name="llama") as engine:
            expected = [await answer(engine, request) for request in requests]
        tight = EngineConfig(block_size=8, num_blocks=24, num_threads=1)
        async with open_engine(tight, model, name="llama") as engine:
            assert await asyncio.gather(*(answer(engine, request) for request in requests)) == expected
            assert engine.loop.scheduler.num_preemptions > 0

    asyncio.run(main())


def test_a_grammar_goes_on_elsewhere(model: Path) -> None:
    """Split by a ticket, and continued after tokens that were delivered already."""

    async def main() -> None:
        transfer = KVTransferConfig(kv_connector="shm")
        async with (
            open_engine(CONFIG, model, name="llama", transfer=transfer) as prefill,
            open_engine(CONFIG, model, name="llama", transfer=transfer) as decode,
        ):
            request = make_request(NARROW)
            expected = await answer(prefill, request)
            held = await whole(prefill, msgspec.structs.replace(request, kv_transfer_params={"do_remote_decode": True}))
            assert held.choices[0].token_ids == expected[:1] and held.kv_transfer_params is not None
            moved = msgspec.structs.replace(request, kv_transfer_params=held.kv_transfer_params)
            assert await answer(decode, moved) == expected
            later = msgspec.structs.replace(request, output_token_ids=expected[:9])
            assert await answer(decode, later) == expected[9:]

    asyncio.run(main())


def test_a_bad_grammar_is_refused_before_the_first_token(model: Path) -> None:
    async def main() -> None:
        async with open_engine(CONFIG, model, name="llama") as engine:
            with pytest.raises(ClientError) as refusal:
                await whole(engine, make_request({"regex": "["}))
            assert refusal.value.param == "sampling_params.structured_outputs.regex"
            assert await answer(engine, make_request({"regex": "ab"})) == [*b"ab", EOS]

    asyncio.run(main())
