"""Who gets in, who may change the fleet, and whose stories may be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from fakes.fleet import bench
from fourhop.compose import ROUTER_SHARED_PATHS
from fourhop.router.config import GoodputConfig
from fourhop.router.guard import ADMIN_PATHS, FREE_PATHS, guard, with_admin
from fourhop.router.routes import router_routes
from fourhop.service import ServerConfig, create_app

KEYS = '{"key-a": {"name": "a"}, "key-b": {"name": "b"}}'
GENERATE = "/inference/v1/generate"


def body(request_id: str = "") -> dict[str, object]:
    return {"token_ids": [1, 2, 3], "request_id": request_id, "sampling_params": {"max_tokens": 2, "seed": 1}}


@asynccontextmanager
async def router(goodput: GoodputConfig, server: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router whose edge is that of `create`."""
    async with bench(engines_join=True) as one:
        routes = router_routes(one.router)
        app = create_app(routes=routes, config=with_admin(server, goodput), registry=one.registry)
        guard(app, goodput)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as client:
            yield client


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


SETTINGS = {"open": (False, None), "keys": (True, None), "admin": (False, "root"), "keys and admin": (True, "root")}


@pytest.mark.parametrize(
    ("name", "key", "status", "generates"),
    [
        ("open", None, 200, 200),
        ("keys", None, 403, 401),
        ("keys", "key-a", 403, 200),
        ("keys", "root", 403, 401),
        ("admin", None, 401, 200),
        ("admin", "roo", 401, 200),
        ("admin", "root", 200, 200),
        ("keys and admin", None, 401, 401),
        ("keys and admin", "key-a", 401, 200),
        ("keys and admin", "root", 200, 200),
    ],
)
def test_who_may_change_the_fleet(name: str, key: str | None, status: int, generates: int, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(KEYS)
    has_keys, admin_key = SETTINGS[name]

    async def scenario() -> None:
        goodput = GoodputConfig(api_keys=path if has_keys else None, admin_key=admin_key)
        async with router(goodput, ServerConfig()) as client:
            for change, told in (
                ("join", {"url": "http://d0", "role": "decode"}),
                ("leave", {"url": "http://d0"}),
                ("drain", {"worker": "http://d0"}),
                ("undrain", {"worker": "http://d0"}),
            ):
                answer = await client.post(f"/router/{change}", json=told, headers=bearer(key))
                assert answer.status_code == status, change
            moved = await client.post("/inference/v1/migrate", json={"request_id": "x"}, headers=bearer(key))
            assert moved.status_code == (404 if status == 200 else status)
            if status == 403:
                assert answer.json()["error"]["type"] == "PermissionDeniedError"
                assert "--admin-key" in answer.json()["error"]["message"]
            if status == 401:
                assert answer.headers["WWW-Authenticate"] == "Bearer"
            asked = await client.post(GENERATE, json=body(), headers=bearer(key))
            assert asked.status_code == generates

    asyncio.run(scenario())


def test_every_path_that_changes_something_is_the_administrators() -> None:
    async def scenario() -> None:
        async with bench() as one:
            changing = {
                route.path
                for route in router_routes(one.router)
                if "POST" in (route.methods or ()) and route.path.startswith("/router/")
            }
            assert changing == {path for path in ADMIN_PATHS if path.startswith("/router/")}

    asyncio.run(scenario())


def test_a_server_with_a_key_of_its_own_takes_the_administrators_too() -> None:
    async def scenario() -> None:
        async with router(GoodputConfig(admin_key="root"), ServerConfig(api_key=("mine",))) as client:
            drain = {"worker": "http://d0"}
            answers = [
                await client.post("/router/drain", json=drain, headers=bearer(key)) for key in (None, "mine", "root")
            ]
            assert [answer.status_code for answer in answers] == [401, 401, 200]
            asked = [await client.post(GENERATE, json=body(), headers=bearer(key)) for key in (None, "mine", "root")]
            assert [answer.status_code for answer in asked] == [401, 200, 200]

    asyncio.run(scenario())


def test_a_key_reads_the_stories_of_its_own_requests_and_the_administrator_all(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(KEYS)

    async def scenario() -> None:
        goodput = GoodputConfig(api_keys=path, admin_key="root")
        async with router(goodput, ServerConfig()) as client:
            for key, name in (("key-a", "mine"), ("key-b", "same"), ("key-a", "same"), ("key-a", "team/x")):
                answer = await client.post(GENERATE, json=body(name), headers=bearer(key))
                assert answer.status_code == 200

            async def status(name: str, key: str) -> int:
                return (await client.get(f"/router/requests/{name}", headers=bearer(key))).status_code

            assert [await status("mine", key) for key in ("key-a", "key-b", "root", "other")] == [200, 404, 200, 401]
            assert [await status("same", key) for key in ("key-a", "key-b", "root")] == [200, 200, 200]
            for name in ("team/x", "team%2Fx"):
                assert [await status(name, key) for key in ("key-a", "key-b", "root")] == [200, 404, 200]

    asyncio.run(scenario())


def test_what_changes_the_fleet_or_ends_requests_reaches_every_process_of_a_router() -> None:
    """With `--workers` a request runs in one of several, and who asks knows not in which."""
    assert all(path.startswith(ROUTER_SHARED_PATHS) for path in ADMIN_PATHS | FREE_PATHS)
