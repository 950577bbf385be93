"""What a router is told. One dataclass; the command line's flags derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from fourhop.router.discovery.dns import parse_name
from fourhop.router.discovery.kubernetes import parse_service
from fourhop.router.discovery.source import Engines, engines_of
from fourhop.router.handoff.kinds import Name
from fourhop.router.handoff.protocol import Endpoint
from fourhop.tokens.address import check_url
from fourhop.wire.errors import StartError

PlacementMode = Literal["split", "local", "auto"]


@dataclass(frozen=True)
class GoodputConfig:
    """What the router does to keep requests in time.

    Attributes:
        placement: split: over a prefill and a decode engine. local: whole on one engine. auto: for each request
            whichever is predicted to keep more of them in time.
        ttft_ms: Target for the first token, in milliseconds, of requests that bring none. With a target a request waits
            at the router until an engine has room for it, and is refused (503, Retry-After) when it cannot be in time.
            0: none; auto takes four times what an idle engine needs.
        itl_ms: Target for the time from one token to the next. 0: none; auto takes twice what an idle engine needs.
        max_queued: Most requests with targets that wait at the router.
        api_keys: JSON or TOML file of key to limits: name, max_concurrency, tokens_per_minute, cache_salt. Then every
            client needs a key of it. With --workers each process counts for itself. Default: no keys.
        admin_key: Key of who may change the fleet: join, leave, drain, undrain, migrate. It opens everything else too.
            Default: anybody, but nobody where clients have keys.
    """

    placement: PlacementMode = "split"
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    max_queued: int = 1000
    api_keys: Path | None = None
    admin_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise StartError(f"{name} must be a number of milliseconds, 0 for none")
        if self.max_queued < 0:
            raise StartError("max_queued must not be negative")
        if self.admin_key == "":
            raise StartError("admin_key must not be empty")


class EventSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine publishes its cache events, and where those that were missed are to be had."""

    endpoint: str
    replay_endpoint: str = ""

    def __post_init__(self) -> None:
        for address in (self.endpoint, self.replay_endpoint):
            if address and not address.startswith(("tcp://", "ipc://")):
                raise ValueError(f"not a ZMQ address, such as tcp://HOST:PORT: {address[:200]}")


