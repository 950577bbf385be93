"""An API server of Kubernetes, as far as endpoint slices go. Shapes are those of `discovery.k8s.io/v1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PORTS = [{"name": "http", "port": 8000, "protocol": "TCP"}]


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    told = {"ready": True, "serving": True, "terminating": False} | conditions
    return {
        "addresses": [address],
        "conditions": {name: value for name, value in told.items() if value is not None},
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "namespace": "llm", "name": f"engine-{address}", "uid": "e8a2"},
        "zone": "eu-1a",
    }


def slice_of(endpoints: Any, *, ports: Any = PORTS, address_type: str = "IPv4", name: str = "prefill-x7k2p") -> Any:
    return {
        "metadata": {
            "name": name,
            "generateName": "prefill-",
            "namespace": "llm",
            "resourceVersion": "41",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": "prefill",
            },
        },
        "addressType": address_type,
        "endpoints": endpoints,
        "ports": ports,
    }


def answer(items: Any) -> bytes:
    return msgspec.json.encode(
        {
            "kind": "EndpointSliceList",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"resourceVersion": "42"},
            "items": items,
        }
    )


def slices(addresses: Sequence[str]) -> bytes:
    """One slice with these addresses, all of them ready."""
    return answer([slice_of([endpoint(address) for address in addresses])])


@dataclass
class APIServer:
    """Lists what it is given, to who brings the token, and remembers what it was asked."""

    token: str
    items: list[Any] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        path = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return Starlette(routes=[Route(path, self._list)])

    async def _list(self, request: Request) -> Response:
        self.asked.append(f"{request.path_params['namespace']} {request.query_params['labelSelector']}")
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if request.path_params["namespace"] != "llm":
            return _status(403, "Forbidden", 'endpointslices.discovery.k8s.io is forbidden: User "x" cannot list')
        return Response(answer(self.items), media_type="application/json")


def _status(code: int, reason: str, message: str) -> Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return JSONResponse(body, status_code=code)
