"""`Handoff`: what the two legs of a split request must be told so that KV changes hands. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Handle:
    """The right of one decode engine to one prompt's KV, once, until `expires_at_s` (Unix time).

    `params` are what the decode leg is sent; `epoch` is the producer's boot id, None where engines tell none. With
    `send_by_s` the hold only expires: its engine can neither renew it nor be told to give it up, it is sent to one
    decode engine and to none after that time.
    """

    params: dict[str, Any]
    handle_id: str
    epoch: str | None
    expires_at_s: float
    send_by_s: float | None = None


@dataclass(frozen=True)
class Answer:
    """What a prefill leg said of its hold, and what is known of the request and of the engine.

    `token_ids` are the prompt's `num_prompt_tokens` and what was made after them; `fingerprint` is None where the
    engine tells none.
    """

    params: dict[str, Any]
    token_ids: list[int]
    num_prompt_tokens: int
    fingerprint: str | None
    now_s: float


class Handoff(Protocol):
    """One protocol, between engines of one kind.

    Attributes:
        tells_pulls: A decode leg tells (by its moments) whether it pulled; else its first token is taken for that.
    """

    @property
    def tells_pulls(self) -> bool: ...

    def ask(self, prefix: dict[str, Any] | None) -> dict[str, Any]:
        """What the prefill leg is sent. `prefix` is a ticket for KV of the prompt's beginning."""
        ...

    def take(self, answer: Answer) -> Handle:
        """What the prefill leg answered, checked: an incomplete handle must not reach a decode engine.

        Raises TransferError.
        """
        ...
