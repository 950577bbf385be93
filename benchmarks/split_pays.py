"""What splitting pays on this machine: p99 ITL, goodput and TTFT of one prefill and one decode engine, as ratios to two
replicas on the same two cores.

    python benchmarks/split_pays.py [--seconds 120] [--rounds 3] [--auto 'FLAGS']

First a request alone on the split gives the unloaded TTFT and TPOT, and 32 open requests at a time give the capacity of
the replicas (default chunk budget): the most that they do, which eight open fall short of and 48 do not exceed. From
these follow limits and rates, which are printed before anything is compared: TTFT four unloaded ones, TPOT twice the
unloaded one; a rate that keeps prefill at most 30 % busy, and 40 to 60 % and more of the capacity. Then the split, the
replicas with every chunk budget and, with `--auto`, a `fourhop up` with those flags (the router's own choice) take
turns, asked the same prompts at the same times, prefix cache off. A ratio over several rates is the median of their
ratios; what enters is the median of the rounds. The replicas are those with the best budget, except for
`p99_itl_ratio` and `auto_p99_itl_ratio`, which are against the default one. `goodput_ratio` and `auto_goodput_ratio`
count goodput as vLLM and the A100 post do, with `_distserve` as DistServe does. The report with the curves goes to
`--output-dir`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from fourhop.bench.claims import BARS, Calibration, claims_of, is_reached, plan_rates
from fourhop.bench.compare import Lab, compare_all, open_lab, print_plan, write_report
from fourhop.bench.comparison import CompareConfig, plan_run, plan_setups
from fourhop.bench.findings import Findings
from fourhop.bench.machine import describe_machine
from fourhop.bench.report import Report, comparison_table, goodput_table
from fourhop.bench.result import Result
from fourhop.bench.runs import Plan
from fourhop.bench.setups import Setup
from fourhop.bench.table import number, table
from fourhop.checkpoint import DEFAULT_MODEL
from fourhop.wire.errors import StartError

NUM_ALONE = 5
NUM_OPEN = 32
NUM_FOR_CAPACITY = 48


async def closed_loop(lab: Lab, setup: Setup, plan: Plan, num_prompts: int, num_open: int) -> Result:
    """A run with always this many requests open."""
    load = dataclasses.replace(
        plan.load, request_rate=float("inf"), num_prompts=num_prompts, max_concurrency=num_open, seed=plan.load.seed + 1
    )
    title = f"calibration, {num_open} open"
    (result,) = [one async for one in lab.measure(setup, [dataclasses.replace(plan, load=load, title=title)])]
    if result.summary.failed or result.is_cut:
        raise StartError(f"the calibration failed: {dict(result.summary.failures) or 'interrupted'}")
    return result


async def calibrate(lab: Lab, config: CompareConfig, setups: list[Setup], model: str) -> Calibration:
    """What follows from it is planned before anything is compared, so it is printed first."""
    plan = plan_run(config, model, 1.0, -1)
    split, whole = setups[0], setups[1]
    alone = await closed_loop(lab, split, plan, NUM_ALONE, 1)
    full = await closed_loop(lab, whole, plan, NUM_FOR_CAPACITY, NUM_OPEN)
    ttft_s, tpot_s = alone.summary.metrics["ttft"].median, alone.summary.metrics["tpot"].median
    assert ttft_s is not None and tpot_s is not None and full.summary.request_rate is not None
    calibration = Calibration(ttft_s, tpot_s, full.summary.request_rate)
    print(f"alone: TTFT {calibration.ttft_s * 1000:.0f} ms, TPOT {calibration.tpot_s * 1000:.1f} ms")
    print(f"capacity of the replicas: {calibration.capacity:.3f} req/s")
    return calibration


async def measure(options: argparse.Namespace) -> int:
    config = config_of(options)
    setups = plan_setups(config, options.model)
    async with open_lab(options.model, config.output_dir / "logs", config.num_warmups) as lab:
        calibration = await calibrate(lab, config, setups, options.model)
        rates = plan_rates(calibration, options.fractions)
        config = dataclasses.replace(
            config, goodput=calibration.limits(), request_rates=",".join(f"{rate:g}" for rate in rates.all())
        )
        print_plan(config, setups)
        outcome = await compare_all(lab, config, setups, options.model)
    report = Report(config, options.model, Findings(outcome.runs), describe_machine())
    print("\n".join([comparison_table(report), "", goodput_table(report), ""]))
    claims = claims_of(report.findings, rates)
    print(claims_table(claims))
    for path in write_report(report, config.output_dir):
        print(f"written: {path}")
    print(json.dumps(claims | {"rounds": config.rounds, "machine": report.machine}))
    return outcome.status


def claims_table(claims: dict[str, float | None]) -> str:
    words = {True: "reached", False: "missed", None: ""}
    rows = [
        [name, number(value, 2), "{} {:g}".format(*BARS[name]) if name in BARS else "", words[is_reached(name, value)]]
        for name, value in claims.items()
    ]
    return table(["claim", "value", "bar", ""], rows)


def config_of(options: argparse.Namespace) -> CompareConfig:
    return CompareConfig(
        prefill=1,
        decode=1,
        chunk_budgets=options.chunk_budgets,
        setup=() if options.auto is None else (f"router's choice={options.auto}",),
        engine_flags=options.engine_flags,
        num_prompts=options.num_prompts,
        seconds=None if options.num_prompts else options.seconds,
        input_len=options.input_len,
        input_ratio=options.input_ratio,
        output_len=options.output_len,
        rounds=options.rounds,
        seed=options.seed,
        output_dir=options.output_dir,
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=120.0, help="length of a run")
    parser.add_argument("--num-prompts", type=int, help="requests of a run, instead of its length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=768)
    parser.add_argument("--input-ratio", type=float, default=1 / 3)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--chunk-budgets", default="default,512,256,128", help="of the replicas; the default one first")
    parser.add_argument("--auto", help="flags of `fourhop up` for the router's own choice, such as `--prefill 1 ...`")
    parser.add_argument("--engine-flags", default="", help="for every engine, such as `--num-threads 1`")
    parser.add_argument("--fractions", type=float, nargs="*", default=[0.75, 0.9], help="more rates, of the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("bench-split-pays"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(measure(parse(sys.argv[1:]))))
    except StartError as error:
        sys.exit(f"split_pays: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
