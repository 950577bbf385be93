"""Where a server listens and what it accepts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens and what it accepts.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        api_key: Keys; a request to `/v1` or `/inference` must bring one as a bearer token. Default: none needed.
        max_body_bytes: Largest request body, in bytes.
        drain_timeout_s: How long open requests may go on after Ctrl-C or SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 64 * 1024 * 1024
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 to 65535, not {self.port}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}")
        if self.drain_timeout_s < 0:
            raise ValueError(f"drain_timeout_s must not be negative, not {self.drain_timeout_s}")
