"""What every server shares: the app around its routes, reading and answering, disconnects, signals and draining."""

from fourhop.service.answers import json_response, stream_response, until_disconnect
from fourhop.service.app import create_app
from fourhop.service.config import ServerConfig
from fourhop.service.processes import ProcessesConfig, run_processes
from fourhop.service.requests import read_body, request_id
from fourhop.service.run import bind, ended_by_signals, run, serve

__all__ = [
    "ProcessesConfig",
    "ServerConfig",
    "bind",
    "create_app",
    "ended_by_signals",
    "json_response",
    "read_body",
    "request_id",
    "run",
    "run_processes",
    "serve",
    "stream_response",
    "until_disconnect",
]
