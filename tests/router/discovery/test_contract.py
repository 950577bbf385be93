"""Every source of engines passes the same contract."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.source import ONE, World, check_source
from fakes.kubernetes import slices
from fourhop.router.discovery.dns import DNSSource, Name
from fourhop.router.discovery.file import FileSource
from fourhop.router.discovery.kubernetes import Cluster, KubernetesSource, Service
from fourhop.router.discovery.registrations import Registrations
from fourhop.wire.errors import PeerError

times = itertools.count(10**18, 10**9)


def json_file(folder: Path) -> World:
    path = folder / "engines.json"

    def tell(urls: Sequence[str]) -> None:
        path.write_bytes(msgspec.json.encode({"prefill": list(urls), "decode": []}))
        os.utime(path, ns=(0, next(times)))

    tell([ONE])
    return World(FileSource(path), tell, lambda: path.unlink(missing_ok=True))


def toml_file(folder: Path) -> World:
    path = folder / "engines.toml"

    def tell(urls: Sequence[str]) -> None:
        path.write_text(f"prefill = {list(urls)}")
        os.utime(path, ns=(0, next(times)))

    def fail() -> None:
        path.write_text("")
        os.utime(path, ns=(0, next(times)))

    tell([ONE])
    return World(FileSource(path), tell, fail)


def dns(folder: Path) -> World:
    found: list[tuple[Any, ...]] = []

    async def resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

    def tell(urls: Sequence[str]) -> None:
        hosts = [url.removeprefix("http://").removesuffix(":8000") for url in urls]
        found[:] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 8000)) for host in hosts]

    return World(DNSSource(Name("prefill", "engines", 8000), 5.0, resolve), tell, found.clear)


def kubernetes(folder: Path) -> World:
    answers: list[bytes] = []

    async def list_slices(cluster: Cluster, selector: str) -> tuple[int, bytes]:
        if not answers:
            raise PeerError("cannot connect to https://kubernetes.default.svc:443: refused")
        return 200, answers[0]

    def tell(urls: Sequence[str]) -> None:
        answers[:] = [slices([url.removeprefix("http://").removesuffix(":8000") for url in urls])]

    cluster = Cluster("https://kubernetes.default.svc", folder)
    return World(KubernetesSource(cluster, Service("prefill", "a=b", ""), 5.0, list_slices), tell, answers.clear)


def registrations(folder: Path) -> World:
    known = Registrations(lambda: 0.0)

    def tell(urls: Sequence[str]) -> None:
        for url in set(known.engines) - set(urls):
            known.remove(url)
        for url in urls:
            known.put(url, "prefill", 5.0)

    return World(known, tell)


@pytest.mark.parametrize("world", [json_file, toml_file, dns, kubernetes, registrations])
def test_contract(world: Any, tmp_path: Path) -> None:
    asyncio.run(check_source(world(tmp_path)))
