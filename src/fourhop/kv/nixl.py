"""`nixl`: the consumer reads the producer's pool through NIXL, over whatever UCX finds: RDMA or the host's own memory.

Any of NIXL's builds will do: on host memory they are alike, and need neither CUDA nor torch. They are imported
directly, because the `nixl` package, which chooses among them, imports torch for that.

Reads and not writes, because a consumer that gives a pull up must know that nothing writes into its blocks any more.
UCX emulates reads where it finds nothing better than TCP. A consumer that dies during such a read takes its producer
with it (a crash inside UCX, NIXL 1.5.1), so between hosts without RDMA `tcp` is the safer connector, and the faster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fourhop.kv.connector import PullError
from fourhop.kv.control import Agent, Channel, Granted
from fourhop.kv.layout import BlockLayout, KVPool
from fourhop.wire.errors import StartError

logger = logging.getLogger(__name__)

BUILDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
INSTALL = "pip install --no-deps nixl-cu12"
BATCH_BYTES = 64 * 2**20
"""Of one transfer. Where UCX copies by itself, others wait for the agent that long."""

PROGRESS_EVERY_S = 0.001
GRACE_S = 1.0
"""How long a read that was under way may go on when its conversation has ended; most are over in milliseconds."""


@dataclass(frozen=True)
class Nixl:
    """The library's modules. What it raises has no base class of its own."""

    api: Any
    bindings: Any
    errors: tuple[type[Exception], ...]


def load_nixl() -> Nixl:
    """Raises StartError when NIXL is not installed."""
    build = next((name for name in BUILDS if importlib.util.find_spec(name) is not None), None)
    if build is None:
        raise StartError(f"the nixl connector needs NIXL: {INSTALL}")
    api, bindings = importlib.import_module(f"{build}._api"), importlib.import_module(f"{build}._bindings")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout
    kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return Nixl(api, bindings, tuple(kinds))


