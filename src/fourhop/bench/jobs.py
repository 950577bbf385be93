"""The jobs of a run, from a dataset's name, with the times at which they are due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from fourhop.bench.arrivals import schedule
from fourhop.bench.config import DatasetConfig, LoadConfig
from fourhop.bench.datasets import multi_turn_jobs, prefix_repetition_jobs, random_jobs
from fourhop.bench.traces import azure_jobs, mooncake_jobs, sharegpt_jobs
from fourhop.bench.workload import Job, Vocabulary
from fourhop.wire.errors import StartError

DRAWN = {"random": random_jobs, "prefix_repetition": prefix_repetition_jobs, "multi_turn": multi_turn_jobs}
TRACES = {"mooncake": mooncake_jobs, "azure": azure_jobs}
NUM_HEADER_LINES = {"mooncake": 0, "azure": 1}


class Workload:
    """A dataset with its file read. `num` jobs, the same ones each time they are asked for."""

    def __init__(self, config: DatasetConfig, vocabulary: Vocabulary, load: LoadConfig) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._load = load
        self._data = b"" if config.dataset_path is None else _read(config)
        self._sharegpt = self._first_of_sharegpt() if config.dataset_name == "sharegpt" else []
        self.num = min(load.num_prompts, self._num_there())

    def jobs(self) -> Iterator[Job]:
        name, seed = self._config.dataset_name, self._load.seed
        if name in DRAWN:
            return islice(DRAWN[name](self._config, self._vocabulary, seed), self.num)
        if name in TRACES:
            lines = self._data.decode(errors="replace").splitlines()
            return islice(TRACES[name](lines, self._config, self._vocabulary, seed), self.num)
        return iter(self._sharegpt)

    def scheduled(self) -> Iterable[tuple[float, Job]]:
        """Each job with the seconds after the start at which it is due: a trace's own times unless a rate is given."""
        own_times = self._load.ramp_up_strategy is None and self._load.request_rate == float("inf")
        due = schedule(self._load, self.num)
        for place, job in enumerate(self.jobs()):
            yield (job.at_s if own_times and job.at_s is not None else due[place]), job

    def _num_there(self) -> int:
        name = self._config.dataset_name
        if name in DRAWN:
            return self._load.num_prompts
        if name in TRACES:
            return sum(not line.isspace() for line in self._data.splitlines()) - NUM_HEADER_LINES[name]
        return len(self._sharegpt)

    def _first_of_sharegpt(self) -> list[Job]:
        jobs = sharegpt_jobs(self._data, self._config, self._vocabulary, self._load.seed)
        return list(islice(jobs, self._load.num_prompts))


def _read(config: DatasetConfig) -> bytes:
    assert config.dataset_path is not None
    try:
        return config.dataset_path.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {config.dataset_path}: {error.strerror}") from None
