"""Seeds, limits and ends: what `fourhop up` makes of a request is what one engine makes of it (cases 58, 59 and 61)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.models import write_tiny_checkpoint
from fakes.toy import EOS
from flows.pipelines import Pipeline, metric, until, up
from flows.servers import running, url_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = [(place * 37 + 11) % 256 for place in range(50)]
SEEDED = {"temperature": 1.0, "seed": 42, "max_tokens": 12, "ignore_eos": True}
TO_EOS = {"temperature": 0, "max_tokens": 5, "logit_bias": {str(EOS): 100}}

Choice = tuple[str, list[int], str, Any]


@dataclass(frozen=True)
class Both:
    """One engine, and engines that hand over, on the same weights."""

    model: str
    one: str
    split: Pipeline

    def ask(self, **changes: Any) -> list[Choice]:
        """The choices, which must be the same from both."""
        choices = ask(self.one, **changes)
        assert ask(self.split.url, **changes) == choices
        return choices

    def num_transfers(self) -> float:
        return metric(self.split.urls["decode-0"], "fourhop:kv_transfers_total")

    def num_held(self) -> float:
        return sum(metric(url, "fourhop:held_blocks") for url in self.split.urls.values())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    model = str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))
    with running(("serve", model, "--port", "0", "--num-threads", "1")) as (server,), up(model) as pipeline:
        yield Both(model, url_of(server), pipeline)


def ask(url: str, **changes: Any) -> list[Choice]:
    answer = httpx.post(
        f"{url}/v1/completions", json={"prompt": PROMPT, "return_token_ids": True, **changes}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    body = answer.json()
    choices: list[Choice] = [tuple(choice[name] for name in names) for choice in body["choices"]]
    assert body["usage"]["completion_tokens"] == sum(len(token_ids) for _, token_ids, _, _ in choices)
    return choices


def test_a_seed_does_not_know_its_neighbours(both: Both) -> None:
    ((_, alone, _, _),) = both.ask(**SEEDED)
    others: list[dict[str, Any]] = [SEEDED | {"seed": None}, SEEDED | {"seed": 43}]
    with ThreadPoolExecutor(5) as threads:
        answers = list(
            threads.map(lambda changes: ask(both.split.url, **changes)[0][1], [*others, SEEDED, *reversed(others)])
        )
    assert answers[2] == alone
    assert answers[1] == answers[3] != alone, "the other seed repeats too"
    assert answers[0] != answers[4], "without a seed they differ"


def test_choices_of_a_seed_differ_and_repeat(both: Both) -> None:
    first = both.ask(**SEEDED, n=2)
    assert first[0][1] != first[1][1]
    assert both.ask(**SEEDED, n=2) == first
    assert both.ask(**SEEDED) == first[:1]


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_limits(both: Both, limit: int, temperature: float) -> None:
    ((_, token_ids, finish, _),) = both.ask(**SEEDED | {"max_tokens": limit, "temperature": temperature})
    assert (len(token_ids), finish) == (limit, "length")


def test_eos_as_the_first_token(both: Both) -> None:
    before = both.num_transfers()
    assert both.ask(**TO_EOS) == [("", [EOS], "stop", None)]
    assert both.num_transfers() == before, "there is nothing to hand over"
    until(lambda: both.num_held() == 0, 10)


def test_eos_as_the_second_token(both: Both) -> None:
    ((_, (first, second), finish, _),) = both.ask(**TO_EOS, min_tokens=1)
    assert first != EOS and (second, finish) == (EOS, "stop")


def test_eos_that_does_not_count(both: Both) -> None:
    assert both.ask(**TO_EOS, ignore_eos=True) == [("", [EOS] * 5, "length", None)]
    ((_, token_ids, finish, _),) = both.ask(**TO_EOS, min_tokens=3)
    assert (token_ids.count(EOS), token_ids[3:], finish) == (1, [EOS], "stop")


def test_the_first_token_is_a_stop_token_or_completes_a_stop_string(both: Both) -> None:
    letter = {"temperature": 0, "max_tokens": 5, "logit_bias": {str(ord("x")): 100}}
    assert both.ask(**letter)[0][0] == "xxxxx"
    ((text, token_ids, finish, stop),) = both.ask(**letter, stop_token_ids=[ord("x")])
    assert (token_ids, finish, stop) == ([ord("x")], "stop", ord("x")) and text == ""
    for piece, num_tokens in (("x", 1), ("xx", 2)):
        ((text, token_ids, finish, stop),) = both.ask(**letter, stop=[piece])
        assert (text, len(token_ids), finish, stop) == ("", num_tokens, "stop", piece)
    until(lambda: both.num_held() == 0, 10)


def check_logprobs(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same tokens at the same places; numbers may differ in their last digits, as sums in another order do."""
    assert (found["tokens"], found["text_offset"]) == (expected["tokens"], expected["text_offset"])
    assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)
    for one, other in zip(found["top_logprobs"], expected["top_logprobs"], strict=True):
        assert one == (None if other is None else pytest.approx(other, abs=1e-3))


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_how_likely_a_prompt_is(both: Both, max_tokens: int) -> None:
    """Echoed with log-probabilities, twice, so that its prefix is cached: what transformers says of prompt and answer,
    from one engine and from two, in one piece and as a stream."""
    before = both.num_transfers()
    request = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    answers = [
        httpx.post(f"{url}/v1/completions", json=request, timeout=60).json() for url in [both.one, both.split.url] * 2
    ]
    (choice,) = answers[0]["choices"]
    for (other,) in (answer["choices"] for answer in answers):
        assert (other["text"], other["finish_reason"]) == (choice["text"], choice["finish_reason"])
        check_logprobs(other["logprobs"], choice["logprobs"])
    for url in (both.one, both.split.url):
        events = httpx.post(f"{url}/v1/completions", json=request | {"stream": True}, timeout=60).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event not in ("", "data: [DONE]")]
        parts = [part for chunk in chunks for part in chunk["choices"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        check_logprobs({name: [value for one in told for value in one[name]] for name in told[0]}, choice["logprobs"])
    assert (both.num_transfers() > before) == (max_tokens > 1)
    ids = torch.tensor([PROMPT + ask(both.one, max_tokens=4, temperature=0)[0][1][:max_tokens]])
    model = AutoModelForCausalLM.from_pretrained(both.model, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(ids).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None and rest == pytest.approx(expected, abs=1e-3)
    until(lambda: both.num_held() == 0, 10)
