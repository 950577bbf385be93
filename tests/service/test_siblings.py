"""Processes behind one port, here apps in one process: metrics of all, and what one is told all are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fakes.serving import serving
from fourhop.service import ServerConfig, create_app, json_response, read_body
from fourhop.service.siblings import Siblings, Together, merged_metrics, open_doors
from fourhop.wire.errors import ClientError, NotFound

KEY = {"Authorization": "Bearer secret"}


@dataclass
class Process:
    """One of several, with the requests that it knows."""

    known: set[str] = field(default_factory=set)
    told: list[Any] = field(default_factory=list)
    refuses: bool = False
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.counter = Counter("asked", "Requests.", ["path"], registry=self.registry)

    async def drain(self, request: Request) -> Response:
        body = await read_body(request, dict)
        if self.refuses:
            raise ClientError("no such engine", param="worker")
        self.told.append(body)
        return json_response({"worker": body["worker"], "draining": True, "in_flight": len(self.known)})

    async def story(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.known:
            raise NotFound("no such request")
        return json_response({"request_id": name, "num_tokens": 5})

    async def plain(self, request: Request) -> Response:
        self.counter.labels("plain").inc()
        return json_response({})

    def app(self, siblings: Siblings) -> Any:
        routes = [
            Route("/router/drain", self.drain, methods=["POST"]),
            Route("/router/requests/{name}", self.story),
            Route("/plain", self.plain),
        ]
        app = create_app(routes=routes, config=ServerConfig(api_key=("secret",)), registry=self.registry)
        app.add_middleware(Together, siblings=siblings)
        return app


@asynccontextmanager
async def running(processes: Sequence[Process | None]) -> AsyncIterator[list[str]]:
    """Their URLs, as if each had accepted from the shared port. None: one that does not answer."""
    async with AsyncExitStack() as stack:
        doors = stack.enter_context(open_doors(len(processes)))
        urls = []
        for number, process in enumerate(processes):
            if process is not None:
                app = process.app(Siblings(number, doors, ("/router/",)))
                urls.append(await stack.enter_async_context(serving(app, door=doors[number])))
        yield urls


def run(
    processes: Sequence[Process | None], scenario: Callable[[aiohttp.ClientSession, list[str]], Awaitable[None]]
) -> None:
    async def whole() -> None:
        async with running(processes) as urls, aiohttp.ClientSession() as session:
            await scenario(session, urls)

    asyncio.run(whole())


async def post(session: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, Any]:
    given = {"Content-Type": "application/json"} | (headers or KEY)
    async with session.post(url, data=json.dumps({"worker": "e"}), headers=given) as answer:
        return answer.status, await answer.json()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_one_is_told_all_are_told_and_numbers_add_up() -> None:
    processes = [Process({"a"}), Process({"b", "c"}), Process()]

    async def scenario(session: aiohttp.ClientSession, urls: list[str]) -> None:
        for url in urls:
            assert await post(session, f"{url}/router/drain") == (
                200,
                {"worker": "e", "draining": True, "in_flight": 3},
            )

    run(processes, scenario)
    assert [process.told for process in processes] == [[{"worker": "e"}] * 3] * 3


def test_a_request_is_found_whoever_has_it() -> None:
    async def scenario(session: aiohttp.ClientSession, urls: list[str]) -> None:
        for url in urls:
            async with session.get(f"{url}/router/requests/it%3Fs", headers=KEY) as answer:
                assert answer.status == 200 and await answer.json() == {"request_id": "it?s", "num_tokens": 5}
            async with session.get(f"{url}/router/requests/nobodys", headers=KEY) as answer:
                assert answer.status == 404

    run([Process({"it?s"}), Process()], scenario)


def test_a_refusal_is_told_to_nobody_else_and_a_key_is_needed() -> None:
    processes = [Process(refuses=True), Process()]

    async def scenario(session: aiohttp.ClientSession, urls: list[str]) -> None:
        status, answer = await post(session, f"{urls[0]}/router/drain")
        assert (status, answer["error"]["param"]) == (400, "worker")
        status, _ = await post(session, f"{urls[1]}/router/drain", Authorization="Bearer wrong")
        assert status == 401

    run(processes, scenario)
    assert processes[1].told == []


def test_what_one_of_the_others_cannot_do_is_told() -> None:
    async def scenario(session: aiohttp.ClientSession, urls: list[str]) -> None:
        status, answer = await post(session, f"{urls[0]}/router/drain")
        assert (status, answer["error"]["param"]) == (400, "worker")

    run([Process(), Process(refuses=True)], scenario)


def test_one_that_does_not_answer_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourhop.service.siblings.PATIENCE_S", 0.2)

    async def scenario(session: aiohttp.ClientSession, urls: list[str]) -> None:
        status, answer = await post(session, f"{urls[0]}/router/drain")
        assert status == 503 and "worker 1 does not answer" in answer["error"]["message"]
        async with session.get(f"{urls[0]}/metrics") as told:
            found = samples(await told.text())
        assert found["fourhop:worker_up", frozenset({("worker", "0")})] == 1.0
        assert found["fourhop:worker_up", frozenset({("worker", "1")})] == 0.0

    run([Process(), None], scenario)


def test_metrics_are_those_of_all_and_a_door_tells_of_one() -> None:
    processes = [Process(), Process()]

    async def scenario(session: aiohttp.ClientSession, urls: list[str]) -> None:
        for url in (urls[0], urls[1], urls[1]):
            await session.get(f"{url}/plain")
        for url in urls:
            async with session.get(f"{url}/metrics", headers={"Accept": "application/openmetrics-text"}) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                found = samples(await answer.text())
            for number, count in enumerate((1.0, 2.0)):
                assert found["asked_total", frozenset({("path", "plain"), ("worker", str(number))})] == count

    run(processes, scenario)


LABELS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=5)


@given(st.lists(st.dictionaries(LABELS, st.floats(0, 100), max_size=3), min_size=1, max_size=3))
def test_no_sample_is_lost_and_each_is_its_workers(processes: list[dict[str, float]]) -> None:
    texts: dict[int, str | None] = {}
    expected: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for number, values in enumerate(processes):
        registry = CollectorRegistry()
        gauge = Gauge("g", 'A "gauge" {of} things', ["name"], registry=registry)
        Histogram("h", "Without labels", buckets=(1.0,), registry=registry).observe(number)
        for label, value in values.items():
            gauge.labels(label).set(value)
        texts[number] = generate_latest(registry).decode()
        told = samples(texts[number] or "")
        expected |= {(name, labels | {("worker", str(number))}): value for (name, labels), value in told.items()}
    text = merged_metrics(texts)
    found = samples(text)
    assert {key: value for key, value in found.items() if key[0] != "fourhop:worker_up"} == expected
    names = [line.split()[2] for line in text.split("\n") if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_a_request_that_two_know_is_told_of_by_one_of_them() -> None:
    """One that was repeated under its id. What they tell is not added up."""

    async def scenario(session: aiohttp.ClientSession, urls: list[str]) -> None:
        for url in urls:
            async with session.get(f"{url}/router/requests/a", headers=KEY) as answer:
                assert await answer.json() == {"request_id": "a", "num_tokens": 5}

    run([Process({"a"}), Process({"a"}), Process()], scenario)
