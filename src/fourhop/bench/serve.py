"""`fourhop bench serve`: one run, its table, its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fourhop.bench.config import ResultConfig
from fourhop.bench.result import Result, as_json, as_table, file_name
from fourhop.bench.runs import Plan, open_bench
from fourhop.wire.errors import StartError

INTERRUPTED = 130


async def run_serve(plan: Plan, config: ResultConfig) -> int:
    """Run, print, save. Returns the exit status: 1 if no request succeeded, 130 after Ctrl-C. Raises StartError."""
    plan = dataclasses.replace(plan, keeps_text=config.save_detailed, shows_progress=not config.disable_tqdm)
    if plan.sampling.temperature is None:
        print("temperature is not given: the server's default holds")
    async with open_bench(plan.target) as bench:
        result = await bench.run(plan)
    print(as_table(result, plan.metrics))
    if config.save_result or config.save_detailed or config.append_result:
        print(f"saved: {save(result, plan, config)}")
    return exit_status(result)


def exit_status(result: Result) -> int:
    if result.is_cut:
        return INTERRUPTED
    return 0 if result.is_success else 1


def save(result: Result, plan: Plan, config: ResultConfig) -> Path:
    """Write the result. Raises StartError if it cannot be written."""
    path = (config.result_dir or Path()) / file_name(result, config)
    return write(path, as_json(result, plan.metrics, config), appends=config.append_result)


def write(path: Path, values: Mapping[str, Any], *, appends: bool) -> Path:
    """Write a line of JSON, its folder too. JSON has no infinity and no NaN: msgspec writes null for them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if appends else "wb") as file:
            file.write(msgspec.json.encode(values) + b"\n")
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
    return path
