"""The hand-over protocols by the names that `--handoff` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fourhop.router.handoff.fourhop import Tickets
from fourhop.router.handoff.nixl import Nixl
from fourhop.router.handoff.protocol import Handoff

TICKETS: Handoff = Tickets()

STOCK: Mapping[str, Handoff] = MappingProxyType({"nixl": Nixl("pull")})
"""What a stock vLLM can be set up for."""


def stock_handoff(name: str) -> Handoff:
    return STOCK[name]
