"""Short and long prompts mixed on two engines: goodput of the router's own choice (`--placement auto`) over that of the
better of always local and always split.

    python benchmarks/mixed.py [--num-prompts 100] [--rounds 1] [--fractions 0.6 0.9]

As in `split_pays.py`, a request alone gives the limits (four times its TTFT, twice its TPOT) and 32 open ones the
capacity of two replicas; both are printed before anything is compared. Then one prefill and one decode engine that
always split, two replicas, and one of each with `--placement auto` take turns at the given fractions of the capacity,
asked the same prompts at the same times, prefix cache off. The router is not told the limits: with targets it would
also refuse requests. With 100 requests at a load, a difference of less than 0.05 means nothing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from fourhop.bench.claims import Calibration, plan_rates
from fourhop.bench.compare import compare_all, open_lab, print_plan, write_report
from fourhop.bench.comparison import CompareConfig, plan_setups
from fourhop.bench.findings import Findings, best, ratio
from fourhop.bench.machine import describe_machine
from fourhop.bench.report import Report, comparison_table
from fourhop.bench.table import number, table
from fourhop.checkpoint import DEFAULT_MODEL
from fourhop.wire.errors import StartError
from split_pays import calibrate

AUTO = "auto=--prefill 1 --decode 1 --placement auto"
KINDS = ("other", "replicas", "split")


async def measure(options: argparse.Namespace) -> int:
    config = config_of(options)
    setups = plan_setups(config, options.model)
    async with open_lab(options.model, config.output_dir / "logs", config.num_warmups) as lab:
        calibration = await calibrate(lab, config, setups, options.model)
        config = at_rates(config, calibration, options.fractions)
        print_plan(config, setups)
        outcome = await compare_all(lab, config, setups, options.model)
    report = Report(config, options.model, Findings(outcome.runs), describe_machine())
    print(comparison_table(report))
    print(goodputs_table(report.findings))
    for path in write_report(report, config.output_dir):
        print(f"written: {path}")
    print(json.dumps(summary(report.findings) | {"rounds": config.rounds, "machine": report.machine}))
    return outcome.status


def at_rates(config: CompareConfig, calibration: Calibration, fractions: list[float]) -> CompareConfig:
    """The comparison at these fractions of the capacity."""
    rates = ",".join(f"{rate:g}" for rate in plan_rates(calibration, fractions).more)
    return dataclasses.replace(config, goodput=calibration.limits(), request_rates=rates)


def summary(findings: Findings) -> dict[str, object]:
    """`auto_over_better` by rate, and the least of them; None where no request was in time in either form."""
    ratios = {}
    for rate in findings.rates:
        auto, local, split = goodputs(findings, rate)
        ratios[f"{rate:g}"] = ratio(auto, best((local, split), max))
    return {"auto_over_better": ratios, "least_auto_over_better": best(ratios.values(), min)}


def goodputs(findings: Findings, rate: float) -> list[float | None]:
    """Requests in time a second of the router's choice, of always local and of always split."""
    by_kind = {setup.kind: setup for setup in findings.setups}
    return [findings.cell(by_kind[kind], rate, "goodput").median if kind in by_kind else None for kind in KINDS]


def goodputs_table(findings: Findings) -> str:
    ratios = summary(findings)["auto_over_better"]
    assert isinstance(ratios, dict)
    rows = [
        [f"{rate:g}", *(number(value, 3) for value in goodputs(findings, rate)), number(ratios[f"{rate:g}"], 2)]
        for rate in findings.rates
    ]
    return table(["req/s", "auto", "local", "split", "auto / better"], rows)


def config_of(options: argparse.Namespace) -> CompareConfig:
    return CompareConfig(
        prefill=1,
        decode=1,
        chunk_budgets="default",
        setup=(AUTO,),
        engine_flags=options.engine_flags,
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        input_ratio=options.ratio,
        output_len=options.output_len,
        rounds=options.rounds,
        seed=options.seed,
        output_dir=options.output_dir,
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--num-prompts", type=int, default=100, help="requests of a run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=240)
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--ratio", type=float, default=0.9, help="lengths are (1 - ratio) to (1 + ratio) times those")
    parser.add_argument("--engine-flags", default="", help="for every engine, such as `--num-threads 1`")
    parser.add_argument("--fractions", type=float, nargs="*", default=[0.6, 0.9], help="loads, of the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("bench-mixed"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(measure(parse(sys.argv[1:]))))
    except StartError as error:
        sys.exit(f"mixed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
