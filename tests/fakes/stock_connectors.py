"""Stock vLLMs with other connectors than NIXL's pull, as harsh as those are where a request is not as it must be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fakes.stock_vllm import StockVLLM


@dataclass
class PushVLLM(StockVLLM):
    """NixlPushConnector: decode tells prefill where to write; they find the request by its id, less a random tail."""

    mode: str = "push"

    async def _read(self, body: dict[str, Any]) -> bool:
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill"):
            return True
        self._expect(params, "remote_engine_id", "remote_host", "remote_port", "tp_size")
        producer = self.peers[params["remote_engine_id"]]
        base = f"generate-tokens-{self.ids[-1]}-"
        found = next((held for held in producer.held if held.startswith(base)), None)
        if found is None:
            await asyncio.Event().wait()  # registered, and never matched
            return False
        self.num_read += 1
        return producer.held.pop(found) > self.now_s


@dataclass
class MooncakeVLLM(StockVLLM):
    """MooncakeConnector: the legs are joined by a transfer id, whichever comes first; prefill answers nothing."""

    done: dict[str, asyncio.Event] = field(default_factory=dict)
    bootstrap: str = ""

    def bootstrap_app(self) -> Starlette:
        async def query(request: Request) -> Response:
            return JSONResponse({"0": {"engine_id": self.engine_id, "worker_addr": {}}})

        return Starlette(routes=[Route("/query", query)])

    def _hold(self, body: dict[str, Any], finish: str) -> None:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") and finish == "length":
            self.done.setdefault(params["transfer_id"], asyncio.Event()).set()

    async def _read(self, body: dict[str, Any]) -> bool:
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill"):
            return True
        self._expect(params, "remote_engine_id", "remote_bootstrap_addr", "transfer_id")
        producer = self.peers[params["remote_engine_id"]]
        assert isinstance(producer, MooncakeVLLM)
        assert params["remote_bootstrap_addr"] == producer.bootstrap
        await producer.done.setdefault(params["transfer_id"], asyncio.Event()).wait()
        del producer.done[params["transfer_id"]]
        self.num_read += 1
        return True


@dataclass
class MoRIIOVLLM(StockVLLM):
    """MoRIIOConnector in read mode: an id of the router's names the transfer, and must be there."""

    def _hold(self, body: dict[str, Any], finish: str) -> dict[str, Any] | None:
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_decode") or finish != "length":
            return None
        self._expect(params, "transfer_id", "remote_host", "remote_handshake_port", "remote_notify_port")
        self.held[params["transfer_id"]] = self.now_s + 60.0
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[7, 8]],
            "remote_engine_id": self.engine_id,
            "remote_host": "10.0.0.1",
            "remote_handshake_port": 6301,
            "remote_notify_port": 61005,
            "remote_dp_rank": 0,
            "tp_size": 1,
            "transfer_id": params["transfer_id"],
        } | self.answer

    async def _read(self, body: dict[str, Any]) -> bool:
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill"):
            return True
        self._expect(params, "remote_engine_id", "remote_block_ids", "remote_host", "transfer_id")
        self.num_read += 1
        return self.peers[params["remote_engine_id"]].held.pop(params["transfer_id"], 0.0) > self.now_s


@dataclass
class StoreVLLM(StockVLLM):
    """A shared store, or with `receiver` LMCache's pair: prefill writes to the decode engine that it is told."""

    store: set[tuple[int, ...]] = field(default_factory=set)
    receiver: int | None = None

    def _hold(self, body: dict[str, Any], finish: str) -> None:
        spec = (body.get("kv_transfer_params") or {}).get("disagg_spec")
        if spec is None:
            self.store.add(tuple(body["token_ids"]))
            return
        (port,) = spec["receiver_init_port"]
        for peer in self.peers.values():
            if isinstance(peer, StoreVLLM) and peer.receiver == port:
                peer.store.add(tuple(body["token_ids"]))

    async def _read(self, body: dict[str, Any]) -> bool:
        ids = tuple(body["token_ids"])
        self.num_read += any(ids[: len(known)] == known for known in self.store)
        return True
