"""Runs against a scripted server in virtual time: cases 86 and 89, open loop, conversations, stopping."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fakes import virtual_time
from fakes.scripted_server import DONE, Script, ScriptedServer, chat, event, text, tokens, usage
from fakes.vocabulary import LetterVocabulary
from fourhop.bench.bodies import Bodies
from fourhop.bench.client import Client
from fourhop.bench.config import BackendName, SamplingConfig, TargetConfig
from fourhop.bench.drive import Driver, Options, Run
from fourhop.bench.measure import Summary, summarize
from fourhop.bench.record import Record
from fourhop.bench.workload import Job, Turn
from fourhop.wire.errors import ErrorBody, PeerError, PeerRefused

LIMITS = {"ttft": 1.0, "tpot": 1.0}
METRICS = ("ttft", "tpot", "itl", "chunk_gap", "e2el")


class Quiet:
    def token(self) -> None:
        """Nothing is shown."""

    def ended(self, record: Record) -> None:
        """Nothing is shown."""


def job(*lengths: int, num_output: int = 2, at_s: float | None = None) -> Job:
    return Job(tuple(Turn(list(range(length)), num_output) for length in lengths), at_s)


def drive(
    server: ScriptedServer,
    schedule: Sequence[tuple[float, Job]],
    *,
    backend: BackendName = "generate",
    stop_at_s: float | None = None,
    **options: Any,
) -> Run:
    async def work() -> Run:
        vocabulary = LetterVocabulary()
        client = Client(server.send, virtual_time.now, lambda said: len(vocabulary.encode(said)))
        bodies = Bodies(TargetConfig(backend=backend), SamplingConfig(), "m", ignore_eos=True)
        driver = Driver(client, bodies, vocabulary, Quiet(), Options(prefix="r-", **options))
        if stop_at_s is not None:
            asyncio.get_running_loop().call_later(stop_at_s, driver.stop)
        return await driver.run(schedule)

    return virtual_time.run(work())


def summary_of(run: Run) -> Summary:
    return summarize(run.records, run.duration_s, limits=LIMITS, metrics=METRICS, percentiles=(50, 99))


def always(*reads: tuple[float, bytes], **script: Any) -> Callable[[dict[str, Any]], Script]:
    return lambda body: Script(reads, **script)


def test_a_chunk_of_several_tokens_is_not_one_slow_token() -> None:
    """Case 86."""
    answer = [(0.1, tokens(1)), (0.14, tokens(2, 3, 4, 5)), (0.18, tokens(6, 7, 8, 9, finish="length") + DONE)]
    run = drive(ScriptedServer(always(*answer)), [(0.0, job(3, num_output=9))])
    (record,) = run.records
    assert record.error is None
    assert record.ttft_s == pytest.approx(0.1)
    assert record.tpot_s == pytest.approx(0.01)
    assert record.e2el_s == pytest.approx(0.18)
    assert record.chunk_gaps_s() == pytest.approx([0.04, 0.04])
    assert record.itls_s() == pytest.approx([0.01] * 8)
    assert summary_of(run).peak_output_per_s == 9


def test_without_ids_several_tokens_in_a_chunk_make_itl_unknown_and_leave_tpot_right() -> None:
    answer = [(0.1, text("a")), (0.14, text("bcde")), (0.18, text("fghi", "length") + usage(3, 9) + DONE)]
    run = drive(ScriptedServer(always(*answer)), [(0.0, job(3, num_output=9))], backend="openai")
    summary = summary_of(run)
    assert run.records[0].itls_s() is None
    assert summary.itl_unknown == 1
    assert summary.metrics["itl"].median is None
    assert summary.metrics["tpot"].median == pytest.approx(0.01)
    assert summary.metrics["chunk_gap"].median == pytest.approx(0.04)
    assert summary.peak_output_per_s == pytest.approx(9)


FAILURES = {
    "no tokens": (always((0.1, usage(3, 0) + DONE)), "no output"),
    "error inside": (
        always((0.1, tokens(1)), (0.2, tokens(2)), (0.3, event(error={"message": "boom"}) + DONE)),
        "an error inside the stream: boom",
    ),
    "HTTP 500": (always(error=PeerRefused(500, ErrorBody("broken", "ServerError", None, 500))), "500 broken"),
    "connection lost": (always((0.1, tokens(1)), error=PeerError("the connection broke")), "502 the connection broke"),
    "cut short": (always((0.1, tokens(1))), "the stream ended early"),
    "no stream": (
        always((0.1, b"{}"), headers={"content-type": "application/json"}),
        "the answer is application/json, not a stream",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_failed_is_counted_by_its_cause_and_nowhere_else(name: str) -> None:
    """Case 89, a to c: beside one success at 1 s the failures change no latency and no goodput."""
    script_of, cause = FAILURES[name]
    good = Script([(0.5, tokens(1)), (0.6, tokens(2, finish="length") + DONE)])
    server = ScriptedServer(lambda body: good if len(body["token_ids"]) == 1 else script_of(body))
    run = drive(server, [(0.0, job(1)), (0.0, job(2)), (0.0, job(2))])
    summary = summary_of(run)
    assert (summary.completed, summary.failed, summary.failures) == (1, 2, {cause: 2})
    assert summary.metrics["ttft"].num == 1
    assert summary.metrics["ttft"].mean == pytest.approx(0.5)
    assert summary.metrics["itl"].num == 1
    assert summary.num_output == 2
    assert summary.good_share == pytest.approx(1 / 3)
    assert summary.goodput == pytest.approx(1 / run.duration_s)


def test_a_single_token_has_ttft_and_e2el_and_meets_any_tpot() -> None:
    """Case 89, d."""
    run = drive(ScriptedServer(always((0.5, tokens(1, finish="length") + DONE))), [(0.0, job(1, num_output=1))])
    summary = summary_of(run)
    assert summary.metrics["ttft"].median == summary.metrics["e2el"].median == pytest.approx(0.5)
    assert (summary.metrics["tpot"].median, summary.metrics["itl"].median) == (None, None)
    assert summary.good_share == 1


def test_a_run_in_which_nothing_succeeds_has_no_percentiles() -> None:
    """Case 89, e."""
    refusal = PeerRefused(503, ErrorBody("full", "Unavailable", None, 503))
    summary = summary_of(drive(ScriptedServer(always(error=refusal)), [(0.0, job(1)), (1.0, job(1))]))
    assert (summary.completed, summary.failed, summary.good_share, summary.request_rate) == (0, 2, 0, 0)
    for values in summary.metrics.values():
        assert (values.mean, values.median, values.std, values.worst) == (None, None, None, None)
        assert values.percentiles == {50: None, 99: None}


def test_a_run_without_requests_has_no_rates() -> None:
    """Case 89, f and g: its end is its start."""
    summary = summary_of(drive(ScriptedServer(always()), []))
    assert summary.duration_s == 0
    assert (summary.request_rate, summary.goodput, summary.good_share, summary.output_rate) == (None, None, None, None)
    assert summary.peak_output_per_s is None


def slow(body: dict[str, Any]) -> Script:
    return Script([(10.0, tokens(1)), (20.0, tokens(2, finish="length") + DONE)])


def test_the_loop_is_open() -> None:
    """Slow answers delay no request, and no interval's error adds up."""
    server = ScriptedServer(slow)
    due = [0.3 * place for place in range(50)]
    run = drive(server, [(at_s, job(1)) for at_s in due])
    assert server.sent_at_s == pytest.approx(due)
    assert all(record.lag_s == pytest.approx(0, abs=1e-6) for record in run.records)
    assert summary_of(run).peak_open == 50


