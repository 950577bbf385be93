"""Which addresses a consumer connects to."""

from __future__ import annotations

import pytest

from fourhop.kv.addresses import peers_of
from fourhop.kv.config import ConnectorOptions
from fourhop.kv.connector import PullError
from fourhop.wire.errors import StartError


def allows(options: ConnectorOptions, host: str, port: int = 5000) -> bool:
    try:
        peers_of(options, "10.1.1.1").check(host, port)
    except PullError as refusal:
        assert refusal.cause == "forbidden"
        assert host in refusal.message
        return False
    return True


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("10.1.1.1", True),
        ("10.1.1.2", False),
        ("0.0.0.0", False),
        ("::", False),
        ("169.254.169.254", False),
        ("2001:db8::1", False),
    ],
)
def test_without_configuration_loopback_and_the_own_host(host: str, allowed: bool) -> None:
    assert allows(ConnectorOptions(), host) == allowed


@pytest.mark.parametrize(
    ("peer", "host", "port", "allowed"),
    [
        ("10.2.0.1", "10.2.0.1", 1, True),
        ("10.2.0.1", "10.2.0.2", 1, False),
        ("10.2.0.1:7000", "10.2.0.1", 7000, True),
        ("10.2.0.1:7000", "10.2.0.1", 7001, False),
        ("10.2.0.0/16", "10.2.9.9", 1, True),
        ("10.2.0.0/16:7000", "10.2.9.9", 7000, True),
        ("10.2.0.0/16:7000", "10.3.0.1", 7000, False),
        ("2001:db8::1", "2001:db8::1", 1, True),
        ("[2001:db8::1]", "2001:db8:0::1", 1, True),
        ("[2001:db8::1]:7000", "2001:db8::1", 7000, True),
        ("[2001:db8::1]:7000", "2001:db8::1", 7001, False),
        ("localhost", "127.0.0.1", 1, True),
        ("localhost:7000", "127.0.0.1", 7001, False),
        ("10.2.0.1", "127.0.0.1", 1, False),
        ("10.2.0.1", "10.1.1.1", 1, False),
    ],
)
def test_configured_peers_are_the_only_ones(peer: str, host: str, port: int, allowed: bool) -> None:
    assert allows(ConnectorOptions(peers=("192.0.2.1", peer)), host, port) == allowed


def test_with_a_secret_every_address() -> None:
    assert allows(ConnectorOptions(secret="s", peers=("10.2.0.1",)), "198.51.100.7")


@pytest.mark.parametrize(
    "peer", ["", "10.2.0.1:", "10.2.0.1:port", "10.2.0.1:0", "10.2.0.1:70000", "10.2.0.1/8", "x" * 70]
)
def test_peer_that_is_no_address_is_one_line(peer: str) -> None:
    with pytest.raises(StartError, match="KV peer '") as caught:
        peers_of(ConnectorOptions(peers=(peer,)), "127.0.0.1")
    assert "\n" not in str(caught.value)
