"""vLLM's NIXL connectors, stock (0.32): prefill answers where its blocks are, decode is sent the same.

Facts this rests on (vLLM `nixl/pull_scheduler.py`, `push_scheduler.py`): a decode engine does not check what it is
sent. Blocks that are null end its engine loop, other fields that are missing leave the request waiting for good, and a
handle that was used or has expired reads blocks which are another request's by now: wrong text with a 200. So a handle
is checked here, field by field, used once, and sent only while its lease lasts. The lease begins with the answer and is
kept alive by the decode engine from the moment it has the request; nobody else can extend it. A decode engine that
refuses a request tells the prefill engine to free its blocks (vLLM #41269, in completions), which is the way to give
back a handle that was not sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from fourhop.router.handoff.protocol import Answer, Handle, Plain, Question
from fourhop.wire.errors import TransferError

LEASE_S = 30.0
"""vLLM's default of `kv_lease_duration`."""
MARGIN_S = 5.0
"""How long before the end of its lease a handle is not used any more: decode has to take it up in time."""

ASK: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Name = Annotated[str, msgspec.Meta(min_length=1)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Block = Annotated[int, msgspec.Meta(ge=0)]


class _Params(msgspec.Struct):
    """What must be there, and be what it should. Other fields are passed on as they are."""

    do_remote_prefill: Literal[True]
    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[list[list[Block]], msgspec.Meta(min_length=1)]
    tp_size: Size
    do_remote_decode: Literal[False] = False
    remote_num_tokens: Size | None = None
    transfer_mode: str | None = None


@dataclass(frozen=True)
class Nixl(Plain):
    """`mode` is `pull` (NixlConnector, NixlPullConnector) or `push` (NixlPushConnector).

    With `push` decode tells prefill where to write, and the two find the request by its id, less a random tail.
    """

    mode: Literal["pull", "push"] = "pull"
    lease_s: float = LEASE_S

    @property
    def shares_id(self) -> bool:  # type: ignore[override]
        return self.mode == "push"

    def ask(self, question: Question) -> dict[str, Any]:
        return ASK

    def take(self, answer: Answer) -> Handle:
        try:
            params = msgspec.convert(answer.params, _Params)
        except msgspec.ValidationError as error:
            raise TransferError("incomplete", str(error)) from None
        if not any(params.remote_block_ids):
            raise TransferError("incomplete", "there are no blocks - at `$.remote_block_ids`")
        if params.transfer_mode not in (None, self.mode):
            raise TransferError("mode", f"the engine's transfer mode is {params.transfer_mode}, not {self.mode}")
        if (params.remote_num_tokens or 0) > answer.num_prompt_tokens:
            raise TransferError("token_count", f"{params.remote_num_tokens} tokens of a prompt of fewer are held")
        handle_id = f"{params.remote_engine_id}/{params.remote_request_id}"
        return Handle(
            answer.params,
            handle_id,
            epoch=None,
            expires_at_s=answer.now_s + self.lease_s,
            send_by_s=answer.now_s + self.lease_s - MARGIN_S,
            is_freed_by_refusal=True,
        )
