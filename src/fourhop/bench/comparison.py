"""What a comparison consists of: set-ups, the order of the runs, and each run's load."""

from __future__ import annotations

import dataclasses
import math
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourhop import checkpoint, service
from fourhop.bench.config import SEVERAL, LoadConfig, MetricsConfig, SamplingConfig, TargetConfig
from fourhop.bench.dataset_config import DatasetConfig
from fourhop.bench.machine import has_gpu
from fourhop.bench.presets import PRESETS, Preset, PresetName
from fourhop.bench.runs import Plan
from fourhop.bench.search import num_prompts_of, seed_of
from fourhop.bench.setups import Setup, other, replicas, split, stock_vllm
from fourhop.service import ServerConfig
from fourhop.wire.errors import StartError


@dataclass(frozen=True)
class CompareConfig:
    """What is compared, and how long. What is not given is the preset's.

    Attributes:
        preset: guide: two GPUs, 8k prompts. a100: three GPUs, 3.5k prompts. guide-small, a100-small: the same shapes
            for two and three CPU cores.
        prefill: Prefill engines of the split. The replicas are as many as its engines are together.
        decode: Decode engines of the split.
        chunk_budgets: Chunk budgets (`--max-num-batched-tokens`) of the replicas, by commas; `default` is the engine's.
        setup: More set-ups, each NAME=FLAGS with flags of `fourhop up`.
        vllm: The `vllm` program of an installation of stock vLLM, to be measured as replicas too.
        vllm_flags: Flags for it.
        engine_flags: Flags for every engine of ours, such as `--num-threads 1`.
        request_rates: Rates, by commas.
        num_prompts: Requests at every rate.
        seconds: Instead: the length of a run.
        input_len: Tokens in a prompt.
        input_ratio: Its length is uniform between (1 - ratio) and (1 + ratio) times that.
        output_len: Tokens in an answer.
        goodput: Limits in milliseconds, each NAME:MS.
        rounds: How often everything is run; what is told are medians over the rounds.
        num_warmups: Requests to every set-up after its start, not measured.
        seed: Of prompts and arrivals. At one rate and round every set-up gets the same ones.
        output_dir: Folder of the report.
    """

    preset: PresetName = "guide-small"
    prefill: int | None = None
    decode: int | None = None
    chunk_budgets: str | None = None
    setup: tuple[str, ...] = field(default=(), metadata=SEVERAL)
    vllm: str | None = None
    vllm_flags: str = ""
    engine_flags: str | None = None
    request_rates: str | None = None
    num_prompts: int | None = None
    seconds: float | None = None
    input_len: int | None = None
    input_ratio: float | None = None
    output_len: int | None = None
    goodput: tuple[str, ...] = field(default=(), metadata=SEVERAL)
    rounds: int = 3
    num_warmups: int = 4
    seed: int = 0
    output_dir: Path = Path("bench-compare")

    def __post_init__(self) -> None:
        self.resolve()
        for text in self.setup:
            other(text, "", ())
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, not {self.rounds}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be a positive number, not {self.seconds}")
        MetricsConfig(goodput=self.goodput)

    def resolve(self) -> Preset:
        """The preset with what is given instead. Raises ValueError."""
        preset = PRESETS[self.preset]
        given: dict[str, Any] = {
            "num_prefill": self.prefill,
            "num_decode": self.decode,
            "budgets": None if self.chunk_budgets is None else _budgets(self.chunk_budgets),
            "num_input": self.input_len,
            "input_ratio": self.input_ratio,
            "num_output": self.output_len,
            "num_prompts": self.num_prompts,
            "rates": None if self.request_rates is None else _rates(self.request_rates),
            "limits": self.goodput or None,
            "engine_flags": self.engine_flags,
        }
        found = dataclasses.replace(preset, **{name: value for name, value in given.items() if value is not None})
        if min(found.num_prefill, found.num_decode, found.num_prompts, found.num_input, found.num_output) < 1:
            raise ValueError("prefill, decode, num_prompts, input_len and output_len must be at least 1")
        return found


def plan_setups(config: CompareConfig, model: str) -> list[Setup]:
    """Split first, then the replicas, then what else is asked for.

    Raises StartError if there is no such vLLM, or if two would go by one name and be taken for one.
    """
    preset = config.resolve()
    flags, num = shlex.split(preset.engine_flags), preset.num_prefill + preset.num_decode
    setups = [split(model, preset.num_prefill, preset.num_decode, flags)]
    setups += [replicas(model, num, budget, flags) for budget in preset.budgets]
    setups += [other(text, model, flags) for text in config.setup]
    if config.vllm is not None:
        setups.append(_vllm(config.vllm, model, num, shlex.split(config.vllm_flags)))
    names = [setup.name for setup in setups]
    if twice := [name for name in names if names.count(name) > 1]:
        raise StartError(f"two set-ups are called {twice[0]}")
    return setups


def alternate(setups: Sequence[Setup], rounds: int) -> Iterator[tuple[int, Setup]]:
    """Every set-up in every round; the order turns round from one to the next, so that a drift favours none."""
    for number in range(rounds):
        for setup in setups if number % 2 == 0 else reversed(setups):
            yield number, setup


def plan_run(config: CompareConfig, model: str, rate: float, number: int) -> Plan:
    """A run without its target: the same prompts and arrivals for every set-up."""
    preset = config.resolve()
    return Plan(
        target=TargetConfig(backend="generate", model=model),
        load=LoadConfig(
            num_prompts=num_prompts_of(rate, config.seconds, preset.num_prompts),
            request_rate=rate,
            seed=seed_of(config.seed, number, rate),
        ),
        dataset=DatasetConfig(
            random_input_len=preset.num_input,
            random_range_ratio=preset.input_ratio,
            random_output_len=preset.num_output,
        ),
        sampling=SamplingConfig(temperature=0.0),
        metrics=MetricsConfig(goodput=preset.limits),
    )


def _vllm(program: str, model: str, num: int, flags: Sequence[str]) -> Setup:
    if shutil.which(program) is None:
        raise StartError(f"there is no program {program}: --vllm takes the path of an installed vllm")
    folder = str(checkpoint.find(model).folder)
    ports = [_free_port() for _ in range(num)]
    return stock_vllm(program, folder, model, ports, has_gpu=has_gpu(), flags=flags)


def _free_port() -> int:
    with service.bind(ServerConfig(port=0)) as listener:
        return int(listener.getsockname()[1])


def _budgets(text: str) -> tuple[int | None, ...]:
    try:
        return tuple(None if part.strip() == "default" else int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"chunk_budgets are numbers or `default`, by commas, not {text}") from None


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or any(not 0 < rate < math.inf for rate in rates):
        raise ValueError(f"request_rates are positive numbers by commas, not {text}")
    return rates
