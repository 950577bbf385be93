"""Jobs that a file tells: ShareGPT's conversations, Mooncake's and Azure's traces. Pure: text in, jobs out.

Mooncake: JSON lines `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`; each hash id stands for a block
of 512 tokens, and prompts share a beginning where their ids do. Azure: CSV with the columns TIMESTAMP, ContextTokens
and GeneratedTokens. Neither has texts: prompts of the told lengths are drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from random import Random

import msgspec

from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.workload import Job, Turn, Vocabulary, draw_ids

MOONCAKE_BLOCK = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _Saying(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Saying] = []


@dataclass(frozen=True)
class Row:
    """A request of a trace: seconds after the first one, lengths, the ids of its blocks, and its line in the file."""

    at_s: float
    num_input: int
    num_output: int
    blocks: tuple[int, ...]
    number: int


def parse_mooncake(lines: Sequence[str]) -> list[Row]:
    """Raises ValueError, with the line's number."""
    decode, rows = msgspec.json.Decoder(_Line).decode, []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                line = decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(f"line {number}: {error}") from None
            row = Row(line.timestamp / 1000, line.input_length, line.output_length, tuple(line.hash_ids), number)
            rows.append(row)
    return _from_first(rows)


def parse_azure(lines: Sequence[str]) -> list[Row]:
    """Raises ValueError, with the line's number."""
    table = csv.DictReader(lines)
    missing = [name for name in AZURE_COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise ValueError(f"there is no column {missing[0]}")
    rows = []
    for number, row in enumerate(table, 2):
        try:
            # 2023's file has seven digits of a second, the last is cut off; 2024's file has an offset, which is UTC.
            at = datetime.fromisoformat(row["TIMESTAMP"].strip()).replace(tzinfo=UTC)
            num_input, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number}: {error}") from None
        rows.append(Row(at.timestamp(), num_input, num_output, (), number))
    return _from_first(rows)


def trace_jobs(rows: Iterable[Row], config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """A job a row. Blocks of the same id have the same tokens; what is beyond the blocks is the row's own."""
    block = max(1, round(MOONCAKE_BLOCK * config.length_scale))
    for row in rows:
        length = _scaled(row.num_input, config)
        shared = [id for name in row.blocks for id in draw_ids(vocabulary, f"{seed}/block/{name}", block)][:length]
        own = draw_ids(vocabulary, f"{seed}/line/{row.number}", length - len(shared))
        yield Job((Turn(shared + own, _scaled(row.num_output, config)),), row.at_s * config.time_scale)


def _from_first(rows: list[Row]) -> list[Row]:
    """The rows with their times counted from the first. Raises ValueError for one that is before another."""
    for before, row in pairwise(rows):
        if row.at_s < before.at_s:
            raise ValueError(f"line {row.number}: it is earlier than the line before")
    return [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]


def sharegpt_jobs(data: bytes, config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """The file's conversations in an order that is drawn, their human turns in turn. Raises ValueError.

    As in `vllm bench serve`, a first prompt or answer of fewer than four tokens is left out, and so is a first prompt
    of more than 1,024 tokens or one that with its answer is longer than 2,048.
    """
    try:
        found = msgspec.json.decode(data, type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise ValueError(f"it is not a list of conversations: {error}") from None
    Random(f"{seed}/order").shuffle(found)
    for conversation in found:
        turns = _turns(conversation.conversations, config, vocabulary)
        if turns and _is_usable(turns[0], config.sharegpt_output_len is not None):
            yield Job(tuple(turns))


def _turns(sayings: list[_Saying], config: DatasetConfig, vocabulary: Vocabulary) -> list[Turn]:
    """Each human saying that another's answer follows."""
    turns: list[Turn] = []
    for said, answer in pairwise(sayings):
        if len(turns) == (config.num_turns or 1):
            break
        if said.speaker in ("human", "user") and answer.speaker not in ("human", "user"):
            num_output = config.sharegpt_output_len or len(vocabulary.encode(answer.value))
            turns.append(Turn(vocabulary.encode(said.value), max(1, num_output), said.value))
    return turns


def _is_usable(turn: Turn, has_fixed_output: bool) -> bool:
    num_input = len(turn.ids)
    if num_input < 4 or (turn.num_output < 4 and not has_fixed_output):
        return False
    return num_input <= 1024 and num_input + turn.num_output <= 2048


def _scaled(length: int, config: DatasetConfig) -> int:
    return max(1, round(length * config.length_scale))
