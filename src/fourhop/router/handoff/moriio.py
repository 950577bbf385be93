"""vLLM's MoRIIOConnector, stock (0.32): prefill answers where its blocks are, under an id of ours.

In its read mode that is all. In its write mode the prefill engine writes into the decode engine's blocks, so it is told
in advance where that one listens; harmless in read mode, so the mode need not be known here. A `transfer_id` must be
there: the engine reads it unchecked.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from fourhop.router.handoff.protocol import Answer, Handle, Plain, Question
from fourhop.wire.errors import TransferError

LEASE_S = 60.0
MARGIN_S = 5.0

Name = Annotated[str, msgspec.Meta(min_length=1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Params(msgspec.Struct):
    do_remote_prefill: Literal[True]
    remote_engine_id: Name
    remote_host: Name
    remote_handshake_port: Port
    remote_notify_port: Port
    remote_block_ids: Annotated[list[Any], msgspec.Meta(min_length=1)]
    tp_size: Annotated[int, msgspec.Meta(ge=1)]
    transfer_id: Name


class MoRIIO(Plain):
    """A decode engine in write mode ignores the blocks that it is sent."""

    names_decode = True

    def ask(self, question: Question) -> dict[str, Any] | None:
        if question.decode is None:
            return None
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": question.decode.engine_id or None,
            "remote_block_ids": None,
            "remote_host": question.decode.host,
            "remote_handshake_port": question.decode.handshake_port,
            "remote_notify_port": question.decode.notify_port,
            "transfer_id": question.transfer_id,
        }

    def take(self, answer: Answer) -> Handle:
        try:
            params = msgspec.convert(answer.params, _Params)
        except msgspec.ValidationError as error:
            raise TransferError("incomplete", str(error)) from None
        expires_at_s = answer.now_s + LEASE_S
        return Handle(answer.params, params.transfer_id, None, expires_at_s, send_by_s=expires_at_s - MARGIN_S)
