"""What a peer's answer of another status than was asked for says, and whether it is our key that it does not take."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourhop.wire.errors import Forbidden, KeyRefused, PeerError, PeerRefused, Unauthorized, error_from_body

if TYPE_CHECKING:
    from fourhop.tokens.connection import Answer

MAX_ERROR_BYTES = 64 * 1024
ERROR_BODY_S = 2.0
"""How long the rest of an error's body is waited for."""


@dataclass
class Entry:
    """A peer's door, to which this server has a key (`--upstream-api-key`). `is_open` once the peer let us in."""

    url: str
    is_open: bool = False

    def told(self, error: PeerError) -> PeerError:
        """The peer's refusal as it goes on: that of our key is no fault of the client's.

        A 403 of the type that servers of models give is about what is asked, such as an endpoint that is switched off.
        """
        if not isinstance(error, PeerRefused) or error.status not in (Unauthorized.status, Forbidden.status):
            return error
        if error.status == Forbidden.status and error.type == Forbidden.type:
            return error
        self.is_open = False
        return KeyRefused(self.url, error.status)


async def refusal_of(answer: Answer, origin: object) -> PeerError:
    """The peer's error. A status that is no error was not asked for, so it is one all the same.

    The status stands whatever becomes of the body: one that is cut off or does not end is taken as far as it came.
    """
    body = bytearray()
    with suppress(PeerError):
        while len(body) < MAX_ERROR_BYTES and (data := await answer.read(ERROR_BODY_S)):
            body += data
    if answer.status < 400:
        return PeerError(f"{origin} answered with status {answer.status}")
    return error_from_body(
        answer.status, bytes(body), retry_after_s=_retry_after(answer.headers.get("retry-after", ""))
    )


def _retry_after(value: str) -> float | None:
    """`Retry-After` in seconds; its date form is not used by any engine and is left out."""
    return float(value) if value.isascii() and value.isdecimal() and len(value) < 8 else None
