"""`store`: blocks go into a folder or an object store by content, and come out of it by name.

A producer need not be alive when its blocks are read: it is done with a ticket, and has its own blocks back, when they
are stored. Engines of one model share blocks; those of different models never do. Who gives a ticket up, or is gone,
leaves files that go when the store is full.

The producer's side consumes its own `Holds` as a peer would: a thread per ticket follows its progress. Content is
copied before it is known to have been valid, and written only after, so recycled blocks never get in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import msgspec
import numpy as np

from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import CAUSES, Event, Notify, Progress, Pulled, PullError, Released, Renewed
from fourhop.kv.control import Decline
from fourhop.kv.folders import Folder
from fourhop.kv.holds import Holds, Step, Want, describe_difference
from fourhop.kv.layout import KVPool
from fourhop.kv.notes import Note, Notes
from fourhop.kv.pulls import PRODUCTION, Conduct, Outbox, Pull, Pulls
from fourhop.kv.shelf import Shelf, TicketState
from fourhop.wire.ticket import KVTicket

logger = logging.getLogger(__name__)

NUM_FILE_THREADS = 8
"""Blocks that are read or written at once; a remote store is slow in answering rather than in sending."""

FIRST_PAUSE_S = 0.002
MAX_PAUSE_S = 0.1


class StoreConnector:
    """A `Connector` without peers. `renew` does nothing, because nothing in a store runs out for want of it."""

    name = "store"

    def __init__(
        self,
        folder: Folder,
        options: ConnectorOptions,
        pool: KVPool,
        epoch: str,
        notify: Notify,
        *,
        conduct: Conduct = PRODUCTION,
    ) -> None:
        self._pool = pool
        self._epoch = epoch
        self._conduct = conduct
        self._timeout_s = options.pull_timeout_s
        self._shelf = Shelf(folder, pool.layout, options.max_bytes)
        self._holds = Holds(epoch, pool.layout)
        self._names: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()
        self._outbox = Outbox(notify)
        self._pulls = Pulls(self._outbox, options.pull_timeout_s, conduct)
        self._notes = Notes(self._send_note)
        self._saves = ThreadPoolExecutor(conduct.num_workers, thread_name_prefix="kv-save")
        self._files = ThreadPoolExecutor(NUM_FILE_THREADS, thread_name_prefix="kv-file")

    def publish(self, ticket: KVTicket, progress: Progress) -> KVTicket:
        ticket_id = ticket.ticket_id
        with self._lock:
            self._holds.publish(ticket, progress)
            stands, is_new = self._holds.stands(ticket_id), ticket_id not in self._names
            if stands:
                self._names[ticket_id] = list(progress.names)
        if stands and is_new:
            self._saves.submit(self._save, ticket).add_done_callback(log_bug)
        return msgspec.structs.replace(ticket, connector=self.name, address=self._shelf.store_id)

    def pull(self, ticket: KVTicket, block_ids: list[int], names: list[bytes], skip_blocks: int = 0) -> None:
        target = list(zip(names, block_ids, strict=False))
        want = Want(ticket.ticket_id, ticket.epoch, self._pool.layout.geometry(), skip_blocks, len(block_ids))
        self._pulls.start(ticket, lambda pull: self._pull(pull, want, target))

    def release(self, ticket_id: str) -> None:
        self._holds.withdraw(ticket_id)
        ticket = self._pulls.cancel(ticket_id)
        if ticket is not None:
            self._notes.post(ticket, Decline(ticket_id, ticket.epoch))

    def renew(self, ticket: KVTicket) -> None:
        """Nothing."""

    def poll(self) -> list[Event]:
        return self._outbox.take()

    def close(self) -> None:
        self._holds.close()
        self._saves.shutdown(wait=True)
        self._pulls.close()
        self._notes.close()
        self._files.shutdown(wait=True)

    def find(self, fingerprint: str, names: list[bytes]) -> int:
        """How many leading blocks of a model the store has, and keeps for now. Blocks: not for the engine's thread."""
        missing = (index for index, name in enumerate(names) if not self._shelf.use_block(fingerprint, name))
        return next(missing, len(names))

    # The producer's side.

    def _save(self, ticket: KVTicket) -> None:
        """Store a ticket's blocks as they become ready, and say so in its state; on a thread of its own."""
        ticket_id, layout = ticket.ticket_id, self._pool.layout
        state = TicketState(self._epoch, layout.geometry(), layout.blocks_for(ticket.num_tokens))
        want = Want(ticket_id, self._epoch, state.geometry, 0, state.num_blocks)
        try:
            self._holds.claim(want)
            for step in self._holds.steps(want, self._conduct.keep_alive_s):
                state = self._save_step(ticket, state, step)
            self._holds.confirm(ticket_id)
            self._outbox.put(Released(ticket_id))
            self._shelf.make_room()
        except PullError as end:
            self._give_up(ticket_id, msgspec.structs.replace(state, tail=None, ended=end.cause))
        except OSError as error:
            logger.warning("KV ticket %s cannot be stored: %s", ticket_id, error)
            self._give_up(ticket_id, msgspec.structs.replace(state, tail=None, ended="unreachable"))
        finally:
            with self._lock:
                del self._names[ticket_id]

    def _save_step(self, ticket: KVTicket, state: TicketState, step: Step) -> TicketState:
        ticket_id, first = ticket.ticket_id, state.num_ready
        self._outbox.put(Renewed(ticket_id))  # the blocks are still needed, whoever else wants the ticket
        if step.tail is None and self._shelf.is_declined(ticket_id):
            raise PullError("used", "the consumer wants this ticket no more")
        with self._lock:
            names = self._names[ticket_id][first : first + len(step.block_ids)]
        pairs = zip(names, step.block_ids, strict=True)
        self._at_once([(self._save_block, ticket, name, block_id) for name, block_id in pairs])
        state = msgspec.structs.replace(
            state, num_ready=first + len(step.block_ids), tail=step.tail, beat=state.beat + 1
        )
        self._shelf.put_state(ticket_id, state)
        return state

    def _save_block(self, ticket: KVTicket, name: bytes, block_id: int) -> None:
        if self._shelf.use_block(ticket.fingerprint, name):
            return
        content = self._pool.planes[:, block_id].tobytes()
        if not self._holds.stands(ticket.ticket_id):  # then the engine may have changed the block meanwhile
            raise PullError("withdrawn", "the ticket ended while it was stored")
        self._shelf.put_block(ticket.fingerprint, name, content)

    def _give_up(self, ticket_id: str, state: TicketState) -> None:
        """Tell the consumer, and give the engine its blocks back unless it took them itself."""
        if self._holds.decline(ticket_id):
            self._outbox.put(Released(ticket_id))
        try:
            self._shelf.put_state(ticket_id, state)
        except OSError as error:
            logger.info("the end of KV ticket %s cannot be stored: %s", ticket_id, error)

    # The consumer's side.

    def _pull(self, pull: Pull, want: Want, target: list[tuple[bytes, int]]) -> Pulled:
        ticket = pull.ticket
        if ticket.connector != self.name:
            raise PullError("protocol", f"a ticket for the {ticket.connector} connector came to {self.name}")
        if ticket.address != self._shelf.store_id:
            raise PullError("unreachable", "the ticket's blocks are in another store than this engine's")
        stop = threading.Event()
        with pull.stopping(stop.set):
            watch = Watch(self._shelf, pull, stop, self._timeout_s, self._conduct)
            state = watch.next()
            check_shape(want, state, len(target))
            self._shelf.claim(ticket.ticket_id)
            self._conduct.on_step("claimed", ticket.ticket_id)
            tail = self._load(watch, state, want, target)
            self._conduct.on_step("copied", ticket.ticket_id)
            watch.check()
        return Pulled(
            ticket.ticket_id, len(target) * self._pool.layout.num_planes * self._pool.layout.block_bytes, tail
        )

    def _load(self, watch: Watch, state: TicketState, want: Want, target: list[tuple[bytes, int]]) -> bytes:
        """Fill the target blocks as they appear; returns the ticket's tail."""
        num_loaded = 0
        while True:
            self._conduct.on_step("ready", want.ticket_id)
            num_ready = max(0, state.num_ready - want.skip_blocks)
            self._at_once([(self._load_block, watch, *pair) for pair in target[num_loaded:num_ready]])
            num_loaded = num_ready
            if state.tail is not None:
                return state.tail
            state = watch.next()

    def _load_block(self, watch: Watch, name: bytes, block_id: int) -> None:
        watch.pull.check()
        content = self._shelf.get_block(watch.pull.ticket.fingerprint, name)
        layout = self._pool.layout
        planes = np.frombuffer(content, np.uint8).reshape(layout.num_planes, layout.block_bytes)
        self._pool.planes[:, block_id] = planes

    def _send_note(self, ticket: KVTicket, note: Note) -> None:
        if isinstance(note, Decline) and ticket.address == self._shelf.store_id:
            self._shelf.decline(ticket.ticket_id)

    def _at_once(self, calls: Iterable[tuple[Callable[..., None], *tuple[object, ...]]]) -> None:
        """Make calls on the file threads and wait for all of them. Raises what the first that failed did."""
        futures = [self._files.submit(call, *arguments) for call, *arguments in calls]
        wait(futures)
        for future in futures:
            future.result()


