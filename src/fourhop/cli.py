"""`fourhop`: one command per tier, and `up` for all of them on one machine.

Whatever is wrong with a command line is one line on stderr: exit status 2 for how it was written, 1 for what cannot
be had (a model, a port). The engine's own imports (torch) happen inside the commands that run one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from fourhop import __version__, checkpoint, service
from fourhop.check import CheckConfig
from fourhop.check import check_transfer as transfer_check
from fourhop.checkpoint import DEFAULT_MODEL
from fourhop.compose import ROUTER_SHARED_PATHS, UpstreamConfig, run_engine, run_frontend, run_router, run_serve
from fourhop.engine.config import EngineConfig
from fourhop.flags import UsageError, with_flags
from fourhop.frontend.config import FrontendConfig
from fourhop.kv.config import KVEventsConfig, KVTransferConfig
from fourhop.router.config import GoodputConfig, RouterConfig
from fourhop.service import ProcessesConfig, ServerConfig, Siblings, TracingConfig, logs
from fourhop.service.logs import LogLevel
from fourhop.tokens.join import JoinConfig
from fourhop.up.plan import UpConfig
from fourhop.why import WhyConfig, tell_why
from fourhop.wire.errors import StartError

app = App(
    name="fourhop",
    version=__version__,
    help="LLM serving taken apart: render, prefill, decode, derender, with the KV cache moving between them.",
    help_format="markdown",
)


@dataclass(frozen=True)
class LogConfig:
    """What is written to stderr.

    Attributes:
        log_level: Least important lines that are written.
    """

    log_level: LogLevel = field(default="info", metadata={"env_var": "FOURHOP_LOG_LEVEL"})


Model = Annotated[
    str, Parameter(help="A model folder, a .gguf file, or OWNER/NAME of the Hugging Face hub.", show_default=True)
]
Transfer = Annotated[
    KVTransferConfig | None,
    Parameter(
        help='How KV moves between engines, vLLM\'s keys. Example: `{"kv_connector": "shm", "kv_role": "kv_producer"}`.'
    ),
]

Events = Annotated[
    KVEventsConfig | None,
    Parameter(
        help="Where to publish what the prefix cache has, vLLM's keys. Example: "
        '`{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}`.'
    ),
]


# By name: who starts a server does not wait for what bench imports.
app.command(
    "fourhop.bench.commands:bench", name="bench", help="Load a server, and see at which rate it keeps its promises."
)


def command(function: Callable[..., None]) -> None:
    """Make this function a command, its configs flags."""
    app.command(with_flags(function))


@command
def up(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    up: UpConfig,
    goodput: GoodputConfig,
    frontend: FrontendConfig,
    engine: EngineConfig,
    server: ServerConfig,
    tracing: TracingConfig,
    log: LogConfig,
) -> None:
    """Start every tier on this machine: engines as processes of their own, frontend and router in this one.

    Waits until all of them are ready, prints what runs where, starts an engine that dies again, and stops everything
    in order on Ctrl-C.

    Example: `fourhop up --decode 2 --connector tcp --port 9000`
    """
    logs.configure(log.log_level)
    from fourhop.up.run import run_up

    with service.bind(server) as listener:
        found = checkpoint.find(model)
        service.run(run_up(found, up, goodput, server, frontend, engine, tracing, log.log_level, listener))


@command
def serve(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    kv_transfer_config: Transfer = None,
    kv_events_config: Events = None,
    frontend: FrontendConfig,
    engine: EngineConfig,
    server: ServerConfig,
    tracing: TracingConfig,
    log: LogConfig,
) -> None:
    """Serve a model from this one process: a frontend joined to an engine by a function call.

    With `--kv-transfer-config` and `--allow-client-kv-transfer` a client may play the router: prefill here, decode
    there.

    Example: `fourhop serve Qwen/Qwen3-0.6B --reasoning-parser qwen3 --max-model-len 4096`
    """
    logs.configure(log.log_level)
    service.run(run_serve(model, frontend, kv_transfer_config, kv_events_config, engine, server, tracing))


@command
def frontend(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    upstream: UpstreamConfig,
    frontend: FrontendConfig,
    server: ServerConfig,
    processes: ProcessesConfig,
    tracing: TracingConfig,
    log: LogConfig,
) -> None:
    """Run the text tier: the OpenAI API, render and derender. It needs no torch and no weights.

    With `--upstream` it answers chat and completions; without, it renders and derenders only.

    Example: `fourhop frontend --upstream http://127.0.0.1:8001`
    """
    logs.configure(log.log_level)
    with service.bind(server) as listener:

        def work(siblings: Siblings | None, started: Callable[[], None]) -> None:
            running = run_frontend(
                model, upstream, frontend, server, tracing, listener=listener, started=started, siblings=siblings
            )
            service.run(running)

        service.run_processes(work, processes.workers, drain_timeout_s=server.drain_timeout_s)


@command
def router(
    *,
    router: RouterConfig,
    goodput: GoodputConfig,
    server: ServerConfig,
    processes: ProcessesConfig,
    tracing: TracingConfig,
    log: LogConfig,
) -> None:
    """Run the router: it splits each request over a prefill and a decode engine.

    Example: `fourhop router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8001`
    """
    logs.configure(log.log_level)
    with service.bind(server) as listener:

        def work(siblings: Siblings | None, started: Callable[[], None]) -> None:
            running = run_router(
                router, goodput, server, tracing, listener=listener, started=started, siblings=siblings
            )
            service.run(running)

        service.run_processes(
            work, processes.workers, drain_timeout_s=server.drain_timeout_s, shared=ROUTER_SHARED_PATHS
        )


@command
def engine(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    served_model_name: Annotated[str | None, Parameter(help="Name that requests may give. Default: MODEL.")] = None,
    kv_transfer_config: Transfer = None,
    kv_events_config: Events = None,
    engine: EngineConfig,
    server: ServerConfig,
    join: JoinConfig,
    tracing: TracingConfig,
    log: LogConfig,
) -> None:
    """Run one engine: token ids in, token ids out, for a router or a frontend.

    Example: `fourhop engine --port 8100 --kv-transfer-config '{"kv_connector": "shm", "kv_role": "kv_producer"}'`
    """
    logs.configure(log.log_level)
    service.run(
        run_engine(model, served_model_name, kv_transfer_config, kv_events_config, engine, server, join, tracing)
    )


@command
def fetch(model: Model = DEFAULT_MODEL, /, *, log: LogConfig) -> None:
    """Get a model onto this machine, converted if need be, and print its folder.

    Example: `fourhop fetch ./SmolLM2-135M-Instruct.Q4_1.gguf`
    """
    logs.configure(log.log_level)
    print(checkpoint.find(model).folder)


@command
def why(request_id: str, /, *, why: WhyConfig, log: LogConfig) -> None:
    """Tell what became of a request at a router, step by step, and why: where it was placed, what it waited for.

    REQUEST_ID is the `X-Request-Id` of the answer, or the id in a log line. A router remembers its last requests.

    Example: `fourhop why 7db75b50876059cfa607c46aa8b2e034 --url http://127.0.0.1:8000`
    """
    logs.configure(log.log_level)
    service.run(tell_why(request_id, why))


check = App(name="check", help="Find out whether what is running is well.")
app.command(check)


def check_transfer(prefill: str, decode: str, /, *, check: CheckConfig, log: LogConfig) -> None:
    """Measure how long KV takes from engine PREFILL to engine DECODE (URLs), and say what to try next.

    Example: `fourhop check transfer http://127.0.0.1:8100 http://127.0.0.1:8200`
    """
    logs.configure(log.log_level)
    service.run(transfer_check(prefill, decode, check))


check.command(with_flags(check_transfer), name="transfer")


def execute(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit status: the command's own where it has one."""
    try:
        status = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, UsageError) as error:
        _complain(f"{error} (fourhop {_command_name(arguments)}--help tells more)")
        return 2
    except StartError as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return status if isinstance(status, int) else 0


def _command_name(arguments: Sequence[str]) -> str:
    """The words of a command line that name a command, each with a space after it."""
    known, name = app, ""
    for word in arguments:
        if word not in known:
            break
        known, name = known[word], f"{name}{word} "
    return name


def _complain(message: str) -> None:
    print(f"fourhop: {' '.join(message.split())}", file=sys.stderr)


def main() -> None:
    sys.exit(execute(sys.argv[1:]))
