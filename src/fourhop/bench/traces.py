"""Jobs that a file tells: ShareGPT's conversations, Mooncake's and Azure's traces. Pure: text in, jobs out.

Mooncake: JSON lines `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`; each hash id stands for a block
of 512 tokens, and prompts share a beginning where their ids do. Azure: CSV with the columns TIMESTAMP, ContextTokens
and GeneratedTokens. Neither has texts: prompts of the told lengths are drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from random import Random

import msgspec

from fourhop.bench.config import DatasetConfig
from fourhop.bench.workload import Job, Turn, Vocabulary, draw_ids
from fourhop.wire.errors import StartError

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


def mooncake_jobs(lines: Iterable[str], config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """A job a line, at its own time after the first. Raises StartError, with the line's number."""
    decode = msgspec.json.Decoder(_Line).decode
    block = max(1, round(MOONCAKE_BLOCK * config.length_scale))
    first_ms: float | None = None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except msgspec.DecodeError as error:
            raise StartError(f"{config.dataset_path}, line {number}: {error}") from None
        first_ms = line.timestamp if first_ms is None else first_ms
        length = _scaled(line.input_length, config)
        shared = [id for name in line.hash_ids for id in draw_ids(vocabulary, f"{seed}/block/{name}", block)][:length]
        rest = draw_ids(vocabulary, f"{seed}/line/{number}", length - len(shared))
        at_s = (line.timestamp - first_ms) / 1000 * config.time_scale
        yield Job((Turn(shared + rest, _scaled(line.output_length, config)),), at_s)


def azure_jobs(lines: Iterable[str], config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """A job a row, at its own time after the first. Raises StartError, with the row's number."""
    rows = csv.DictReader(lines)
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise StartError(f"{config.dataset_path} has no column {missing[0]}")
    first: datetime | None = None
    for number, row in enumerate(rows, 2):
        try:
            # 2023's file has seven digits of a second; the last is cut off.
            at = datetime.fromisoformat(row["TIMESTAMP"].strip())
            num_input, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError, AttributeError) as error:
            raise StartError(f"{config.dataset_path}, line {number}: {error}") from None
        first = at if first is None else first
        ids = draw_ids(vocabulary, f"{seed}/line/{number}", _scaled(num_input, config))
        at_s = (at - first).total_seconds() * config.time_scale
        yield Job((Turn(ids, _scaled(num_output, config)),), at_s)


def sharegpt_jobs(data: bytes, config: DatasetConfig, vocabulary: Vocabulary, seed: int) -> Iterator[Job]:
    """The file's conversations in an order that is drawn, their human turns in turn. Raises StartError.

    As in `vllm bench serve`, a first prompt or answer of fewer than four tokens is left out, and so is a first prompt
    of more than 1,024 tokens or one that with its answer is longer than 2,048.
    """
    try:
        found = msgspec.json.decode(data, type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise StartError(f"{config.dataset_path} is not a list of conversations: {error}") from None
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
