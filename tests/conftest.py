"""What holds for every test: examples are the same in every run, and no test asserts a time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fourhop", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("fourhop")
