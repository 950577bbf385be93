"""The hand-over protocols by the names that `--handoff` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from fourhop.router.handoff.fourhop import Tickets
from fourhop.router.handoff.mooncake import Mooncake
from fourhop.router.handoff.moriio import MoRIIO
from fourhop.router.handoff.nixl import Nixl
from fourhop.router.handoff.protocol import Handoff
from fourhop.router.handoff.store import LMCache, Store

Name = Literal["nixl", "nixl_push", "mooncake", "moriio", "lmcache", "store"]

TICKETS: Handoff = Tickets()

STOCK: Mapping[Name, Handoff] = MappingProxyType(
    {
        "nixl": Nixl("pull"),
        "nixl_push": Nixl("push"),
        "mooncake": Mooncake(),
        "moriio": MoRIIO(),
        "lmcache": LMCache(),
        "store": Store(),
    }
)
"""What a stock vLLM can be set up for."""
