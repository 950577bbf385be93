"""One seeded run: engines, a router and clients in a storm, and what must be true afterwards.

Everything is real but the weights (a toy model, whose KV says which token it is of), time (a virtual loop), the wires
(a network with faults) and the threads around a hand-over (`faults.connector`).
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from faults.network import Network
from faults.reply import Wrong
from faults.virtual_loop import Stuck, VirtualLoop, run_virtual
from faults.weather import Storm, draw_rates
from faults.world import World

LIMIT_S = 1000.0
"""A run that takes longer, in virtual time, is one that hangs."""


@dataclass
class Report:
    """How a run went; `failure` is None when everything held."""

    seed: int
    failure: str | None = None
    log: list[tuple[float, str]] = field(default_factory=list)
    num_requests: int = 0
    num_errors: int = 0
    num_left: int = 0
    num_transfers: int = 0
    num_faults: int = 0
    virtual_s: float = 0.0

    def fail(self, reason: str) -> None:
        """The first reason is the one to look at."""
        self.failure = self.failure or reason


def run_storm(seed: int) -> Report:
    """The run of a seed, from its first draw to its last check. Equal seeds make equal runs."""
    report = Report(seed)
    rng = random.Random(seed)
    storm = Storm(rng, draw_rates(rng))
    network = Network(storm)
    loop = VirtualLoop(LIMIT_S, network)
    loop.set_exception_handler(
        lambda _, context: report.fail(f"{context.get('message')}: {context.get('exception')!r}")
    )
    world = World(rng, storm, network, loop)
    try:
        with log_of(storm, loop):
            run_virtual(world.run(), loop)
    except (Wrong, Stuck) as error:
        report.fail(f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever it is, it is what the run found
        report.fail(f"{type(error).__name__}: {error}")
        storm.log.append((loop.time(), logging.Formatter().formatException((type(error), error, error.__traceback__))))
    if storm.errors:
        report.fail(f"logged as an error: {storm.errors[0]}")
    report.log = storm.log
    report.num_requests = len(world.replies)
    report.num_errors = sum(reply.error is not None for reply in world.replies)
    report.num_left = sum(reply.left for reply in world.replies)
    report.num_transfers = world.num_transfers
    report.num_faults = storm.num_faults
    report.virtual_s = loop.time()
    return report


@contextlib.contextmanager
def log_of(storm: Storm, loop: VirtualLoop) -> Iterator[None]:
    """Have what the parts log in the run's own log."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            storm.log.append((loop.time(), f"{record.name}: {record.getMessage()}"))
            if record.levelno >= logging.ERROR:
                trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
                storm.log.append((loop.time(), trace))
                storm.errors.append(record.getMessage())

    handler, logger = Notes(), logging.getLogger("fourhop")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
