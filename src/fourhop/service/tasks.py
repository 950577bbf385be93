"""Ending tasks that run until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel them and wait until all have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
