"""A program: many storms, two processes at a time, or one again.

    python tests/faults/run.py [--count N] [--first SEED]
    python tests/faults/run.py --seed SEED

A storm that fails is named with the command that plays it again; played alone, it tells what happened, moment by
moment. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

NUM_PROCESSES = 2
NUM_A_TIME = 8


def main() -> int:
    parser = argparse.ArgumentParser(description="Play seeded storms.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        return replay(options.seed)
    return play_all(range(options.first, options.first + options.count))


def replay(seed: int) -> int:
    from faults.storm import run_storm

    report = run_storm(seed)
    for at_s, text in report.log:
        print(f"{at_s:9.4f}  {text}")
    print(f"seed {seed}: {report.failure or 'everything held'}")
    return 1 if report.failure else 0


def play_all(seeds: range) -> int:
    started_s = time.monotonic()
    totals: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        chunks = [seeds[start : start + NUM_A_TIME] for start in range(0, len(seeds), NUM_A_TIME)]
        for failures, counts in pool.imap_unordered(play, chunks):
            totals.update(counts)
            tell(failures)
    took_s = time.monotonic() - started_s
    print(json.dumps({**totals, "seconds": round(took_s, 1), "seeds_per_s": round(len(seeds) / took_s, 1)}))
    return 1 if totals["failed"] else 0


def tell(failures: Iterable[tuple[int, str]]) -> None:
    for seed, failure in failures:
        print(f"seed {seed}: {failure}\n    {replay_command(seed)}", flush=True)


def replay_command(seed: int) -> str:
    return f"python tests/faults/run.py --seed {seed}"


def play(seeds: range) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """What failed of some seeds, and what there was in all of them."""
    from faults.storm import run_storm

    failures, counts = [], Counter[str]()
    for seed in seeds:
        report = run_storm(seed)
        if report.failure is not None:
            failures.append((seed, report.failure))
        counts.update(
            seeds=1,
            failed=report.failure is not None,
            requests=report.num_requests,
            errors=report.num_errors,
            hand_overs=report.num_transfers,
            faults=report.num_faults,
        )
    gc.collect()
    return failures, dict(counts)


sys.path.insert(0, str(Path(__file__).parents[1]))

if __name__ == "__main__":
    raise SystemExit(main())
