"""A collector of traces: takes OTLP over HTTP on a port of this host, in a thread, and keeps what came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """`spans` are those that came, each with the name of its service; `status` its answer, once `gate` opens."""

    url: str = ""
    status: int = 200
    spans: list[tuple[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = [one.value.string_value for one in group.resource.attributes if one.key == "service.name"]
            self.spans += [(names[0], span) for scope in group.scope_spans for span in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.gate.wait()
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.status == 200:
                collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Tests are quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