class Watch:
    """Waits for news of a ticket. Raises what ended the pull, PullError when the ticket has ended, or TimeoutError when
    there was no news for `timeout_s`."""

    def __init__(self, shelf: Shelf, pull: Pull, stop: threading.Event, timeout_s: float, conduct: Conduct) -> None:
        self.pull = pull
        self._shelf = shelf
        self._stop = stop
        self._timeout_s = timeout_s
        self._clock = conduct.clock
        self._known: TicketState | None = None

    def next(self) -> TicketState:
        """The ticket's state, when it is another than before."""
        deadline_s, pause_s = self._clock() + self._timeout_s, FIRST_PAUSE_S
        while (state := self._read()) is None or state == self._known:
            if self._clock() >= deadline_s:
                raise self._lateness()
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        self._known = state
        return state

    def check(self) -> None:
        """Whether the ticket is still good."""
        self._read()

    def _read(self) -> TicketState | None:
        self.pull.check()
        state = self._shelf.get_state(self.pull.ticket.ticket_id)
        if state is not None and state.epoch == self.pull.ticket.epoch and state.ended:
            cause = state.ended if state.ended in CAUSES else "protocol"
            raise PullError(cause, f"ticket {self.pull.ticket.ticket_id} has ended ({state.ended})")
        return state

    def _lateness(self) -> Exception:
        if self._known is None:
            return PullError("unknown_ticket", f"the store has no ticket {self.pull.ticket.ticket_id}")
        return TimeoutError()


def check_shape(want: Want, state: TicketState, num_names: int) -> None:
    """Raises PullError when a ticket in the store is not what a consumer wants."""
    if state.epoch != want.epoch:
        raise PullError("epoch", "the ticket in the store is of another life of its producer")
    if state.geometry != want.geometry:
        raise PullError("layout", describe_difference(state.geometry, want.geometry))
    if want.skip_blocks < 0 or state.num_blocks - want.skip_blocks != want.num_blocks:
        raise PullError("protocol", f"{want.num_blocks} blocks wanted after {want.skip_blocks} of {state.num_blocks}")
    if num_names < want.num_blocks:
        raise PullError("protocol", f"a store finds blocks by name, and {want.num_blocks} came with {num_names} names")


def log_bug(done: Future[None]) -> None:
    """What a save raises is a bug; it has told nobody."""
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("storing a KV ticket broke", exc_info=error)
