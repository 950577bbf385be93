"""The engine's Prometheus metrics, under vLLM's names where the meaning is the same. Read from the loop on scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fourhop.engine.loop import EngineLoop


def register(registry: CollectorRegistry, loop: EngineLoop, model: str) -> None:
    """Add an engine's metrics to a registry."""
    registry.register(EngineCollector(loop, model))
    for histogram in loop.jobs.durations.histograms:
        registry.register(histogram)


class EngineCollector(Collector):
    """Turns the loop's state into metric families; nothing is counted twice or kept here."""

    def __init__(self, loop: EngineLoop, model: str) -> None:
        self._loop = loop
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        scheduler, counters, transfers = self._loop.scheduler, self._loop.jobs.counters, self._loop.transfers
        now = self._loop.occupancy
        used = 1 - now.num_free_blocks / now.num_blocks
        yield self._gauge("vllm:num_requests_running", "Sequences that compute.", now.num_running)
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Sequences that wait for a place or for KV.",
            now.num_waiting + now.num_loading,
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", used)
        yield self._gauge("fourhop:held_blocks", "Blocks held for other engines.", now.num_held_blocks)
        yield self._gauge("fourhop:held_requests", "Tickets that are not pulled yet.", now.num_held)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens accepted.", counters.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens sampled.", counters.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions by recompute.", scheduler.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up.", scheduler.num_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found.", scheduler.num_cache_hits)
        yield self._counter("fourhop:kv_transfers", "Pulls that ended well.", counters.transfers)
        yield self._counter("fourhop:kv_transfer_bytes", "Bytes pulled.", counters.transfer_bytes)
        yield self._counter("fourhop:kv_recomputed", "Pulls replaced by recomputing.", counters.recomputed)
        expired = 0 if transfers is None else transfers.ledger.num_expired
        yield self._counter("fourhop:kv_leases_expired", "Tickets that nobody pulled in time.", expired)
        yield self._by_label("vllm:request_success", "Ended requests.", "finished_reason", counters.finished)
        yield self._by_label("fourhop:kv_transfer_failures", "Failed pulls.", "cause", counters.transfer_failures)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_label(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.copy().items():
            family.add_metric([*self._labels.values(), key], value)
        return family
