"""What `fourhop up` shows: a bar for each engine while it loads (lines where there is no terminal), then its log."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fourhop.service.progress import percent_of
from fourhop.up.plan import EnginePlan


class Display:
    """Use as a context while engines start; lines may come before, in and after it."""

    def __init__(self, plans: Iterable[EnginePlan], stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        columns = (
            TextColumn("{task.description:10}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %  {task.fields[state]}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=Console(file=stream), disable=not stream.isatty())
        self._tasks: dict[str, TaskID] = {
            plan.name: self._bars.add_task(plan.name, total=100, state="starting") for plan in plans
        }

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()

    def line(self, name: str, text: str) -> None:
        """An engine's line, under its name; its loading moves the bar instead where there is one."""
        percent = percent_of(text)
        if percent is None or self._bars.disable:
            self._write(name, text)
        else:
            self._bars.update(self._tasks[name], completed=percent, state="loading weights")

    def ready(self, name: str) -> None:
        if self._bars.disable:
            self._write(name, "ready")
        else:
            self._bars.update(self._tasks[name], completed=100, state="ready")
            self._bars.stop_task(self._tasks[name])

    def _write(self, name: str, text: str) -> None:
        # Through rich, which puts the line above the bars while they are there.
        self._bars.console.print(f"{name} | {text}", markup=False, highlight=False, soft_wrap=True)


def summary(
    url: str, model: str, plans: Iterable[EnginePlan], pids: dict[str, int], pid: int, connector: str | None
) -> str:
    """What runs where, and a line to copy. `connector` None: no KV moves."""
    rows = [("frontend+router", url, f"pid {pid}", "")]
    for plan in plans:
        cores = ",".join(str(core) for core in plan.cores)
        rows.append((plan.name, plan.url, f"pid {pids.get(plan.name, '?')}", f"core {cores}"))
    lines = [f"  {name:16} {where:24} {process:12} {cores}".rstrip() for name, where, process, cores in rows]
    moving = f"KV blocks move over {connector}" if connector else "each engine does whole requests"
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    return "\n".join(
        [
            f"fourhop is ready: {model}, {moving}. Ctrl-C stops everything.",
            *lines,
            "",
            f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        ]
    )