class NixlMover:
    """One agent per engine, the pool registered once. A peer's agent is known from the first grant on."""

    name = "nixl"

    def __init__(self, pool: KVPool, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._nixl = load_nixl()
        self._pool = pool
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._session = Session(self._nixl, pool)
        layout = pool.layout
        self._batch_blocks = max(1, BATCH_BYTES // (layout.num_planes * layout.block_bytes))

    def grant(self) -> Granted:
        return Granted(agent=self._session.card)

    def send(self, channel: Channel, block_ids: list[int]) -> None:
        """Let UCX answer while the consumer reads. A thread of UCX's own would take half a core, reads or not."""
        deadline_s = self._clock() + self._timeout_s
        while block_ids and not channel.is_readable(PROGRESS_EVERY_S) and self._clock() < deadline_s:
            session = self._session
            with session.using():
                session.progress()

    def receive(self, channel: Channel, granted: Granted, source: list[int], target: list[int]) -> None:
        card = granted.agent
        if card is None or not all(0 <= block_id < card.pool_blocks for block_id in source):
            raise PullError("protocol", "the producer granted blocks outside its pool")
        for start in range(0, len(source), self._batch_blocks):
            batch = slice(start, start + self._batch_blocks)
            self._read(channel, card, source[batch], target[batch])

    def prune(self) -> None:
        self._session.prune()

    def close(self) -> None:
        self._session.end()

    def _read(self, channel: Channel, card: Agent, source: list[int], target: list[int]) -> None:
        session = self._session
        patience = Patience(channel, session, self._clock, self._timeout_s)
        with session.using():
            state = session.read(channel.peer(), card, source, target, patience)
        if state == "PROC":
            error = patience.error()
            self._replace(session)
            raise error
        if state != "DONE":
            raise ConnectionError(f"NIXL cannot read from the producer: {state}")

    def _replace(self, session: Session) -> None:
        """End a session in which a read hangs. Nothing less keeps UCX from filling the blocks later."""
        with self._lock:
            if self._session is session:
                logger.warning("a NIXL read hangs: starting NIXL anew, which ends all its transfers")
                self._session = Session(self._nixl, self._pool)
        session.end()


class Patience:
    """How long a read is waited for. True when called means longer; each call takes a moment."""

    def __init__(self, channel: Channel, session: Session, clock: Callable[[], float], timeout_s: float) -> None:
        self._channel = channel
        self._session = session
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self._hung_up = False

    def __call__(self) -> bool:
        if self._hung_up:
            time.sleep(PROGRESS_EVERY_S)
        elif self._channel.is_readable(PROGRESS_EVERY_S):  # it has nothing to say before it is asked
            self._hung_up = True
            self._deadline_s = min(self._deadline_s, self._clock() + GRACE_S)
        return self._clock() < self._deadline_s and not self._session.ended

    def error(self) -> OSError:
        """Why there is none left."""
        if self._hung_up or self._session.ended:
            return ConnectionError("the conversation or NIXL ended during a read")
        return TimeoutError()


@dataclass
class Peer:
    """Another engine's agent, and its pool's blocks as NIXL knows them."""

    name: str
    blocks: Any
    num_reads: int = 0


class Session:
    """An agent's life: this engine's pool, and the peers whose pools it reads. Thread-safe.

    Every use is inside `using`. When `end` returns the agent is gone, and with it all that could write into the pool.
    """

    def __init__(self, nixl: Nixl, pool: KVPool) -> None:
        api, address = nixl.api, pool.planes.ctypes.data
        self.ended = False
        self._nixl = nixl
        self._layout = pool.layout
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._agent = api.nixl_agent(uuid.uuid4().hex, config)
        self._memory = self._agent.register_memory([(address, pool.layout.num_bytes, 0, "")], "DRAM")
        self._blocks = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", planes_at(address, pool.layout), "DRAM")
        metadata = self._agent.get_agent_metadata()
        self.card = Agent(self._agent.name, metadata, address, pool.layout.num_blocks)
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._num_users = 0
        self._left = threading.Condition()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Raises ConnectionError when the session has ended."""
        with self._left:
            if self.ended:
                raise ConnectionError("NIXL was started anew")
            self._num_users += 1
        try:
            yield
        finally:
            with self._left:
                self._num_users -= 1
                self._left.notify_all()

    def end(self) -> None:
        """Wait for the last user, who is told by `ended`, and destroy the agent. Idempotent."""
        with self._left:
            self.ended = True
            self._left.wait_for(lambda: not self._num_users)
            if self._agent is not None:
                self._peers.clear()
                self._blocks = None
                self._agent.deregister_memory(self._memory)
                self._agent = None

    def progress(self) -> None:
        """Let UCX do what is due."""
        self._agent.get_new_notifs()

    def read(self, where: str, card: Agent, source: list[int], target: list[int], is_patient: Patience) -> str:
        """Read blocks of the peer at an address. Returns DONE, PROC when patience ended first, or what is wrong.

        What NIXL raises is not raised on, because a traceback would keep the agent alive.
        """
        with self._peer(where, card) as peer:
            try:
                handle = self._agent.make_prepped_xfer(
                    "READ",
                    self._blocks,
                    indices(target, self._layout.num_planes, self._layout.num_blocks),
                    peer.blocks,
                    indices(source, self._layout.num_planes, card.pool_blocks),
                )
                state: str = self._agent.transfer(handle)
                while state == "PROC" and is_patient():
                    state = self._agent.check_xfer_state(handle)
                handle.release()
            except self._nixl.errors as error:
                return str(error)
        return state

    def prune(self) -> None:
        """Forget the peers that nobody reads from; whoever is alive is met again."""
        with self._lock:
            for where, peer in list(self._peers.items()):
                if not peer.num_reads and not self.ended:
                    self._forget(where)

    @contextlib.contextmanager
    def _peer(self, where: str, card: Agent) -> Iterator[Peer]:
        with self._lock:
            peer = self._meet(where, card)
            peer.num_reads += 1
        try:
            yield peer
        finally:
            with self._lock:
                peer.num_reads -= 1

    def _meet(self, where: str, card: Agent) -> Peer:
        """The peer with this card. What was known of an agent that was at the same address before is dropped."""
        known = self._peers.get(where)
        if known is not None and known.name == card.name:
            return known
        if known is not None:
            self._forget(where)
        theirs = planes_at(card.address, replace(self._layout, num_blocks=card.pool_blocks))
        try:
            if card.name != self.card.name:
                self._agent.add_remote_agent(card.metadata)
            self._peers[where] = Peer(card.name, self._agent.prep_xfer_dlist(card.name, theirs, "DRAM"))
        except self._nixl.bindings.nixlBackendError as error:
            raise ConnectionError(f"NIXL cannot reach the producer: {error}") from None
        except self._nixl.errors as error:
            raise PullError("protocol", f"the producer's NIXL metadata does not cover its pool: {error}") from None
        return self._peers[where]

    def _forget(self, where: str) -> None:
        peer = self._peers.pop(where)
        if peer.name != self.card.name:
            with contextlib.suppress(*self._nixl.errors):  # NIXL may have noticed that it is gone
                self._agent.remove_remote_agent(peer.name)


def planes_at(address: int, layout: BlockLayout) -> npt.NDArray[np.uint64]:
    """A pool as NIXL's strided descriptors, a row per plane: address, length, device, stride, count."""
    size, count = layout.block_bytes, layout.num_blocks
    rows = [(address + plane * count * size, size, 0, size, count) for plane in range(layout.num_planes)]
    return np.array(rows, dtype=np.uint64)


def indices(block_ids: list[int], num_planes: int, num_blocks: int) -> npt.NDArray[np.int32]:
    """Blocks, in every plane, by their number among the descriptors of `planes_at`."""
    planes = np.arange(num_planes, dtype=np.int32)[:, None] * num_blocks
    return np.asarray(planes + np.array(block_ids, dtype=np.int32)[None, :], dtype=np.int32).reshape(-1)
