"""What holds for every test: examples are the same in each run, no test asserts a time, logging stays as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from fourhop.service import logs

settings.register_profile(
    "fourhop", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("fourhop")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-python", help="a Python that vLLM is installed for; see `make test-vllm`")


@pytest.fixture(autouse=True)
def _logging_stays() -> Iterator[None]:
    """A command that runs in a test sets logging up for its process; the next test has it as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in logs.NOISY}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