@dataclass(frozen=True)
class RouterConfig:
    """A router: its engines and its patience.

    Attributes:
        prefill: URLs of the engines that prompts go to.
        decode: URLs of the engines that tokens come from.
        engines_file: JSON or TOML file with more of them, `{"prefill": [URL, …], "decode": [URL, …]}`, which is read
            again when it changes.
        engines_dns: prefill=HOST:PORT or decode=HOST:PORT: each address of the name is an engine.
        engines_kubernetes: prefill=SERVICE[:PORT] or decode=SERVICE[:PORT]: each ready pod of the service is an engine.
            Labels of its endpoint slices, `app=llm,tier=prefill`, may stand for the name.
        engines_join: Let engines register themselves (`fourhop engine --join`).
        discovery_interval_s: Time between two looks at DNS and Kubernetes.
        kubernetes_url: Of the API server.
        kubernetes_account: Folder of the service account: token, ca.crt, namespace.
        kubernetes_namespace: Of the services. Default: that of the account.
        handoff: How KV moves between engines that are stock vLLMs, by their connector; store is any that finds it by
            its tokens. Ours tell it themselves. Default: it does not, and such an engine does whole requests.
        handoff_endpoints: JSON object of URL to where that engine's connector listens, where that is not the default:
            host, bootstrap_port (mooncake), handshake_port, notify_port (moriio), init_port, alloc_port (lmcache).
        kv_events: JSON object of URL to where a stock vLLM publishes what its prefix cache has: endpoint and
            replay_endpoint, as ZMQ addresses. Ours tell it themselves.
        max_retries: How often one request may be given to another engine after one failed it.
        max_num_choices: Largest `n` of a request.
        max_logprobs: Most alternatives a request may ask for.
        connect_timeout_s: Patience for a connection to an engine.
        first_chunk_timeout_s: Patience for the first chunk of an engine, its queue included.
        idle_timeout_s: Patience between two chunks.
        probe_interval_s: Time between two looks at an engine that is well.
        probe_timeout_s: Patience with one look, and with a release.
        probe_backoff_s: Longest time between two looks at an engine that is down.
        dead_after_s: An engine that neither answers looks nor sends tokens for so long loses its requests to others.
        stall_timeout_s: A stock vLLM that owes tokens, whose counters stand still for so long and that makes no token
            when asked for one, is down like one that does not answer. More than its longest step takes. Ours say it
            themselves (`fourhop engine --stall-timeout-s`).
        kv_recompute_threshold: Fewest tokens of a conversation that are worth a transfer from the engine that has them.
        prefix_timeout_s: Patience with an engine that is asked for the KV of a conversation's beginning.
        max_prefix_pages: Size of the index of beginnings; a page is about kv_recompute_threshold tokens.
        max_history: Requests that are remembered for `fourhop why`.
        upstream_api_key: Sent to every engine as a bearer token.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    engines_file: Path | None = None
    engines_dns: tuple[str, ...] = ()
    engines_kubernetes: tuple[str, ...] = ()
    engines_join: bool = False
    discovery_interval_s: float = 5.0
    kubernetes_url: str = "https://kubernetes.default.svc"
    kubernetes_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    kubernetes_namespace: str | None = None
    handoff: Name | None = None
    handoff_endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    kv_events: Mapping[str, EventSource] = field(default_factory=dict)
    max_retries: int = 2
    max_num_choices: int = 64
    max_logprobs: int = 20
    connect_timeout_s: float = 2.0
    first_chunk_timeout_s: float = 120.0
    idle_timeout_s: float = 60.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 2.0
    probe_backoff_s: float = 2.0
    dead_after_s: float = 5.0
    stall_timeout_s: float = 60.0
    kv_recompute_threshold: int = 64
    prefix_timeout_s: float = 0.5
    max_prefix_pages: int = 100_000
    max_history: int = 1000
    upstream_api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_engines()
        if self.max_retries < 0 or self.max_num_choices < 1 or self.max_logprobs < 0:
            raise StartError("max_retries and max_logprobs must not be negative, max_num_choices at least 1")
        if self.kv_recompute_threshold < 1 or self.max_prefix_pages < 0 or self.max_history < 0:
            raise StartError("kv_recompute_threshold must be at least 1, max_prefix_pages and max_history at least 0")
        for name in (
            "connect_timeout_s",
            "first_chunk_timeout_s",
            "idle_timeout_s",
            "probe_interval_s",
            "probe_timeout_s",
            "probe_backoff_s",
            "dead_after_s",
            "stall_timeout_s",
            "prefix_timeout_s",
            "discovery_interval_s",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise StartError(f"{name} must be a positive number of seconds")

    def _check_engines(self) -> None:
        listed = self.listed
        if not listed and not self.finds_engines:
            raise StartError("a router needs at least one engine: --prefill URL, --decode URL, or a way to find them")
        for text in self.engines_dns:
            parse_name(text)
        for text in self.engines_kubernetes:
            parse_service(text)
        try:
            check_url(self.kubernetes_url)
        except ValueError as error:
            raise StartError(f"kubernetes_url: {error}") from None
        for name, told in (("handoff_endpoints", self.handoff_endpoints), ("kv_events", self.kv_events)):
            unknown = sorted(set(told) - set(listed))
            if unknown and not self.finds_engines:
                raise StartError(f"{name} has {unknown[0]}, which is no engine of this router")

    @property
    def listed(self) -> Engines:
        """The engines that the flags list."""
        return engines_of(self.prefill, self.decode)

    @property
    def finds_engines(self) -> bool:
        """Whether there may be engines that no flag lists."""
        return bool(self.engines_file or self.engines_dns or self.engines_kubernetes or self.engines_join)

    def endpoint(self, url: str) -> Endpoint:
        """Where the connector of the engine at `url` listens."""
        endpoint = self.handoff_endpoints.get(url, Endpoint())
        return endpoint if endpoint.host else msgspec.structs.replace(endpoint, host=urlsplit(url).hostname or "")
