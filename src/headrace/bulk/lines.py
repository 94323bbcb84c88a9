"""Ending a connection that gRPC holds: by shutting its socket, which is found among those of the process by the addresses at its ends."""

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
    """End the connection of this peer (`ipv4:127.0.0.1:4711`) to this port of ours. Returns whether there was one."""
    wanted = address_of(peer)
    return wanted is not None and shut(port, {wanted}) > 0


def cut_all(port: int) -> int:
    """End every connection to this port of ours. Returns how many there were."""
    return shut(port, None)


def shut(port: int, wanted: Set[Address] | None) -> int:
    """End the connections of these peers to this port of ours; None: of all. Returns how many there were."""
    count = 0
    for name in os.listdir("/dev/fd"):
        line = _line(int(name))
        if line is None:
            continue
        with line:
            found = _ends(line)
            if found is not None and found[1] == port and (wanted is None or found[0] in wanted):
                count += _is_shut(line)
    return count


def _is_shut(line: socket.socket) -> bool:
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it ended by itself this moment
    return True


def address_of(peer: str) -> Address | None:
    """Of what gRPC calls a peer; None if that has no address."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """One text for each address: an IPv4 address is itself, also where a socket for both shows it as an IPv6 one."""
    found = ip_address(host.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)


def _line(number: int) -> socket.socket | None:
    """A socket of our own for this descriptor; None if it is something else. Nothing else is even opened: closing a file gives up locks."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        ours = os.dup(number)
    except OSError:
        return None  # closed since it was listed
    try:
        return socket.socket(fileno=ours)
    except OSError:
        os.close(ours)
        return None


def _ends(line: socket.socket) -> tuple[Address, int] | None:
    if line.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port, *_ = line.getpeername()
        return (_plain(host), port), line.getsockname()[1]
    except OSError:
        return None  # listens, or is gone
