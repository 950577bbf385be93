"""The router's metrics. Names are `fourhop_router_*`; an engine's own are on the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fourhop.router.fleet import Fleet
from fourhop.router.ledger import HoldState, Ledger

HANDOVER_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class RouterMetrics:
    """Counters of what the router did. One registry belongs to one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("fourhop_router_requests", "Requests by how they ended", ["outcome"], registry=registry)
        self.placements = Counter(
            "fourhop_router_placements", "Choices by how they were placed, and why", ["reason"], registry=registry
        )
        self.retries = Counter(
            "fourhop_router_retries",
            "Legs that failed and were given to another engine",
            ["verdict"],
            registry=registry,
        )
        self.no_transfer = Counter(
            "fourhop_router_no_transfer",
            "Splits whose decode engine had to compute the prompt",
            ["cause"],
            registry=registry,
        )
        self.handover_s = Histogram(
            "fourhop_router_handover_seconds",
            "From the end of prefill to the KV being in place at the decode engine",
            buckets=HANDOVER_BUCKETS_S,
            registry=registry,
        )


class StateCollector(Collector):
    """Gauges that are read from the fleet and the ledger when someone asks."""

    def __init__(self, fleet: Fleet, ledger: Ledger, wall_clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._wall_clock = wall_clock

    def collect(self) -> Iterable[GaugeMetricFamily]:
        self._ledger.expire(self._wall_clock())
        up = GaugeMetricFamily("fourhop_router_engine_up", "1 if the engine gets requests", labels=["engine", "role"])
        busy = GaugeMetricFamily("fourhop_router_in_flight", "Requests with the engine", labels=["engine", "role"])
        for worker in self._fleet.workers.values():
            up.add_metric([worker.name, worker.role], float(worker.down is None))
            busy.add_metric([worker.name, worker.role], worker.in_flight)
        yield up
        yield busy
        yield GaugeMetricFamily("fourhop_router_owed_holds", "Holds not ended yet", value=len(self._ledger.owed))
        yield GaugeMetricFamily(
            "fourhop_router_leaked_holds", "Holds nobody wants whose release failed", value=self._ledger.num_leaked
        )
        ended = GaugeMetricFamily("fourhop_router_ended_holds", "Holds by how they ended", labels=["state"])
        for state in HoldState:
            ended.add_metric([state.value], self._ledger.ended[state])
        yield ended
