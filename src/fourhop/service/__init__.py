"""What every server shares: the app around its routes, reading and answering, disconnects, signals and draining."""

from fourhop.service.answers import json_response, stream_response, until_disconnect
from fourhop.service.app import create_app
from fourhop.service.config import ServerConfig
from fourhop.service.processes import ProcessesConfig, run_processes
from fourhop.service.requests import read_body, request_id, traceparent
from fourhop.service.run import bind, ended_by_signals, run, serve
from fourhop.service.siblings import Siblings, Together
from fourhop.service.tracing import TracingConfig, open_traces

__all__ = [
    "ProcessesConfig",
    "ServerConfig",
    "Siblings",
    "Together",
    "TracingConfig",
    "bind",
    "create_app",
    "ended_by_signals",
    "json_response",
    "open_traces",
    "read_body",
    "request_id",
    "run",
    "run_processes",
    "serve",
    "stream_response",
    "traceparent",
    "until_disconnect",
]