def test_a_limit_on_open_requests_makes_a_queue_at_the_client_that_is_told() -> None:
    server = ScriptedServer(slow)
    run = drive(server, [(0.0, job(1))] * 3, max_concurrency=1)
    assert server.sent_at_s == pytest.approx([0, 20, 40])
    assert [record.queue_s for record in run.records] == pytest.approx([0, 20, 40])
    assert [record.ttft_s for record in run.records] == pytest.approx([10, 10, 10])
    assert summary_of(run).peak_open == 1


def test_the_next_turn_follows_the_answer_and_contains_it() -> None:
    answer = always((1.0, tokens(7)), (2.0, tokens(8, finish="length") + DONE))
    server = ScriptedServer(answer)
    run = drive(server, [(0.0, job(3, 2, 1))], think_time_s=5.0)
    assert [body["token_ids"] for body in server.requests] == [
        [0, 1, 2],
        [0, 1, 2, 7, 8, 0, 1],
        [0, 1, 2, 7, 8, 0, 1, 7, 8, 0],
    ]
    assert server.sent_at_s == pytest.approx([0, 7, 14])
    assert [record.turn for record in run.records] == [0, 1, 2]
    assert [record.num_asked for record in run.records] == [3, 7, 10]
    assert server.names == ["r-0", "r-0-1", "r-0-2"]


