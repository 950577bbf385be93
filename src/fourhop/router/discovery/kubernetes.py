"""Engines that are the pods of a Kubernetes service, by its EndpointSlices (`discovery.k8s.io/v1`) of the API server.

The slices are listed again and again, with the pod's own service account, which needs the right to list
`endpointslices` in the namespace. What is understood: the ready endpoints of each slice, which are those that are not
terminating unless the service publishes addresses that are not ready.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import msgspec

from fourhop.router.discovery.source import Engines, SourceError, check_engine_url, role_and_rest
from fourhop.router.policy import EngineRole
from fourhop.tokens.connection import Timeouts, call, open_session
from fourhop.wire.errors import PeerError, StartError

FORM = "SERVICE[:PORT]"
SERVICE_LABEL = "kubernetes.io/service-name"
PATIENCE = Timeouts(connect_s=3.0, first_byte_s=10.0, idle_s=10.0)


@dataclass(frozen=True)
class Service:
    """Slices by their labels, and which of their ports: its name or number, "" for the only one."""

    role: EngineRole
    selector: str
    port: str


@dataclass(frozen=True)
class Cluster:
    """Where the API server is, and the folder of the account to ask it with: `token`, `ca.crt`, `namespace`."""

    url: str
    account: Path
    namespace: str | None = None


@dataclass(frozen=True)
class Account:
    """What the folder says at this moment: tokens are replaced every hour."""

    token: str
    namespace: str
    tls: ssl.SSLContext | None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, rename="camel"):
    """What counts of an EndpointSlice. An empty list may be null."""

    address_type: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Slices(msgspec.Struct):
    items: list[Slice] | None


class _Status(msgspec.Struct):
    """How the API server refuses."""

    message: str = "no reason given"


def parse_service(text: str) -> Service:
    """`prefill=SERVICE[:PORT]`, or labels in place of the service's name: `prefill=app=llm,tier=prefill`. Raises
    StartError."""
    role, rest = role_and_rest(text, "--engines-kubernetes", FORM)
    what, _, port = rest.partition(":")
    if not what or rest.endswith(":"):
        raise StartError(f"--engines-kubernetes {text[:200]}: must be {role}={FORM}")
    selector = what if "=" in what else f"{SERVICE_LABEL}={what}"
    return Service(role, selector, port)


def read_account(cluster: Cluster) -> Account:
    """Raises SourceError. Without TLS, as behind `kubectl proxy`, no token leaves this process."""
    is_secure = cluster.url.startswith("https:")
    try:
        token = (cluster.account / "token").read_text().strip() if is_secure else ""
        namespace = cluster.namespace or (cluster.account / "namespace").read_text().strip()
        tls = ssl.create_default_context(cafile=cluster.account / "ca.crt") if is_secure else None
    except (OSError, ValueError) as error:
        raise SourceError(f"the account in {cluster.account} cannot be used: {error}") from None
    if not (token + namespace).isascii() or not (token + namespace).isprintable():
        raise SourceError(f"the account in {cluster.account} cannot be used: its token is none")
    return Account(token, namespace, tls)


async def list_slices(cluster: Cluster, selector: str) -> tuple[int, bytes]:
    """The API server's answer: its status and body. Raises SourceError or PeerError."""
    account = await asyncio.to_thread(read_account, cluster)
    path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(account.namespace, safe='')}/endpointslices"
    url = f"{cluster.url.rstrip('/')}{path}?labelSelector={quote(selector, safe='')}"
    headers = {"Accept": "application/json"}
    headers |= {"Authorization": f"Bearer {account.token}"} if account.token else {}
    async with (
        open_session(tls=account.tls) as session,
        call(session, "GET", url, headers=headers, timeouts=PATIENCE, accepted=range(200, 600)) as answer,
    ):
        return answer.status, await answer.read_all()


@dataclass
class KubernetesSource:
    """The ready pods of a service. One without any is an answer like others: its engines leave."""

    cluster: Cluster
    wanted: Service
    interval_s: float
    list_slices: Callable[[Cluster, str], Awaitable[tuple[int, bytes]]] = list_slices
    engines: Engines = field(default_factory=dict)

    @property
    def name(self) -> str:
        port = self.wanted.port and f":{self.wanted.port}"
        return f"kubernetes {self.wanted.role}={self.wanted.selector}{port}"

    async def look(self) -> None:
        try:
            status, body = await self.list_slices(self.cluster, self.wanted.selector)
            if status != 200:
                reason = msgspec.json.decode(body, type=_Status).message
                raise SourceError(f"the API server answered with status {status}: {reason[:500]}")
            slices = msgspec.json.decode(body, type=_Slices).items or []
        except PeerError as error:
            raise SourceError(error.message) from None
        except msgspec.DecodeError as error:
            raise SourceError(f"{self.cluster.url} gave no list of endpoint slices: {error}") from None
        self.engines = dict.fromkeys(urls_of(slices, self.wanted.port), self.wanted.role)


def urls_of(slices: Sequence[Slice], wanted_port: str) -> list[str]:
    """The ready endpoints of all slices, each once. Raises SourceError if it is not clear which port is meant.

    Where there are addresses of several kinds only IPv4 counts: they are the same engines twice.
    """
    found: dict[str, set[str]] = {}
    for one in slices:
        ready = [endpoint for endpoint in one.endpoints or [] if _is_ready(endpoint) and endpoint.addresses]
        if ready:
            port = _port(one.ports or [], wanted_port)
            urls = {f"http://{_host(endpoint.addresses[0])}:{port}" for endpoint in ready}
            found.setdefault(one.address_type, set()).update(urls)
    best = sorted(found.get("IPv4") or next(iter(found.values()), set()))
    for url in best:
        _check(url)
    return best


def _is_ready(endpoint: _Endpoint) -> bool:
    """The API's rule: what is not told is ready, and not terminating."""
    conditions = endpoint.conditions or _Conditions()
    return conditions.ready is not False and conditions.terminating is not True


def _port(ports: Sequence[_Port], wanted: str) -> int:
    if wanted.isdecimal():
        return int(wanted)
    numbers = {port.port for port in ports if wanted in ("", port.name) and port.port is not None}
    if len(numbers) != 1:
        names = ", ".join(f"{port.name or '(no name)'} {port.port or ''}".strip() for port in ports) or "none"
        raise SourceError(f"not clear which port is meant: of {names} none or several are {wanted or 'the only one'}")
    return numbers.pop()


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _check(url: str) -> None:
    try:
        check_engine_url(url)
    except StartError as error:
        raise SourceError(str(error)) from None
