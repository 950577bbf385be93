"""The frontend's Prometheus metrics. They stand beside an engine's in one registry, so no name is in both."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fourhop.service.fallbacks import Fallbacks

log = logging.getLogger("fourhop.frontend")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class FrontendMetrics:
    """Counts of one server. `render_waiting` is how many requests wait for, or are in, a render thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "fourhop:requests", "Requests that ended, by how: stop, length, refused, ...", ["finish"], registry=registry
        )
        self.fallbacks = Fallbacks(
            Counter("fourhop:fallbacks", "What was done in place of what was asked for.", ["cause"], registry=registry),
            log,
        )
        self.render_waiting = Gauge(
            "fourhop:render_waiting", "Requests that wait for a render thread or are in one.", registry=registry
        )
        self.render_seconds = Histogram(
            "fourhop:render_seconds", "From received to rendered.", registry=registry, buckets=SECONDS
        )
        self.first_token_seconds = Histogram(
            "fourhop:first_token_seconds", "From received to the first token.", registry=registry, buckets=SECONDS
        )
        self.end_to_end_seconds = Histogram(
            "fourhop:request_seconds", "From received to finished.", registry=registry, buckets=SECONDS
        )
