"""vLLM's MooncakeConnector, stock (0.32): both legs at once, joined by an id of ours; prefill answers nothing.

The decode engine is told where the prefill engine's bootstrap server is and how the engine is called there (`GET
/query`, see `tokens.engine`). Blocks are kept for `ABORT_TIMEOUT_S` if nobody comes, and only for a request that ended
by its length.
"""

from __future__ import annotations

from typing import Any

from fourhop.router.handoff.protocol import Answer, Handle, Plain, Question
from fourhop.wire.errors import TransferError

ABORT_TIMEOUT_S = 480.0
"""vLLM's `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`."""


class Mooncake(Plain):
    """Decode waits for prefill inside the engines."""

    answers = False

    def ask(self, question: Question) -> dict[str, Any] | None:
        if not question.prefill.engine_id:
            return None
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": question.transfer_id}

    def at_once(self, question: Question) -> Handle | None:
        prefill = question.prefill
        if not prefill.engine_id:
            return None
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": prefill.engine_id,
            "remote_bootstrap_addr": f"http://{prefill.host}:{prefill.bootstrap_port}",
            "transfer_id": question.transfer_id,
        }
        expires_at_s = question.now_s + ABORT_TIMEOUT_S
        return Handle(params, question.transfer_id, None, expires_at_s, send_by_s=expires_at_s)

    def take(self, answer: Answer) -> Handle:
        raise TransferError("protocol", "a Mooncake engine answers nothing")
