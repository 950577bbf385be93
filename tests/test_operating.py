"""What docs/operating.md names exists: metrics in the servers' registries, causes in their code."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from fakes.engines import toy_engine
from fakes.fleet import bench
from fourhop.engine import metrics as engine_metrics
from fourhop.frontend.metrics import FrontendMetrics
from fourhop.router.degraded import CAUSES
from fourhop.service.siblings import merged_metrics
from fourhop.service.tracing import TracingConfig, open_traces
from fourhop.wire.moments import INTERVALS

TEXT = (Path(__file__).parent.parent / "docs" / "operating.md").read_text()
NAME = re.compile(r"\b(?:fourhop_router_|fourhop:)[a-z_]+")


def names_of(registry: CollectorRegistry) -> set[str]:
    found = {family.name for family in registry.collect()}
    return found | {f"{family.name}_total" for family in registry.collect() if family.type == "counter"}


async def known_names() -> set[str]:
    registry = CollectorRegistry()
    FrontendMetrics(registry)
    with open_traces(TracingConfig("http://127.0.0.1:9"), registry):
        pass
    async with bench() as fleet, toy_engine() as engine:
        engine_metrics.register(registry, engine.loop, "toy")
        return names_of(registry) | names_of(fleet.registry)


def test_every_metric_exists() -> None:
    known = asyncio.run(known_names()) | set(NAME.findall(merged_metrics({})))
    assert set(NAME.findall(TEXT)) - known == set()


def test_every_lasting_cause_and_every_interval_is_told_of() -> None:
    assert [cause for cause in CAUSES if f"`{cause}`" not in TEXT] == []
    assert [name for name in INTERVALS.values() if f"`{name}`" not in TEXT] == []


def test_every_cause_of_a_fallback_is_told_of() -> None:
    source = Path(__file__).parent.parent / "src" / "fourhop" / "router"
    code = "".join(path.read_text() for path in source.glob("*.py"))
    given_up = [*re.findall(r'give_up\(run, "([a-z_]+)"', code), "used", "late", "withdrawn", "no_ticket"]
    causes = {f"kv_{cause}" for cause in given_up} | set(re.findall(r'fallbacks\.note\(\s*"([a-z_]+)"', code))
    assert len(causes) > 8 and [cause for cause in causes if f"`{cause}`" not in TEXT] == []
