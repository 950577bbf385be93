"""The table of results in the README: runs the benchmarks, keeps what they printed, writes the table anew.

    python benchmarks/results.py [--runs 3] [--only engine handover] [--vllm-python PYTHON] [--table]
                                 [--arguments TEXT]

Each benchmark is run `--runs` times, one after the other, alone on the machine. What came of it is kept in
`benchmarks/results/NAME.json` with the date, the machine and the commands; what is not run again stays as it was. With
`--table` nothing is run. `mixed` takes a quarter of an hour, `split_pays` hours: they are run only if they are named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourhop.bench.machine import describe_machine

HERE = Path(__file__).parent
FOLDER = HERE / "results"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
BENCHMARKS = ("handover", "frontend", "router", "engine", "mixed", "split_pays")
USUAL = BENCHMARKS[:-2]
WITH_VLLM = ("frontend", "engine")


@dataclass(frozen=True)
class Claim:
    """A figure that a benchmark prints, and what it is to reach."""

    benchmark: str
    key: str
    text: str
    sign: str
    bar: float

    def is_reached(self, value: float) -> bool:
        return value >= self.bar if self.sign == ">=" else value <= self.bar


CLAIMS = (
    Claim("split_pays", "p99_itl_ratio", "p99 ITL, replicas / split, default chunk budget", ">=", 10),
    Claim("split_pays", "p99_itl_ratio_tuned", "p99 ITL, replicas / split, best chunk budget", ">=", 3),
    Claim("split_pays", "goodput_ratio", "goodput, split / best replicas", ">=", 1.31),
    Claim("split_pays", "ttft_ratio", "median TTFT, split / replicas, prefill 30 % busy", "<=", 1.1),
    Claim("split_pays", "auto_ttft_ratio", "median TTFT, router's choice / replicas, at 60 %", "<=", 1.5),
    Claim("split_pays", "auto_p99_itl_ratio", "p99 ITL, replicas / router's choice, at 60 %", ">=", 3),
    Claim(
        "mixed", "least_auto_over_better", "goodput at mixed load, router's choice / better of local and split", ">=", 1
    ),
    Claim("handover", "shm_over_copy", "a pull over shm / one memory copy, 92 MB", "<=", 1.3),
    Claim("handover", "shm_overlap_ms", "hand-over with overlap, longest of 500 to 4,000 tokens, ms", "<=", 15),
    Claim("handover", "tcp_over_raw", "tcp / a bare socket", ">=", 0.6),
    Claim("handover", "nixl_over_raw", "nixl / bare NIXL", ">=", 0.6),
    Claim("handover", "turn5_over_turn1", "TTFT of a fifth turn / of the first, 500 new tokens each", "<=", 1.25),
    Claim("frontend", "render_over_vllm", "render of a 9,000-token chat, vLLM's CPU time / ours", ">=", 10),
    Claim("frontend", "turn20_over_turn2", "render, twentieth turn / second", "<=", 1.1),
    Claim("frontend", "derender_1000_over_vllm", "derender at 1,000 tokens, vLLM's CPU time / ours", ">=", 100),
    Claim("frontend", "derender_growth", "derender, a token at 2,000 / at 250", "<=", 1.1),
    Claim("frontend", "state_bytes", "state of a derendered stream, bytes", "<=", 2048),
    Claim("frontend", "parse_over_detok", "derender in process / plain detokenization", "<=", 1.2),
    Claim("frontend", "batch_4000_ms", "derender of 4,000 tokens with log-probabilities, ms", "<=", 60),
    Claim("router", "added_p50_ms", "added by the router at 500 split requests/s, median ms", "<=", 1),
    Claim("router", "added_p99_ms", "the same, p99 ms", "<=", 5),
    Claim("router", "split_rps", "split requests/s on one core", ">=", 1500),
    Claim("router", "chunks_per_s", "streamed events/s to clients on one core", ">=", 20_000),
    Claim("router", "rps_100k", "split requests/s of 100,000 prompt tokens on one core", ">=", 50),
    Claim("router", "placement_us", "placement among 1,000 engines, a million pages indexed, µs", "<=", 100),
    Claim("engine", "prefill_over_matmul", "prefill of 512 tokens / the matrix products alone", ">=", 0.85),
    Claim("engine", "decode_over_bandwidth", "decode, one stream / reading the weights once", ">=", 0.7),
    Claim("engine", "batch8_over_1", "decode, eight streams / one", ">=", 5),
    Claim("engine", "prefill_512_over_vllm", "prefill of 512 tokens, ours / vLLM's CPU build", ">=", 1.2),
    Claim("engine", "prefill_2048_over_vllm", "prefill of 2,048 tokens, ours / vLLM's", ">=", 1.6),
    Claim("engine", "decode_1_over_vllm", "decode, one stream, ours / vLLM's", ">=", 1.4),
    Claim("engine", "decode_8_over_vllm", "decode, eight streams, ours / vLLM's", ">=", 1.6),
)


def run(name: str, num_runs: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What the last lines of so many runs say, and where and when that was."""
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    runs = []
    for number in range(num_runs):
        print(f"== {name}, run {number + 1} of {num_runs}", flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout, flush=True)
        runs.append(json.loads(done.stdout.rstrip().rpartition("\n")[2]))
    typed = shlex.join(["python", f"benchmarks/{name}.py", *("PYTHON" if "/" in each else each for each in arguments)])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "command": typed, "machine": describe_machine(), "runs": runs}


