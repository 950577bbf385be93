"""`Handoff`: what the two legs of a split request must be told so that KV changes hands. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where an engine's connector listens, for protocols whose engines do not tell. Defaults are vLLM's.

    `bootstrap_port` is Mooncake's, `handshake_port` and `notify_port` MoRI-IO's, `init_port` and `alloc_port` those of
    LMCache's receiver. `host` is that of the engine's URL if it is empty. `engine_id` is asked for where it is needed.
    """

    host: str = ""
    bootstrap_port: int = 8998
    handshake_port: int = 6301
    notify_port: int = 61005
    init_port: int = 0
    alloc_port: int = 0
    engine_id: str = ""


class Handle(msgspec.Struct, frozen=True):
    """The right of one decode engine to one prompt's KV, once, until `expires_at_s` (Unix time).

    `params` are what the decode leg is sent; `epoch` is the producer's boot id, None where engines tell none. With
    `send_by_s` the hold cannot be renewed, nor its engine be told to give it up: it is sent to one decode engine and to
    none after that time. One that was not sent is freed by a decode engine that refuses it, if `is_freed_by_refusal`.
    """

    params: dict[str, Any]
    handle_id: str
    epoch: str | None
    expires_at_s: float
    send_by_s: float | None = None
    is_freed_by_refusal: bool = False


class Question(msgspec.Struct, frozen=True):
    """A hand-over before anything is sent. `transfer_id` is ours and unique; `prefix` a ticket for KV of the prompt's
    beginning; `decode` is known in advance where the protocol asks for that."""

    transfer_id: str
    prefill: Endpoint
    decode: Endpoint | None
    prefix: dict[str, Any] | None
    now_s: float


class Answer(msgspec.Struct, frozen=True):
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
        answers: The prefill leg's answer has what the decode leg is sent; else `take` is not asked.
        names_decode: The prefill leg is told which decode engine follows, so that one is chosen first.
        shares_id: Both legs have one request id, by which their engines find each other.
    """

    @property
    def tells_pulls(self) -> bool: ...

    @property
    def answers(self) -> bool: ...

    @property
    def names_decode(self) -> bool: ...

    @property
    def shares_id(self) -> bool: ...

    def ask(self, question: Question) -> dict[str, Any] | None:
        """What the prefill leg is sent."""
        ...

    def at_once(self, question: Question) -> Handle | None:
        """What the decode leg is sent, where that needs no answer: both legs then run at the same time."""
        ...

    def take(self, answer: Answer) -> Handle:
        """What the prefill leg answered, checked: an incomplete handle must not reach a decode engine.

        Raises TransferError.
        """
        ...


@dataclass(frozen=True)
class Plain:
    """What most protocols of a stock vLLM have in common: prefill holds, answers, and decode follows."""

    tells_pulls = False
    answers = True
    names_decode = False
    shares_id = False

    def at_once(self, question: Question) -> Handle | None:
        return None
