"""fourhop's own engines: tickets (`wire.ticket`) that can be had early, renewed, and given back by name."""

from __future__ import annotations

from typing import Any

import msgspec

from fourhop.router.handoff.protocol import Answer, Handle, Plain, Question
from fourhop.wire.errors import TransferError
from fourhop.wire.ticket import KVTicket, parse_transfer_params, verify

HOLD = {"do_remote_decode": True, "early_ticket": True}


class Tickets(Plain):
    """The ticket comes before the prompt is computed, so that decode is sent at once; it is checked, never trusted."""

    tells_pulls = True

    def ask(self, question: Question) -> dict[str, Any]:
        return HOLD if question.prefix is None else HOLD | {"prefix": question.prefix}

    def take(self, answer: Answer) -> Handle:
        """Raises TransferError, or ClientError for what is not even shaped like a ticket."""
        ticket = parse_transfer_params(answer.params)
        if not isinstance(ticket, KVTicket):
            raise TransferError("protocol", "these transfer parameters are no ticket")
        verify(
            ticket,
            fingerprint=ticket.fingerprint if answer.fingerprint is None else answer.fingerprint,
            token_ids=answer.token_ids,
            now_s=answer.now_s,
        )
        return handle_of(ticket)


def handle_of(ticket: KVTicket) -> Handle:
    return Handle(msgspec.to_builtins(ticket), ticket.ticket_id, ticket.epoch, ticket.expires_at_s)
