"""How long things take in this engine, as Prometheus histograms; vLLM's names where the meaning is the same."""

from __future__ import annotations

from prometheus_client import Histogram

from fourhop.wire.moments import Moment, Timeline

FINE_S = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
COARSE_S = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(name, text, buckets=buckets, registry=None)


class Durations:
    """Observed by the loop: a span when the moment that ends it comes."""

    def __init__(self) -> None:
        self.inter_token = _histogram("vllm:inter_token_latency_seconds", "Between two tokens.", FINE_S)
        self._spans: dict[tuple[Moment, Moment], Histogram] = {
            (Moment.RECEIVED, Moment.PREFILL_STARTED): _histogram(
                "vllm:request_queue_time_seconds", "From arrival to the first step.", COARSE_S
            ),
            (Moment.PREFILL_STARTED, Moment.PREFILL_DONE): _histogram(
                "vllm:request_prefill_time_seconds", "From the first step to the first token.", COARSE_S
            ),
            (Moment.RECEIVED, Moment.PREFILL_DONE): _histogram(
                "vllm:time_to_first_token_seconds", "From arrival to the first token sampled here.", COARSE_S
            ),
            (Moment.RECEIVED, Moment.KV_REQUESTED): _histogram(
                "fourhop:kv_wait_seconds", "From arrival to the start of a pull.", FINE_S
            ),
            (Moment.KV_REQUESTED, Moment.KV_READY): _histogram(
                "fourhop:kv_transfer_seconds", "Of a pull, with the wait for blocks that are still computed.", FINE_S
            ),
            (Moment.KV_READY, Moment.DECODE_STARTED): _histogram(
                "fourhop:decode_wait_seconds",
                "From the end of a pull to the first token that was made with it.",
                FINE_S,
            ),
            (Moment.RECEIVED, Moment.LAST_TOKEN): _histogram(
                "vllm:e2e_request_latency_seconds", "From arrival to the last token.", COARSE_S
            ),
        }

    @property
    def histograms(self) -> list[Histogram]:
        return [self.inter_token, *self._spans.values()]

    def observe(self, end: Moment, timeline: Timeline) -> None:
        """The spans that end with a moment that has just come."""
        at_s = timeline.at_s
        for (start, stop), histogram in self._spans.items():
            if stop is end and start.value in at_s:
                histogram.observe(at_s[end.value] - at_s[start.value])
