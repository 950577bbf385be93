"""What an engine tells a router of its coming and going (`POST /router/join`, `POST /router/leave`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

JOIN_PATH = "/router/join"
LEAVE_PATH = "/router/leave"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine at `url` is there, and says so again every `every_s` seconds; it leaves when it does not for three
    times as long. Without `every_s` once is enough."""

    url: str
    role: Literal["prefill", "decode"]
    every_s: Seconds | None = None


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine at `url` is to get no more requests, and is forgotten when it has nothing left to do."""

    url: str


class MemberAnswer(msgspec.Struct, frozen=True):
    """The engine as it is now. `num_migrated` of its streams go on elsewhere."""

    url: str
    role: str
    leaving: bool
    in_flight: int
    num_migrated: int = 0
