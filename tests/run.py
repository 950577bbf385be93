"""`make test`: every test, each part in a process of its own and two parts at a time.

What one part leaves in its process cannot reach another, memory is given back, and both cores of a small machine work.
The output of a part appears when it has ended; the last line is the sum.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

TESTS = Path(__file__).parent
NUM_AT_ONCE = 2
NO_TESTS = 5
"""pytest's exit status where a part has no test."""

FIRST = ("flows/test_same_tokens.py", "router", "frontend", "engine", "flows/test_kills.py", "faults", "bench")
"""The longest parts, which begin first so that they do not end last."""

NOT_PARTS = ("fakes", "contracts", "flows")


def parts() -> list[Path]:
    """Each folder of tests, each flow and each file at the top, the longest first."""
    folders = [path for path in TESTS.iterdir() if path.is_dir() and path.name not in NOT_PARTS]
    found = [path for path in folders if any(path.rglob("test_*.py"))]
    found += [*TESTS.glob("flows/test_*.py"), *TESTS.glob("test_*.py")]
    order = [TESTS / name for name in FIRST]
    return sorted(found, key=lambda path: (order.index(path) if path in order else len(order), str(path)))


Outcome = tuple[Path, int, str, float]


def run(part: Path) -> Outcome:
    """One part's exit status, output and seconds."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(part)], capture_output=True, text=True, check=False
    )
    return part, done.returncode, done.stdout + done.stderr, time.monotonic() - began_s


def run_all() -> Iterator[Outcome]:
    """Every part as it ends. Ctrl-C reaches the parts at work by itself; none begins after it."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        futures = [pool.submit(run, part) for part in parts()]
        try:
            yield from (future.result() for future in as_completed(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def main() -> int:
    totals: Counter[str] = Counter()
    failed_parts: list[str] = []
    for part, status, output, seconds in run_all():
        name = str(part.relative_to(TESTS))
        print(f"== {name} ({seconds:.0f} s)\n{output}", flush=True)
        summary = output.rstrip().rpartition("\n")[2]
        totals.update({word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", summary)})
        if status not in (0, NO_TESTS):
            failed_parts.append(name)
    if failed_parts:
        print(f"failed: {', '.join(sorted(failed_parts))}")
    num_failed = max(totals["failed"] + totals["error"], len(failed_parts))
    print(f"{totals['passed']} passed, {num_failed} failed")
    return 1 if failed_parts else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
