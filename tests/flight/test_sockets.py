"""The right connection is closed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace.flight.sockets import address_of, cut, cut_all


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:[::ffff:10.0.0.7]:80", ("10.0.0.7", 80)),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", ("fe80::1", 80)),
        ("unix:/tmp/socket", None),
        ("", None),
        ("ipv4:127.0.0.1:", None),
    ],
)
def test_a_peer_is_known_by_its_address(peer: str, address: tuple[str, int] | None) -> None:
    assert address_of(peer) == address


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(server.getsockname()[:2])
    return client, server.accept()[0]


@pytest.mark.parametrize(
    ("family", "host", "shown"), [(socket.AF_INET, "127.0.0.1", "ipv4:{}:{}"), (socket.AF_INET6, "::1", "ipv6:%5B{}%5D:{}")]
)
def test_one_connection_is_cut_and_the_others_go_on(tmp_path: Path, family: socket.AddressFamily, host: str, shown: str) -> None:
    with socket.create_server((host, 0), family=family) as server, (tmp_path / "other").open("wb"):
        (bad, bad_end), (good, good_end) = connected(server), connected(server)
        with bad, bad_end, good, good_end:
            before = len(os.listdir("/dev/fd"))
            port = server.getsockname()[1]
            peer = shown.format(*bad.getsockname()[:2])
            assert not cut(peer, port + 1), "it is a connection of another listener"
            assert cut(peer, port)
            assert bad.recv(1) == b""
            good.sendall(b"x")
            assert good_end.recv(1) == b"x"
            assert len(os.listdir("/dev/fd")) == before
        assert not cut(peer, port)


def test_all_connections_of_one_port_are_cut_and_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as others:
        pairs = [connected(ours), connected(ours)]
        other, other_end = connected(others)
        assert cut_all(ours.getsockname()[1]) == 2
        for client, end in pairs:
            assert client.recv(1) == b""
            client.close()
            end.close()
        other.sendall(b"x")
        assert other_end.recv(1) == b"x"
        other.close()
        other_end.close()