def test_in_a_chat_the_turns_are_messages() -> None:
    answer = always((1.0, chat(role="assistant")), (2.0, chat(content="bc", finish="stop") + DONE))
    server = ScriptedServer(answer)
    drive(server, [(0.0, job(2, 1))], backend="openai-chat")
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert server.requests[1]["messages"][1]["content"] == "bc"


def test_a_conversation_ends_with_the_turn_that_fails() -> None:
    server = ScriptedServer(always((1.0, event(error="boom"))))
    assert len(drive(server, [(0.0, job(1, 1, 1))]).records) == 1


def test_stopping_ends_what_is_open_and_keeps_what_is_there() -> None:
    server = ScriptedServer(slow)
    run = drive(server, [(at_s, job(1)) for at_s in (0.0, 15.0, 500.0)], stop_at_s=25.0)
    assert run.is_cut
    assert [record.error for record in run.records] == [None, "cancelled"]
    assert run.duration_s == pytest.approx(25)
    summary = summary_of(run)
    assert (summary.completed, summary.failed, summary.cancelled, summary.good_share) == (1, 0, 1, 0)
    assert summary.metrics["ttft"].num == 1


@pytest.mark.parametrize("backend", ["vllm", "openai", "vllm-chat", "openai-chat", "generate"])
def test_every_request_streams_and_asks_for_usage(backend: BackendName) -> None:
    server = ScriptedServer(slow)
    drive(server, [(0.0, job(3))], backend=backend)
    (body,) = server.requests
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body.get("return_token_ids", False) is backend.startswith("vllm")
    place = body["sampling_params"] if backend == "generate" else body
    assert place["ignore_eos"] is True
    assert place.get("max_tokens", place.get("max_completion_tokens")) == 2


def test_ids_are_sent_where_the_endpoint_takes_them() -> None:
    """Case 92: the prompt's length is met exactly, though these ids would merge when their text is encoded again."""
    turn = Turn([0, 1, 0, 2], 2)
    for backend, name in [("vllm", "prompt"), ("openai", "prompt"), ("generate", "token_ids")]:
        server = ScriptedServer(slow)
        drive(server, [(0.0, Job((turn,)))], backend=backend)  # type: ignore[arg-type]
        assert server.requests[0][name] == [0, 1, 0, 2]


def test_texts_are_kept_only_on_demand() -> None:
    answer = always((1.0, text("bc")), (2.0, text("d", "length") + DONE))
    for keeps_text, said in [(True, "bcd"), (False, "")]:
        run = drive(ScriptedServer(answer), [(0.0, job(1))], backend="openai", keeps_text=keeps_text)
        assert run.records[0].text == said
        assert run.records[0].num_output == 3


def test_the_prompt_has_the_length_that_the_server_counts() -> None:
    """Case 92: a chat template adds eight tokens."""
    answer = always((1.0, chat(content="b", finish="length") + usage(13, 1) + DONE))
    run = drive(ScriptedServer(answer), [(0.0, job(5, num_output=1))], backend="openai-chat")
    (record,) = run.records
    assert (record.num_asked, record.num_input) == (5, 13)
    assert summary_of(run).num_input_off == 1


def test_ids_and_usage_that_disagree_are_told() -> None:
    answer = always((1.0, tokens(1)), (2.0, tokens(2, finish="length") + usage(3, 5) + DONE))
    run = drive(ScriptedServer(answer), [(0.0, job(3))])
    assert summary_of(run).num_mismatched == 1
    assert run.records[0].num_output == 2
    assert run.records[0].chunk_tokens == array("L", [1, 1])


def test_server_timing_is_read() -> None:
    headers = {"content-type": "text/event-stream", "server-timing": "received;dur=0.0, first_token;dur=400.0"}
    answer = always((0.5, tokens(1, finish="length") + DONE), headers=headers)
    (record,) = drive(ScriptedServer(answer), [(0.0, job(1, num_output=1))]).records
    assert record.moments == {"received": 0.0, "first_token": 0.4}
