"""Where a peer listens, as its URL says."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit


class Origin(NamedTuple):
    """Where a peer listens."""

    host: str
    port: int
    is_secure: bool

    def __str__(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.host}:{self.port}"


@lru_cache(maxsize=1024)
def split_url(url: str) -> tuple[Origin, str]:
    """A URL as its origin and its path, with the query. Raises ValueError for one that nothing can be asked at."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        is_sound = parts.scheme in ("http", "https") and host and port != 0 and url.isascii() and url.isprintable()
        (host or "").encode("idna")
    except ValueError:  # a port that is none, an open bracket, a name with an empty part
        is_sound = False
    if not is_sound or host is None or " " in url:
        raise ValueError(f"not an http URL: {url[:200]}")
    is_secure = parts.scheme == "https"
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    return Origin(host, port or (443 if is_secure else 80), is_secure), path


def check_url(url: str) -> None:
    """Raises ValueError for what cannot be the URL of a server, to which paths are added."""
    is_sound = False
    with suppress(ValueError):
        split_url(url)
        is_sound = not set("?#@") & set(url)
    if not is_sound:
        raise ValueError(f"not the URL of a server: {url[:200]}")
