"""Connectors that find KV by its tokens: a store that both engines reach, or a receiver that prefill writes to.

Decode is sent the same tokens and no parameters, after prefill has ended. Nothing is held for a request, so nothing is
released; KV that is not there is computed.
"""

from __future__ import annotations

from typing import Any

from fourhop.router.handoff.protocol import Answer, Handle, Plain, Question
from fourhop.wire.errors import TransferError


class Store(Plain):
    """ExampleConnector, MooncakeStoreConnector, FlexKVConnectorV1, LMCacheMPConnector, HF3FSKVConnector, or a
    MultiConnector of such."""

    answers = False

    def ask(self, question: Question) -> dict[str, Any] | None:
        return None

    def take(self, answer: Answer) -> Handle:
        raise TransferError("protocol", "an engine with a store answers nothing")


class LMCache(Store):
    """LMCacheConnectorV1 as a pair: prefill is told which decode engine's receiver to write to."""

    names_decode = True

    def ask(self, question: Question) -> dict[str, Any] | None:
        decode = question.decode
        if decode is None or not decode.init_port or not decode.alloc_port:
            return None
        return {
            "disagg_spec": {
                "req_id": question.transfer_id,
                "receiver_host": decode.host,
                "receiver_init_port": [decode.init_port],
                "receiver_alloc_port": [decode.alloc_port],
            }
        }
