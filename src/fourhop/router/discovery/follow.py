"""Asks the sources again and again, each in a task of its own: one that hangs or fails holds up no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fourhop.router.discovery.changes import differing
from fourhop.router.discovery.source import Engines, Source, SourceError, union
from fourhop.router.policy import EngineRole
from fourhop.service.tasks import end_tasks

log = logging.getLogger(__name__)


@dataclass
class Discovery:
    """The engines of all sources. `listed` are those of the flags."""

    listed: Engines
    sources: Sequence[Source]
    sleep: Callable[[float], Awaitable[None]]
    failures: dict[str, str] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _differing: dict[str, list[str]] = field(default_factory=dict)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow(one), name=f"engines of {one.name}") for one in self.sources]

    async def close(self) -> None:
        await end_tasks(self._tasks)

    def wanted(self) -> dict[str, EngineRole]:
        """The engines that belong to the fleet."""
        answers = {"flags": self.listed} | {source.name: source.engines for source in self.sources}
        differs = differing(answers)
        for url in differs.keys() - self._differing.keys():
            log.warning("%s has another role by each of: %s; the first is right", url, ", ".join(differs[url]))
        self._differing = differs
        return union(answers.values())

    async def look(self, source: Source) -> None:
        """Ask one source. A failure is told when it begins and when it is another; the engines stay."""
        try:
            await source.look()
        except SourceError as error:
            self._note(source, str(error))
        except Exception as error:  # the source's own task: nobody else would tell, and nobody look again
            self._note(source, f"an unexpected {type(error).__name__}", error)
        else:
            self._note(source, None)

    def _note(self, source: Source, failure: str | None, bug: Exception | None = None) -> None:
        before = self.failures.pop(source.name, None)
        if failure is not None:
            self.failures[source.name] = failure
        if failure == before:
            return
        if failure is None:
            log.info("engines (%s): well again", source.name)
        else:
            log.warning("engines (%s) stay as they are: %s", source.name, failure, exc_info=bug)

    async def _follow(self, source: Source) -> None:
        while True:
            await self.look(source)
            await self.sleep(source.interval_s)


class DiscoveryCollector(Collector):
    """Whether each source answers, and how many engines it names."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def collect(self) -> Iterable[GaugeMetricFamily]:
        well = GaugeMetricFamily(
            "fourhop_router_source_up", "1 if the last look for engines succeeded", labels=["source"]
        )
        named = GaugeMetricFamily(
            "fourhop_router_source_engines", "Engines that a source names, or named last", labels=["source"]
        )
        for source in self._discovery.sources:
            well.add_metric([source.name], float(source.name not in self._discovery.failures))
            named.add_metric([source.name], len(source.engines))
        yield well
        yield named
