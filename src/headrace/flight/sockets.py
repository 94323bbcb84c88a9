"""Closing connections of gRPC: shut down the socket, found among the descriptors of the process by its two addresses."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Set
from ipaddress import ip_address
from typing import TypeAlias
from urllib.parse import unquote

Address: TypeAlias = tuple[str, int]


def cut(peer: str, port: int) -> bool:
    """Close the connection of this peer (`ipv4:127.0.0.1:4711`) to this local port. Return whether there was one."""
    wanted = address_of(peer)
    return wanted is not None and shut(port, {wanted}) > 0


def cut_all(port: int) -> int:
    """Close every connection to this local port. Return how many there were."""
    return shut(port, None)


def open_files() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/dev/fd")) - 1  # without the one that lists them


def shut(port: int | None, wanted: Set[Address] | None) -> int:
    """Close the connections of these peers (None: of all) to this local port (None: to any). Return how many there were."""
    count = 0
    for name in os.listdir("/dev/fd"):
        found_socket = _socket_of(int(name))
        if found_socket is None:
            continue
        with found_socket:
            found = _ends(found_socket)
            if found is not None and port in (None, found[1]) and (wanted is None or found[0] in wanted):
                count += _is_shut(found_socket)
    return count


def _is_shut(found_socket: socket.socket) -> bool:
    try:
        found_socket.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it has just ended
    return True


def address_of(peer: str) -> Address | None:
    """Parse the address of a gRPC peer name; None if it has none."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """Normalize an address: an IPv4-mapped IPv6 address becomes the IPv4 address."""
    found = ip_address(host.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def _socket_of(number: int) -> socket.socket | None:
    """Return a duplicate of the socket with this descriptor; None if it is not a socket. Other files are not duplicated: closing a
    duplicate releases locks."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        duplicate = os.dup(number)
    except OSError:
        return None  # closed since it was listed
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None


def _ends(found_socket: socket.socket) -> tuple[Address, int] | None:
    if found_socket.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port, *_ = found_socket.getpeername()
        return (_plain(host), port), found_socket.getsockname()[1]
    except OSError:
        return None  # a listening or closed socket
