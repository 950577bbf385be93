"""Keys and their limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from contracts.token_server import until
from fakes.fleet import bench
from fakes.stub_engine import StubEngine
from fourhop.router.app import Router
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.router.dial import Dial
from fourhop.router.guard import guard
from fourhop.router.keys import Account, KeyLimits, read_keys, with_salt
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app
from fourhop.wire.errors import ClientError, StartError, TooManyRequests
from fourhop.wire.generate import GenerateRequest, SamplingParams

KEYS = """
[secret-a]
name = "a"
max_concurrency = 1
cache_salt = "team-a"

[secret-b]
name = "b"
tokens_per_minute = 60
"""
BODY = {"token_ids": [1, 2, 3, 4, 5], "sampling_params": {"max_tokens": 5, "seed": 1}}


def test_a_bucket_fills_by_the_minute_and_owes_what_was_used_beyond_it() -> None:
    account = Account(KeyLimits(tokens_per_minute=60))
    account.enter(0.0)
    account.spend(90)
    account.leave()
    with pytest.raises(TooManyRequests) as refusal:
        account.enter(10.0)
    assert refusal.value.retry_after_s == pytest.approx(21.0)
    account.enter(31.0)
    account.leave()
    account.enter(10_000.0)
    account.spend(59)
    account.enter(10_000.0)
    assert account.num_open == 2


def test_concurrency() -> None:
    account = Account(KeyLimits(max_concurrency=2))
    account.enter(0.0)
    account.enter(0.0)
    with pytest.raises(TooManyRequests, match="2 open requests"):
        account.enter(0.0)
    account.leave()
    account.enter(0.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("keys.json", '{"k": {"max_concurency": 3}}', "max_concurency"),
        ("keys.json", '{"k": {"max_concurrency": 0}}', "at least 1"),
        ("keys.json", "{}", "no keys"),
        ("keys.json", "{", "keys.json"),
        ("keys.toml", "[k]\ntokens_per_minute = 'many'", "tokens_per_minute"),
        ("keys.toml", "[k", "keys.toml"),
        ("keys.toml", "[k]\ncache_salt = 'a.b'", "no dots"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(StartError, match=message):
        read_keys(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read"):
        read_keys(tmp_path / "none.json")


def test_no_key_reaches_the_cache_of_another() -> None:
    def salt(own: str, given: str | None) -> str | None:
        request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(), cache_salt=given)
        return with_salt(request, Account(KeyLimits(cache_salt=own))).cache_salt

    assert salt("", None) is None
    own = {salt("a", None), salt("b", None), salt("a", "b"), salt("b", "a"), salt("a", "b.")}
    others = {salt("", "a"), salt("", "a."), salt("", "a.b"), salt("", ".a.")}
    assert (len(own), len(others), own & others) == (5, 4, set())
    with pytest.raises(ClientError, match="at most 126"):
        salt("a", "x" * 127)
    with pytest.raises(ClientError, match="at most 127"):
        salt("", "x" * 128)


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, StubEngine]]:
    """A client of a router with the keys above, before one engine."""
    (folder / "keys.toml").write_text(KEYS)
    engine = StubEngine("http://d0", role="decode")

    @asynccontextmanager
    async def dial(config: RouterConfig) -> AsyncIterator[Dial]:
        yield lambda url, role: (engine, engine)

    goodput, registry = GoodputConfig(api_keys=folder / "keys.toml"), CollectorRegistry()
    router = Router(RouterConfig((), ("http://d0",)), goodput, registry=registry, dial=dial)
    app = create_app(routes=router_routes(router), config=ServerConfig(), registry=registry)
    guard(app, goodput)
    async with router.running(), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as client:
        yield client, engine


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_ends_its_own_requests_only(tmp_path: Path) -> None:
    """Also when its limit lets it begin no more."""

    async def scenario() -> None:
        async with guarded(tmp_path) as (client, engine):
            engine.gate = asyncio.Event()
            body = BODY | {"request_id": "mine"}
            asked = asyncio.create_task(client.post("/inference/v1/generate", json=body, headers=bearer("secret-a")))
            await until(lambda: engine.num_open == 1)
            ids = {"request_ids": ["mine"]}
            for key, aborted in (("secret-b", []), ("secret-a", [engine.requests[0].request_id])):
                answer = await client.post("/inference/v1/abort_requests", json=ids, headers=bearer(key))
                assert (answer.status_code, engine.aborted) == (200, aborted)
            engine.gate.set()
            await asked

    asyncio.run(scenario())


def test_only_known_keys_get_in_and_each_within_its_limits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with guarded(tmp_path) as (client, engine):
            path = "/inference/v1/generate"
            for headers in ({}, bearer("secret-c"), bearer("secret-")):
                answer = await client.post(path, json=BODY, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "AuthenticationError"
            assert (await client.get("/metrics")).status_code == 200

            engine.gate = asyncio.Event()
            first = asyncio.create_task(client.post(path, json=BODY, headers=bearer("secret-a")))
            await until(lambda: engine.num_open == 1)
            second = await client.post(path, json=BODY, headers=bearer("secret-a"))
            assert (second.status_code, second.headers["Retry-After"]) == (429, "1")
            engine.gate.set()
            assert (await first).status_code == 200
            assert engine.requests[-1].cache_salt == "team-a."
            assert (await client.post(path, json=BODY, headers=bearer("secret-a"))).status_code == 200

            answers = [await client.post(path, json=BODY, headers=bearer("secret-b")) for _ in range(7)]
            assert [answer.status_code for answer in answers] == [200] * 6 + [429]
            assert answers[-1].json()["error"]["type"] == "RateLimitError"
            assert int(answers[-1].headers["Retry-After"]) >= 1

    asyncio.run(scenario())


def test_a_key_that_all_clients_have_is_not_the_administrators() -> None:
    """`--api-key` without `--admin-key`: nobody changes the fleet, and everything else is as it was."""

    async def scenario() -> None:
        async with bench() as one:
            server = ServerConfig(api_key=("for-all",))
            app = create_app(routes=router_routes(one.router), config=server, registry=CollectorRegistry())
            guard(app, GoodputConfig())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as client:
                drained = await client.post("/router/drain", json={"worker": "http://p0"}, headers=bearer("for-all"))
                assert drained.status_code == 403 and not one.router.fleet.workers["http://p0"].is_draining
                answers = [
                    await client.post("/inference/v1/generate", json=BODY, headers=headers)
                    for headers in ({}, bearer("for-all"))
                ]
                assert [answer.status_code for answer in answers] == [401, 200]

    asyncio.run(scenario())