def rows_of(results: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of the table: each claim that was measured, with its median, its spread and whether it is reached."""
    lines = ["| | bar | measured | spread | |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        runs = results.get(claim.benchmark, {}).get("runs", [])
        values = [each[claim.key] for each in runs if each.get(claim.key) is not None]
        if values:
            middle = statistics.median(values)
            spread = f"{shown(min(values))} to {shown(max(values))}" if len(values) > 1 else "one run"
            bar = f"{'≥' if claim.sign == '>=' else '≤'} {claim.bar:g}"
            reached = "reached" if claim.is_reached(middle) else "missed"
            lines.append(f"| {claim.text} | {bar} | {shown(middle)} | {spread} | {reached} |")
    return lines


def shown(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def section(results: dict[str, dict[str, Any]]) -> str:
    if not results:
        return "Nothing was measured yet.\n"
    machines = {json.dumps(each["machine"]): each["machine"] for each in results.values()}
    lines = [*rows_of(results), ""]
    for machine in machines.values():
        lines.append(
            ", ".join(f"{name} {machine[name]}" for name in ("processor", "cores", "memory", "packages")) + "."
        )
    for each in results.values():
        num_runs = len(each["runs"])
        lines.append(f"`{each['command']}`: {each['date']}, {num_runs} run{'' if num_runs == 1 else 's'}.")
    return "\n".join(lines) + "\n"


def replaced(text: str, new: str) -> str:
    """The text with what stands between the two marks replaced. Raises ValueError without them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN.strip()} and {END.strip()}")
    return head + begin + new + end + tail


def read_results() -> dict[str, dict[str, Any]]:
    paths = [FOLDER / f"{name}.json" for name in BENCHMARKS]
    return {path.stem: json.loads(path.read_text()) for path in paths if path.exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=BENCHMARKS, default=USUAL)
    parser.add_argument("--vllm-python", help="a Python with vLLM, for its figures in the same runs")
    parser.add_argument("--arguments", default="", help="more for each benchmark, such as '--seconds 60 --rounds 1'")
    parser.add_argument("--table", action="store_true", help="write the table from what is kept")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in [] if options.table else options.only:
        beside = ["--vllm-python", options.vllm_python] if options.vllm_python and name in WITH_VLLM else []
        result = run(name, options.runs, [*beside, *shlex.split(options.arguments)])
        (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    new = section(read_results())
    README.write_text(replaced(README.read_text(), new))
    print(new)
    print(json.dumps({"load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
