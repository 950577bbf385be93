from __future__ import annotations

from prometheus_client import CollectorRegistry

from fourhop.engine.durations import Durations
from fourhop.frontend.metrics import FrontendMetrics


def test_a_frontend_and_an_engine_share_a_registry() -> None:
    """As they do in `fourhop serve`; a name that both had would be refused."""
    registry = CollectorRegistry()
    FrontendMetrics(registry)
    for histogram in Durations().histograms:
        registry.register(histogram)
