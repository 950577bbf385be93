"""Endpoint slices, as the API server lists them, are engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.kubernetes import PORTS, APIServer, answer, endpoint, slice_of
from fakes.serving import serving
from fakes.tls import CERTIFICATE, KEY, OTHER
from fourhop.router.discovery.kubernetes import (
    Cluster,
    KubernetesSource,
    Service,
    Slice,
    parse_service,
    urls_of,
)
from fourhop.router.discovery.source import SourceError
from fourhop.wire.errors import StartError

HTTPS = {"name": "metrics", "port": 9000, "protocol": "TCP"}


def read(*items: Any) -> list[Slice]:
    return msgspec.json.decode(msgspec.json.encode(items), type=list[Slice])


def test_only_ready_endpoints_count_and_what_is_not_told_is_ready() -> None:
    told = slice_of(
        [
            endpoint("10.0.0.1"),
            endpoint("10.0.0.2", ready=False, serving=False),
            endpoint("10.0.0.3", ready=False, serving=True, terminating=True),
            endpoint("10.0.0.4", ready=True, terminating=True),  # a service that publishes what is not ready
            endpoint("10.0.0.5", ready=None, serving=None, terminating=None),
            {"addresses": ["10.0.0.6", "10.0.0.66"]},
        ]
    )
    assert urls_of(read(told), "") == [f"http://10.0.0.{number}:8000" for number in (1, 5, 6)]


def test_all_slices_together_each_address_once() -> None:
    one, two = slice_of([endpoint("10.0.0.2")]), slice_of([endpoint("10.0.0.1"), endpoint("10.0.0.2")])
    assert urls_of(read(two, one), "") == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert urls_of(read(slice_of(None, ports=None)), "") == []
    assert urls_of([], "") == []


def test_of_pods_with_two_addresses_the_one_of_version_four_counts() -> None:
    six = slice_of([endpoint("fd00::1")], address_type="IPv6")
    assert urls_of(read(six, slice_of([endpoint("10.0.0.1")])), "") == ["http://10.0.0.1:8000"]
    assert urls_of(read(six, slice_of([endpoint("10.0.0.1", ready=False)])), "") == ["http://[fd00::1]:8000"]
    named = slice_of([endpoint("engine.example")], address_type="FQDN")
    assert urls_of(read(named), "") == ["http://engine.example:8000"]


@pytest.mark.parametrize(
    ("ports", "wanted", "number"), [(PORTS, "", 8000), ([*PORTS, HTTPS], "metrics", 9000), ([*PORTS, HTTPS], "81", 81)]
)
def test_the_port(ports: Any, wanted: str, number: int) -> None:
    assert urls_of(read(slice_of([endpoint("10.0.0.1")], ports=ports)), wanted) == [f"http://10.0.0.1:{number}"]


@pytest.mark.parametrize(
    ("ports", "wanted"), [([*PORTS, HTTPS], ""), (PORTS, "metrics"), (None, ""), ([{"name": ""}], ""), (PORTS, "0")]
)
def test_a_port_that_is_not_clear_is_a_failure(ports: Any, wanted: str) -> None:
    with pytest.raises(SourceError):
        urls_of(read(slice_of([endpoint("10.0.0.1")], ports=ports)), wanted)


def test_flags() -> None:
    assert parse_service("prefill=engines") == Service("prefill", "kubernetes.io/service-name=engines", "")
    assert parse_service("decode=engines:http") == Service("decode", "kubernetes.io/service-name=engines", "http")
    assert parse_service("decode=app=llm,tier=d:80") == Service("decode", "app=llm,tier=d", "80")
    for wrong in ("engines", "both=engines", "prefill=", "prefill=:80", "prefill=engines:", ""):
        with pytest.raises(StartError, match="--engines-kubernetes"):
            parse_service(wrong)


def account(folder: Path, token: str, namespace: str = "llm") -> None:
    (folder / "token").write_text(f"{token}\n")
    (folder / "namespace").write_text(namespace)
    (folder / "ca.crt").write_bytes(CERTIFICATE.read_bytes())


def test_the_api_server_is_asked_with_the_account_as_it_is_now(tmp_path: Path) -> None:
    """Over TLS, trusting the account's authority alone; a token that was replaced is read anew."""
    server = APIServer("first", [slice_of([endpoint("10.0.0.1")])])
    account(tmp_path, "first")

    async def scenario() -> None:
        async with serving(server.app(), certificate=CERTIFICATE, key=KEY) as url:
            source = KubernetesSource(Cluster(url, tmp_path), parse_service("prefill=engines"), 5.0)
            await source.look()
            assert source.engines == {"http://10.0.0.1:8000": "prefill"}
            assert server.asked == ["llm kubernetes.io/service-name=engines"]

            server.token, server.items = "second", [slice_of([endpoint("10.0.0.2")])]
            with pytest.raises(SourceError, match="status 401: Unauthorized"):
                await source.look()
            assert source.engines == {"http://10.0.0.1:8000": "prefill"}
            account(tmp_path, "second")
            await source.look()
            assert source.engines == {"http://10.0.0.2:8000": "prefill"}

            elsewhere = KubernetesSource(Cluster(url, tmp_path, "other"), parse_service("decode=a=b"), 5.0)
            with pytest.raises(SourceError, match="is forbidden"):
                await elsewhere.look()
            assert server.asked[-1] == "other a=b"

            server.items = []
            await source.look()
            assert source.engines == {}, "a service without pods is an answer"

    asyncio.run(scenario())


def test_an_authority_that_is_not_the_accounts_is_not_trusted(tmp_path: Path) -> None:
    account(tmp_path, "first")
    (tmp_path / "ca.crt").write_bytes(OTHER.read_bytes())

    async def scenario() -> None:
        server = APIServer("first")
        async with serving(server.app(), certificate=CERTIFICATE, key=KEY) as url:
            source = KubernetesSource(Cluster(url, tmp_path), parse_service("prefill=engines"), 5.0)
            with pytest.raises(SourceError, match="cannot connect"):
                await source.look()
            assert server.asked == []

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"items": 1}', b"<html>", answer([{"endpoints": []}])])
def test_an_answer_that_is_none_is_a_failure(body: bytes, tmp_path: Path) -> None:
    async def list_slices(cluster: Cluster, selector: str) -> tuple[int, bytes]:
        return 200, body

    source = KubernetesSource(Cluster("https://k", tmp_path), parse_service("prefill=e"), 5.0, list_slices)
    with pytest.raises(SourceError, match="gave no list of endpoint slices"):
        asyncio.run(source.look())


@pytest.mark.parametrize("missing", ["token", "namespace", "ca.crt"])
def test_an_account_that_is_not_there_is_a_failure(missing: str, tmp_path: Path) -> None:
    account(tmp_path, "first")
    (tmp_path / missing).unlink()
    source = KubernetesSource(Cluster("https://127.0.0.1:1", tmp_path), parse_service("prefill=e"), 5.0)
    with pytest.raises(SourceError, match="cannot be used"):
        asyncio.run(source.look())
