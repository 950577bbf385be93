"""What holds for every test: examples are the same in every run, and no test asserts a time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fourhop", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("fourhop")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-python", help="a Python that vLLM is installed for; see `make test-vllm`")
