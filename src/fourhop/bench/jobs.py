"""The jobs of a run, from a dataset's name, with the times at which they are due."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fourhop.bench.arrivals import schedule
from fourhop.bench.config import LoadConfig
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.datasets import NUM_TURNS, multi_turn_jobs, prefix_repetition_jobs, random_jobs
from fourhop.bench.traces import Row, parse_azure, parse_mooncake, sharegpt_jobs, trace_jobs
from fourhop.bench.workload import Job, Vocabulary
from fourhop.wire.errors import StartError

DRAWN = {"random": random_jobs, "prefix_repetition": prefix_repetition_jobs, "multi_turn": multi_turn_jobs}
TRACES = {"mooncake": parse_mooncake, "azure": parse_azure}


class Workload:
    """A dataset, its file read and checked. `num` jobs, the same ones each time they are asked for."""

    def __init__(self, config: DatasetConfig, vocabulary: Vocabulary, load: LoadConfig) -> None:
        """Raises StartError for a file that cannot be used."""
        self._config = config
        self._vocabulary = vocabulary
        self._load = load
        self._rows: list[Row] = []
        self._conversations: list[Job] = []
        self.num = load.num_prompts
        if config.dataset_path is not None:
            self._take(_read(config.dataset_path), config.dataset_path)

    @property
    def num_requests(self) -> int:
        """Turns of all jobs."""
        if self._config.dataset_name == "multi_turn":
            return self.num * (self._config.num_turns or NUM_TURNS)
        return sum(len(job.turns) for job in self._conversations) or self.num

    def jobs(self) -> Iterator[Job]:
        name, seed = self._config.dataset_name, self._load.seed
        if name in DRAWN:
            return islice(DRAWN[name](self._config, self._vocabulary, seed), self.num)
        return iter(self._conversations) if self._conversations else self._traced()

    def scheduled(self) -> Iterator[tuple[float, Job]]:
        """Each job with the seconds after the start at which it is due: a trace's own times unless a rate is given."""
        has_own_times = self._load.ramp_up_strategy is None and math.isinf(self._load.request_rate)
        due = schedule(self._load, self.num)
        for place, job in enumerate(self.jobs()):
            yield (job.at_s if has_own_times and job.at_s is not None else due[place]), job

    def _traced(self) -> Iterator[Job]:
        return trace_jobs(self._rows, self._config, self._vocabulary, self._load.seed)

    def _take(self, data: bytes, path: Path) -> None:
        """The file's first jobs, as many as are wanted and there."""
        wanted, name = self._load.num_prompts, self._config.dataset_name
        try:
            if name in TRACES:
                self._rows = TRACES[name](data.decode(errors="replace").splitlines())[:wanted]
            else:
                found = sharegpt_jobs(data, self._config, self._vocabulary, self._load.seed)
                self._conversations = list(islice(found, wanted))
        except ValueError as error:
            raise StartError(f"{path}: {error}") from None
        self.num = len(self._rows) + len(self._conversations)
        if wanted and not self.num:
            raise StartError(f"{path}: there is no prompt in it that can be used")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
