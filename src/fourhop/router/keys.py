"""API keys with limits: how many requests at once, how many tokens a minute, and a cache of their own."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fourhop.router.document import read_document
from fourhop.wire.errors import ClientError, StartError, TooManyRequests
from fourhop.wire.generate import GenerateRequest

MAX_SALT_CHARS = 128


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the holder of a key may do; None: as much as there is. `name` stands for the key in errors and logs.

    Requests of a key with a `cache_salt` find only KV that requests with the same one have left in a prefix cache.
    """

    name: str = ""
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    cache_salt: str = ""


def read_keys(path: Path) -> dict[str, KeyLimits]:
    """A JSON or TOML file of key to limits. Raises StartError, naming what is wrong."""
    keys = read_document(path, dict[str, KeyLimits])
    for key, limits in keys.items():
        for name in ("max_concurrency", "tokens_per_minute"):
            if (value := getattr(limits, name)) is not None and value < 1:
                raise StartError(f"{path}: {limits.name or key[:4]}: {name} must be at least 1, not {value}")
        if "." in limits.cache_salt:
            raise StartError(f"{path}: {limits.name or key[:4]}: a cache_salt has no dots")
    if not keys:
        raise StartError(f"{path} has no keys")
    return keys


@dataclass(eq=False)
class Account:
    """What a key has used. Tokens are a bucket that fills by the minute; what was used beyond it is owed."""

    limits: KeyLimits
    num_open: int = 0
    _tokens: float = 0.0
    _at_s: float | None = None

    def enter(self, now_s: float) -> None:
        """A request begins; `leave` follows. Raises TooManyRequests, with when to come again."""
        limits = self.limits
        if limits.max_concurrency is not None and self.num_open >= limits.max_concurrency:
            raise TooManyRequests(f"this key has {self.num_open} open requests, and may have no more", retry_after_s=1)
        missing = self._missing(now_s)
        if limits.tokens_per_minute is not None and missing > 0.0:
            raise TooManyRequests(
                f"this key has used its {limits.tokens_per_minute} tokens a minute",
                retry_after_s=missing * 60.0 / limits.tokens_per_minute,
            )
        self.num_open += 1

    def leave(self) -> None:
        self.num_open -= 1

    def spend(self, num_tokens: int) -> None:
        self._tokens -= num_tokens

    def _missing(self, now_s: float) -> float:
        """Tokens until there is one; not positive if there is."""
        full = float(self.limits.tokens_per_minute or 0)
        if self._at_s is None:
            self._tokens += full
        else:
            self._tokens = min(full, self._tokens + (now_s - self._at_s) * full / 60.0)
        self._at_s = now_s
        return 1.0 - self._tokens


ACCOUNT: ContextVar[Account | None] = ContextVar("account", default=None)
"""Whose request the running task serves: set at the edge, read where tokens are counted, which no call connects."""


def with_salt(request: GenerateRequest, account: Account | None) -> GenerateRequest:
    """The request as it may look into prefix caches: the key's salt before its own.

    A key without one cannot name another's either: what it asks for begins with a dot, which no key's salt has.
    """
    salt = "" if account is None else account.limits.cache_salt
    if account is None or not (salt or request.cache_salt):
        return request
    joined = f"{salt}.{request.cache_salt or ''}"
    if len(joined) > MAX_SALT_CHARS:
        raise ClientError(f"must be at most {MAX_SALT_CHARS - len(salt) - 1} characters", param="cache_salt")
    return msgspec.structs.replace(request, cache_salt=joined)
