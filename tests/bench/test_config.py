"""Flags that cannot be are refused, each in one line."""

from __future__ import annotations

from typing import Any

import pytest

from fourhop.bench.config import MetricsConfig, ResultConfig, TargetConfig
from fourhop.bench.dataset_config import DatasetConfig


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (TargetConfig, {"base_url": "nope"}, "not the URL of a server: nope"),
        (TargetConfig, {"host": ""}, "not the URL of a server"),
        (TargetConfig, {"metrics_url": ("a:1/metrics",)}, "not an http URL: a:1/metrics"),
        (MetricsConfig, {"goodput": ("ttft",)}, "a limit is NAME:MILLISECONDS"),
        (MetricsConfig, {"goodput": ("itl:3",)}, "a limit is ttft, tpot, e2el"),
        (MetricsConfig, {"goodput": ("ttft:nan",)}, "with a positive number"),
        (MetricsConfig, {"percentile_metrics": "ttft,speed"}, "no metric 'speed'"),
        (MetricsConfig, {"metric_percentiles": "50,x"}, "numbers by commas"),
        (MetricsConfig, {"metric_percentiles": "101"}, "0 to 100"),
        (TargetConfig, {"header": ("A:1",)}, "KEY=VALUE"),
        (TargetConfig, {"header": ("A=1\r\nB=2",)}, "KEY=VALUE"),
        (TargetConfig, {"endpoint": "v1/completions"}, "is a path"),
        (TargetConfig, {"endpoint": "/v1/chat/completions"}, "--backend vllm-chat"),
        (TargetConfig, {"request_timeout_s": 0.0}, "positive"),
        (DatasetConfig, {"random_input_len": 0}, "random_input_len must be at least 1"),
        (DatasetConfig, {"random_range_ratio": 1.0}, "less than 1"),
        (DatasetConfig, {"length_scale": 0.0}, "length_scale"),
        (DatasetConfig, {"think_time_s": -1.0}, "think_time_s"),
        (ResultConfig, {"metadata": ("a",)}, "KEY=VALUE"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**wrong)


def test_a_target_is_host_and_port_or_a_url() -> None:
    assert TargetConfig(port=9).url == "http://127.0.0.1:9/v1/completions"
    assert TargetConfig(base_url="https://h/x/", backend="generate").url == "https://h/x/inference/v1/generate"
    assert TargetConfig(endpoint="/gateway/completions").url == "http://127.0.0.1:8000/gateway/completions"
    assert TargetConfig().metrics_urls == ("http://127.0.0.1:8000/metrics",)
    assert TargetConfig(metrics_url=("http://a/metrics", "http://b/metrics")).metrics_urls[1] == "http://b/metrics"


def test_limits_are_given_in_milliseconds() -> None:
    assert MetricsConfig(goodput=("ttft:2000", "tpot:30.5")).limits() == {"ttft": 2.0, "tpot": 0.0305}
