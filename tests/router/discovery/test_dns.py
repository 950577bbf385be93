"""Addresses of a name are engines."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from fourhop.router.discovery.dns import DNSSource, Name, parse_name, urls_of
from fourhop.router.discovery.source import SourceError
from fourhop.wire.errors import StartError


def found(family: socket.AddressFamily, *address: Any) -> tuple[Any, ...]:
    return (family, socket.SOCK_STREAM, 6, "", address)


FOUR, SIX = socket.AF_INET, socket.AF_INET6


def test_each_address_is_one_engine() -> None:
    assert urls_of([found(FOUR, "10.0.0.2", 80), found(FOUR, "10.0.0.1", 80), found(FOUR, "10.0.0.2", 80)]) == [
        "http://10.0.0.1:80",
        "http://10.0.0.2:80",
    ]
    assert urls_of([found(SIX, "fd00::1", 80, 0, 0)]) == ["http://[fd00::1]:80"]
    assert urls_of([found(SIX, "fd00::1", 80, 0, 0), found(FOUR, "10.0.0.1", 80)]) == ["http://10.0.0.1:80"]
    assert urls_of([]) == []


def test_flags() -> None:
    assert parse_name("prefill=engines.llm.svc:8000") == Name("prefill", "engines.llm.svc", 8000)
    assert parse_name("decode=[::1]:8000") == Name("decode", "::1", 8000)
    for wrong in ("engines:80", "both=a:80", "prefill=", "prefill=a", "prefill=a:80/x", "prefill=:80", "prefill=a:0"):
        with pytest.raises(StartError):
            parse_name(wrong)


def test_the_systems_own_resolver() -> None:
    async def scenario() -> None:
        source = DNSSource(parse_name("decode=127.0.0.1:8000"), 5.0)
        await source.look()
        assert source.engines == {"http://127.0.0.1:8000": "decode"}

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_what_cannot_be_resolved(error: Exception) -> None:
    async def resolve(host: str, port: int) -> list[tuple[Any, ...]]:
        raise error

    source = DNSSource(Name("decode", "nowhere", 1), 5.0, resolve)
    with pytest.raises(SourceError, match=r"cannot resolve nowhere: (Name or|label)"):
        asyncio.run(source.look())


def test_a_name_without_addresses() -> None:
    async def resolve(host: str, port: int) -> list[tuple[Any, ...]]:
        return []

    source = DNSSource(Name("decode", "nowhere", 1), 5.0, resolve, {"http://a:1": "decode"})
    with pytest.raises(SourceError, match="has no address"):
        asyncio.run(source.look())
    assert source.engines == {"http://a:1": "decode"}
