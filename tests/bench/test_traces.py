"""Files of other projects as jobs: lengths, times, shared beginnings, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.vocabulary import LetterVocabulary
from fourhop.bench.config import LoadConfig
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.jobs import Workload
from fourhop.bench.workload import Job
from fourhop.wire.errors import StartError

MOONCAKE = """
{"timestamp": 27000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 30000, "input_length": 1030, "output_length": 20, "hash_ids": [0, 1, 7]}
{"timestamp": 30000, "input_length": 30, "output_length": 9}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:05.4799600,396,109
"""
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "x" * 9}, {"from": "gpt", "value": "y" * 6}]},
    {"id": "b", "conversations": [{"from": "human", "value": "x" * 3}, {"from": "gpt", "value": "y" * 6}]},
    {"id": "c", "conversations": [{"from": "human", "value": "x" * 9}, {"from": "gpt", "value": "y" * 3}]},
    {"id": "d", "conversations": [{"from": "human", "value": "x" * 2000}, {"from": "gpt", "value": "y" * 6}]},
    {"id": "e", "conversations": []},
    {
        "id": "f",
        "conversations": [
            {"from": "human", "value": "b" * 5},
            {"from": "gpt", "value": "y" * 7},
            {"from": "human", "value": "c" * 2},
            {"from": "gpt", "value": "y" * 8},
            {"from": "human", "value": "unanswered"},
        ],
    },
]


def workload(
    folder: Path, name: str, text: str, *, num: int = 10, rate: float = float("inf"), **more: float
) -> Workload:
    path = folder / "file"
    path.write_text(text)
    config = DatasetConfig(dataset_name=name, dataset_path=path, **more)  # type: ignore[arg-type]
    return Workload(config, LetterVocabulary(), LoadConfig(num_prompts=num, request_rate=rate))


def lengths(jobs: list[Job]) -> list[tuple[int, int]]:
    return [(len(job.turns[0].ids), job.turns[0].num_output) for job in jobs]


def test_mooncake_has_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    found = workload(tmp_path, "mooncake", MOONCAKE)
    assert found.num == 3
    due, jobs = zip(*found.scheduled(), strict=True)
    assert due == (0.0, 3.0, 3.0)
    assert lengths(list(jobs)) == [(1100, 500), (1030, 20), (30, 9)]
    first, second, _ = (job.turns[0].ids for job in jobs)
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]
    assert lengths(list(found.jobs())) == lengths(list(jobs)), "the same each time"


def test_lengths_and_times_can_be_scaled_and_sharing_stays(tmp_path: Path) -> None:
    due, jobs = zip(
        *workload(tmp_path, "mooncake", MOONCAKE, length_scale=0.1, time_scale=2.0).scheduled(), strict=True
    )
    assert due == (0.0, 6.0, 6.0)
    assert lengths(list(jobs)) == [(110, 50), (103, 2), (3, 1)]
    assert jobs[0].turns[0].ids[:102] == jobs[1].turns[0].ids[:102]


def test_azure_has_times_and_lengths(tmp_path: Path) -> None:
    found = workload(tmp_path, "azure", AZURE)
    due, jobs = zip(*found.scheduled(), strict=True)
    assert due == pytest.approx((0.0, 1.5))
    assert lengths(list(jobs)) == [(374, 44), (396, 109)]
    later = AZURE.replace(".9799600", ".979960+00:00")
    assert [job.at_s for job in workload(tmp_path, "azure", later).jobs()] == pytest.approx([0.0, 1.5])


def test_a_rate_replaces_the_times_of_a_trace(tmp_path: Path) -> None:
    due = [at_s for at_s, _ in workload(tmp_path, "azure", AZURE, rate=4.0).scheduled()]
    assert due[-1] == pytest.approx(0.5)


def test_sharegpt_takes_first_turns_of_usable_length(tmp_path: Path) -> None:
    jobs = list(workload(tmp_path, "sharegpt", json.dumps(SHAREGPT)).jobs())
    assert sorted(lengths(jobs)) == [(5, 7), (9, 6)]
    assert {job.turns[0].text for job in jobs} == {"x" * 9, "b" * 5}


def test_sharegpt_can_be_had_as_conversations(tmp_path: Path) -> None:
    jobs = list(workload(tmp_path, "sharegpt", json.dumps(SHAREGPT), num_turns=5).jobs())
    (long,) = [job for job in jobs if len(job.turns) > 1]
    assert [(turn.text, turn.num_output) for turn in long.turns] == [("b" * 5, 7), ("c" * 2, 8)]


def test_sharegpt_answers_can_have_a_fixed_length(tmp_path: Path) -> None:
    jobs = list(workload(tmp_path, "sharegpt", json.dumps(SHAREGPT), sharegpt_output_len=2).jobs())
    assert sorted(lengths(jobs)) == [(5, 2), (9, 2), (9, 2)]


def test_no_prompt_is_sent_twice_to_fill_a_number(tmp_path: Path) -> None:
    assert workload(tmp_path, "mooncake", MOONCAKE, num=2).num == 2
    assert workload(tmp_path, "azure", AZURE, num=50).num == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mooncake", '{"timestamp": 1}', "line 1: Object missing required field `input_length`"),
        ("mooncake", MOONCAKE + "nonsense", "line 5: "),
        ("azure", "TIMESTAMP,ContextTokens\n", "there is no column GeneratedTokens"),
        ("azure", AZURE + "yesterday,1,2\n", "line 4: "),
        ("azure", AZURE + "2023-11-16 18:17:06,1\n", "line 4: "),
        ("azure", AZURE + "2023-11-16 18:17:00,1,2\n", "line 4: it is earlier than the line before"),
        ("mooncake", "\n\n", "there is no prompt in it"),
        ("sharegpt", "[]", "there is no prompt in it"),
        ("sharegpt", "{}", "it is not a list of conversations"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(StartError, match=r"file") as caught:
        workload(tmp_path, name, text)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    config = DatasetConfig(dataset_name="azure", dataset_path=tmp_path / "none")
    with pytest.raises(StartError, match="cannot read"):
        Workload(config, LetterVocabulary(), LoadConfig())
    with pytest.raises(ValueError, match="needs dataset_path"):
        DatasetConfig(dataset_name="azure")
    with pytest.raises(ValueError, match="takes no dataset_path"):
        DatasetConfig(dataset_path=tmp_path)
