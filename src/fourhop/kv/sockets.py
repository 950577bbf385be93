"""Sockets that can be shut from outside: a listener with a thread per conversation, and connections to peers."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec

from fourhop.kv.addresses import Peers
from fourhop.kv.connector import PullError
from fourhop.kv.control import Channel
from fourhop.wire.errors import StartError

logger = logging.getLogger(__name__)

MAX_CONVERSATIONS = 512
"""Connections served at once; more wait in the listener's backlog."""

ACCEPT_PAUSE_S = 0.05


class OpenSockets:
    """The sockets that threads wait on; `shut` wakes them all with a ConnectionError and admits no more."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def holding(self, sock: socket.socket) -> Iterator[None]:
        """Own `sock` for a while and close it at the end. Raises ConnectionError once shut."""
        with sock:
            with self._lock:
                self._open.add(sock)
            try:
                self.check()
                yield
            finally:
                with self._lock:
                    self._open.discard(sock)

    def check(self) -> None:
        if self._closed:
            raise ConnectionError("this engine's connector is closed")

    def shut(self) -> None:
        self._closed = True
        with self._lock:
            for sock in self._open:
                shut(sock)


class Listener:
    """Accepts connections and gives each, as a channel of `timeout_s`, to `converse` on a thread of its own.

    What a peer does wrong (OSError, msgspec.DecodeError) ends its conversation only.
    """

    def __init__(self, host: str, port: int, timeout_s: float, converse: Callable[[Channel], None]) -> None:
        self._converse = converse
        self._timeout_s = timeout_s
        self._listener = listen(host, port)
        self.host, self.port = self._listener.getsockname()[:2]
        self._sockets = OpenSockets()
        self._slots = threading.Semaphore(MAX_CONVERSATIONS)
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop accepting, end the open conversations and wait for their threads. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._sockets.shut()
        self._acceptor.join()
        for thread in list(self._threads):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            self._slots.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # closing, or out of descriptors: the latter passes
                self._slots.release()
                if not self._closing.wait(ACCEPT_PAUSE_S):
                    logger.warning("KV port %d cannot accept: %s", self.port, error)
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="kv-serve", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with self._sockets.holding(sock):
                self._converse(Channel(sock, self._timeout_s))
        except (OSError, msgspec.DecodeError) as error:
            logger.info("a conversation on KV port %d ended early: %s", self.port, error)
        finally:
            self._slots.release()
            self._threads.discard(threading.current_thread())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at an address that peers can use. Raises StartError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartError(f"KV host {host}: {error.strerror}") from None
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise StartError(f"KV host {host} goes into tickets, so it must be an address that peers can reach")
    sock = socket.socket(family, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(socket.SOMAXCONN)
    except OSError as error:
        sock.close()
        raise StartError(f"KV port {host}:{port}: {error.strerror}") from None
    return sock


def shut(sock: socket.socket) -> None:
    """Wake whoever waits for this socket with a ConnectionError."""
    with contextlib.suppress(OSError):  # not connected, or the peer was quicker
        sock.shutdown(socket.SHUT_RDWR)


def socket_for(host: str, port: int, peers: Peers) -> socket.socket:
    """An unconnected socket for an address. Raises PullError when it is none or not among `peers`; looking a name up
    could outlast any timeout, so a host is an IP address."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise PullError("unreachable", "the ticket's host is not an IP address") from None
    if not 0 < port < 2**16:
        raise PullError("unreachable", f"the ticket's port is {port}")
    peers.check(host, port)
    return socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
