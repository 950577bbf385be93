"""The router's metrics. Names are `fourhop_router_*`; an engine's own are on the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fourhop.router.admission import Queue
from fourhop.router.degraded import CAUSES, Degraded
from fourhop.router.fleet import Fleet
from fourhop.router.leases import LeaseKeeper
from fourhop.router.ledger import HoldState, Ledger
from fourhop.service.fallbacks import Fallbacks

log = logging.getLogger(__name__)

HANDOVER_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Labelled(dict[str, Counter]):
    """A counter for each value of its one label. Each is looked up once: the library takes a lock every time."""

    def __init__(self, name: str, text: str, label: str, registry: CollectorRegistry) -> None:
        super().__init__()
        self._all = Counter(name, text, [label], registry=registry)

    def __missing__(self, value: str) -> Counter:
        one = self[value] = self._all.labels(value)
        return one


class RouterMetrics:
    """Counters of what the router did. One registry belongs to one server."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = Labelled("fourhop_router_requests", "Requests by how they ended", "outcome", registry)
        self.placements = Labelled(
            "fourhop_router_placements", "Choices by how they were placed, and why", "reason", registry
        )
        self.fallbacks = Fallbacks(
            Counter(
                "fourhop_router_fallbacks",
                "What was done in place of what was asked for, and why",
                ["cause"],
                registry=registry,
            ),
            log,
            clock,
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
        self.transfer_failures = Counter(
            "fourhop_router_transfer_failures",
            "Transfers that a decode engine gave up, and why",
            ["cause"],
            registry=registry,
        )
        self.moved = Counter(
            "fourhop_router_moved",
            "Streams that went on at another engine while they ran, with their KV (ticket) or without",
            ["with"],
            registry=registry,
        )
        self.disagreements = Counter(
            "fourhop_router_disagreements", "Requests of which two engines made different tokens", registry=registry
        )
        self.prefix_matches = Labelled(
            "fourhop_router_prefix_matches",
            "Split requests by how their prompt relates to the KV that decode engines are known to have",
            "relation",
            registry,
        )
        self.prefix_tickets = Labelled(
            "fourhop_router_prefix_tickets",
            "Known beginnings of prompts by what became of their hand-over to the prefill engine",
            "outcome",
            registry,
        )
        self.prefix_tokens = Counter(
            "fourhop_router_prefix_tokens",
            "Tokens whose KV prefill engines pulled from decode engines",
            registry=registry,
        )
        self.shed = Counter(
            "fourhop_router_shed",
            "Requests that were refused to keep others in time, and why",
            ["cause"],
            registry=registry,
        )
        self.housekeeping = Counter(
            "fourhop_router_housekeeping_failures",
            "Unexpected errors of what the router does every second",
            ["task"],
            registry=registry,
        )
        self.queue_s = self._histogram(registry, "queue", "Time that requests with targets waited for a place")
        self.transfer_wait_s = self._histogram(
            registry, "transfer_wait", "From a decode leg being sent to its engine asking for the KV"
        )
        self.transfer_s = self._histogram(
            registry, "transfer", "From the KV being asked for to its being in place; prefill may still be at work"
        )
        self.handover_s = self._histogram(
            registry, "handover", "From the end of prefill to the first token that the decode engine made"
        )

    @staticmethod
    def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
        return Histogram(f"fourhop_router_{name}_seconds", text, buckets=HANDOVER_BUCKETS_S, registry=registry)


class StateCollector(Collector):
    """What is read from the fleet, the ledger, the leases and the queue when someone asks, and what is missing."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        leases: LeaseKeeper,
        queue: Queue,
        degraded: Degraded,
        wall_clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._degraded = degraded
        self._fleet = fleet
        self._ledger = ledger
        self._leases = leases
        self._wall_clock = wall_clock

    def collect(self) -> Iterable[GaugeMetricFamily]:
        self._ledger.expire(self._wall_clock())
        up = GaugeMetricFamily("fourhop_router_engine_up", "1 if the engine gets requests", labels=["engine", "role"])
        drains = GaugeMetricFamily("fourhop_router_draining", "1 if the engine drains", labels=["engine", "role"])
        busy = GaugeMetricFamily("fourhop_router_in_flight", "Requests with the engine", labels=["engine", "role"])
        leaves = GaugeMetricFamily("fourhop_router_leaving", "1 if the engine leaves", labels=["engine", "role"])
        for worker in self._fleet.workers.values():
            leaves.add_metric([worker.name, worker.role], float(worker.is_leaving))
            up.add_metric([worker.name, worker.role], float(worker.down is None))
            drains.add_metric([worker.name, worker.role], float(worker.is_draining))
            busy.add_metric([worker.name, worker.role], worker.in_flight)
        yield up
        yield drains
        yield leaves
        yield busy
        degraded = GaugeMetricFamily(
            "fourhop_router_degraded", "1 if the router has to do without something", labels=["cause"]
        )
        lasting = self._degraded.lasting()
        for cause in CAUSES:
            degraded.add_metric([cause], float(cause in lasting))
        yield degraded
        yield GaugeMetricFamily("fourhop_router_queued", "Requests that wait for a place", value=len(self._queue))
        yield GaugeMetricFamily("fourhop_router_owed_holds", "Holds not ended yet", value=len(self._ledger.owed))
        yield GaugeMetricFamily(
            "fourhop_router_leaked_holds", "Holds nobody wants whose release failed", value=self._ledger.num_leaked
        )
        yield GaugeMetricFamily(
            "fourhop_router_engines_given_up", "Times an engine fell silent", value=self._fleet.num_given_up
        )
        yield GaugeMetricFamily(
            "fourhop_router_stray_holds", "Holds of ours that only their engine knew of", value=self._leases.num_strays
        )
        ended = GaugeMetricFamily("fourhop_router_ended_holds", "Holds by how they ended", labels=["state"])
        for state in HoldState:
            ended.add_metric([state.value], self._ledger.ended[state])
        yield ended
