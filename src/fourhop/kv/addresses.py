"""Which addresses a consumer connects to: those that its configuration names. A ticket alone is nobody's permission."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import PullError
from fourhop.wire.errors import StartError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1"))


@dataclass(frozen=True)
class Place:
    """The hosts of a network, at one port or, if that is None, at any."""

    network: Network
    port: int | None = None


class Peers:
    """The addresses that may be connected to; all of them when `places` is None."""

    def __init__(self, places: Iterable[Place] | None) -> None:
        self._places = None if places is None else tuple(places)

    def check(self, host: str, port: int) -> None:
        """Raises PullError("forbidden"). `host` is an IP address."""
        if self._places is None:
            return
        address = ipaddress.ip_address(host)
        if not any(address in place.network and place.port in (None, port) for place in self._places):
            raise PullError("forbidden", f"this engine's configuration does not name {host} port {port} as a peer")


def peers_of(options: ConnectorOptions, own_host: str) -> Peers:
    """The peers of a connector that listens at the IP address `own_host`. Raises StartError.

    With a secret every ticket that reaches a connector is signed by a peer, so any address will do.
    """
    if options.secret:
        return Peers(None)
    if options.peers:
        return Peers(place for peer in options.peers for place in places_of(peer))
    return Peers(Place(network) for network in (*LOOPBACK, ipaddress.ip_network(own_host)))


def places_of(peer: str) -> list[Place]:
    """`HOST`, `HOST:PORT` or `[IPV6]:PORT`, HOST being an address, a network or a name. Raises StartError.

    A name stands for the addresses it has now; looking it up at every pull could outlast any timeout.
    """
    host, port = split_port(peer)
    return [Place(network, port) for network in networks_of(peer, host)]


def split_port(peer: str) -> tuple[str, int | None]:
    """Raises StartError when what follows the colon is no port."""
    host, colon, digits = peer.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return peer.strip("[]"), None
    if not digits.isascii() or not digits.isdigit() or not 0 < int(digits) < 2**16:
        raise StartError(f"KV peer {peer!r}: {digits!r} is not a port")
    return host.strip("[]"), int(digits)


def networks_of(peer: str, host: str) -> list[Network]:
    try:
        return [ipaddress.ip_network(host)]
    except ValueError:
        if "/" in host:
            raise StartError(f"KV peer {peer!r}: {host} is not a network") from None
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartError(f"KV peer {peer!r} is no address, network or known host: {error}") from None
    return [ipaddress.ip_network(str(address[0])) for *_, address in found]
