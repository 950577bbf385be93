"""A router's settings are refused in one line."""

from __future__ import annotations

import pytest

from fourhop.router.config import EventSource, GoodputConfig, RouterConfig
from fourhop.wire.errors import StartError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "at least one engine"),
        ({"prefill": ("localhost:1",)}, "not the URL of an engine: localhost:1"),
        ({"prefill": ("http://a",), "decode": ("http://a",)}, "http://a is listed twice"),
        ({"prefill": ("http://a", "http://a/")}, "http://a/ is listed twice"),
        ({"prefill": ("http://a",), "max_retries": -1}, "max_retries"),
        ({"prefill": ("http://a",), "idle_timeout_s": 0.0}, "idle_timeout_s"),
        ({"prefill": ("http://a",), "stall_timeout_s": 0.0}, "stall_timeout_s"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(StartError, match=message):
        RouterConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"ttft_ms": -1.0}, "ttft_ms"), ({"itl_ms": float("inf")}, "itl_ms"), ({"max_queued": -1}, "max_queued")],
)
def test_bad_targets(settings: dict[str, float], message: str) -> None:
    with pytest.raises(StartError, match=message):
        GoodputConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("addresses", [("a:5557",), ("tcp://a:5557", "a:5558"), ("http://a:5557",)])
def test_where_events_come_from_is_a_zmq_address(addresses: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="not a ZMQ address, such as tcp://HOST:PORT: "):
        EventSource(*addresses)


def test_the_upstream_key_is_not_printed() -> None:
    assert "hidden" not in repr(RouterConfig(("http://a",), upstream_api_key="hidden"))
    assert "hidden" not in repr(GoodputConfig(admin_key="hidden"))
