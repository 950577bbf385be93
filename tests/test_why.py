"""`fourhop why` where there is nothing to tell."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from fakes.serving import serving
from fourhop.router.history import History, history_route
from fourhop.service import ServerConfig, create_app
from fourhop.why import WhyConfig, tell_why
from fourhop.wire.errors import StartError


def router(key: str | None = None) -> Starlette:
    config = ServerConfig(api_key=() if key is None else (key,))
    return create_app(routes=[history_route(History(2))], config=config, registry=CollectorRegistry())


async def ask(app: Starlette, request_id: str) -> None:
    async with serving(app) as url:
        await tell_why(request_id, WhyConfig(url))


@pytest.mark.parametrize(
    ("app", "message"),
    [
        (router(), "^no request c among the last 0$"),
        (router("key"), "^a valid API key is required"),
        (
            create_app(routes=[], config=ServerConfig(), registry=CollectorRegistry()),
            r"^http://\S+ is no fourhop router$",
        ),
        (Starlette(), r"^http://\S+ is no fourhop router$"),
    ],
)
def test_where_there_is_none_one_line_says_why(app: Starlette, message: str) -> None:
    with pytest.raises(StartError, match=message):
        asyncio.run(ask(app, "c"))
