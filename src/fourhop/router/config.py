"""What a router is told. One dataclass; the command line's flags derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from fourhop.router.handoff.kinds import Name
from fourhop.router.handoff.protocol import Endpoint
from fourhop.tokens.connection import check_url
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
            client needs a key of it. Default: no keys.
    """

    placement: PlacementMode = "split"
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    max_queued: int = 1000
    api_keys: Path | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise StartError(f"{name} must be a number of milliseconds, 0 for none")
        if self.max_queued < 0:
            raise StartError("max_queued must not be negative")


def check_engine_url(url: str) -> None:
    """Raises StartError for what cannot be the URL of an engine."""
    try:
        check_url(url)
    except ValueError:
        raise StartError(f"not the URL of an engine: {url[:200]}") from None


class EventSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine publishes its cache events, and where those that were missed are to be had."""

    endpoint: str
    replay_endpoint: str = ""


@dataclass(frozen=True)
class RouterConfig:
    """A router: its engines and its patience.

    Attributes:
        prefill: URLs of the engines that prompts go to.
        decode: URLs of the engines that tokens come from.
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
        kv_recompute_threshold: Fewest tokens of a conversation that are worth a transfer from the engine that has them.
        prefix_timeout_s: Patience with an engine that is asked for the KV of a conversation's beginning.
        max_prefix_pages: Size of the index of beginnings; a page is about kv_recompute_threshold tokens.
        max_history: Requests that are remembered for `fourhop why`.
        upstream_api_key: Sent to every engine as a bearer token.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
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
    kv_recompute_threshold: int = 64
    prefix_timeout_s: float = 0.5
    max_prefix_pages: int = 100_000
    max_history: int = 1000
    upstream_api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        urls = self.prefill + self.decode
        if not urls:
            raise StartError("a router needs at least one engine: --prefill URL, --decode URL")
        for url in urls:
            check_engine_url(url)
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise StartError(f"an engine can have one role only: {twice[0]} is listed twice")
        for name, told in (("handoff_endpoints", self.handoff_endpoints), ("kv_events", self.kv_events)):
            unknown = sorted(set(told) - set(urls))
            if unknown:
                raise StartError(f"{name} has {unknown[0]}, which is no engine of this router")
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
            "prefix_timeout_s",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise StartError(f"{name} must be a positive number of seconds")

    def endpoint(self, url: str) -> Endpoint:
        """Where the connector of the engine at `url` listens."""
        endpoint = self.handoff_endpoints.get(url, Endpoint())
        return endpoint if endpoint.host else msgspec.structs.replace(endpoint, host=urlsplit(url).hostname or "")
