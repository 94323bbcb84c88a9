"""Bound the connections of the Flight endpoint.

gRPC accepts whoever comes and has no limit that `pyarrow` could set. So the connections are counted once a second, in the kernel's table
of them, and those that are too many are shut down: first those without a call that is being served, from the address that has the most.
The same happens to them when a call has waited too long for its peer's first message: `pyarrow` does not say whose call it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from headrace.bulk.calls import Calls
from headrace.bulk.lines import Address, address_of, shut
from headrace.limits import CONNECTIONS_PER_IP_MAX, FLIGHT_CONNECTIONS_MAX

_log = logging.getLogger(__name__)
_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LOOKS_PATIENT: Final = 3
_ESTABLISHED: Final = "01"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, in all and from one address."""

    connections_max: int = FLIGHT_CONNECTIONS_MAX
    per_ip_max: int = CONNECTIONS_PER_IP_MAX


class ConnectionWatch:
    """Counts the connections to one port, on any thread."""

    def __init__(self, port: int, calls: Calls, limits: ConnectionLimits) -> None:
        self._port, self._calls, self._limits = port, calls, limits
        self.disconnected = 0
        self._looks_late = 0
        """How many looks in a row have found a call that waits too long for its peer."""

    def look(self) -> int:
        """Disconnect those that are too many or too late. Returns how many."""
        served = [address for peer in self._calls.peers if (address := address_of(peer)) is not None]
        late = self._calls.late_openings
        self._looks_late = self._looks_late + 1 if late else 0
        found = connections(self._port)
        chosen = set(surplus(found, set(served), self._limits))
        if late:
            chosen.update(set(found) - set(served))
        if self._looks_late >= _LOOKS_PATIENT:
            # The silent calls share their connections with calls that are served: the oldest go first, one with each look.
            chosen.update(served[:1])
        if not chosen:
            return 0
        count = shut(self._port, chosen)
        self.disconnected += count
        _log.warning("disconnected peers of the Flight endpoint", extra={"connections": count, "of": len(found), "silent_calls": late})
        return count


def surplus(found: Iterable[Address], served: set[Address], limits: ConnectionLimits) -> list[Address]:
    """Return the connections that have to go: of each address those beyond its limit, of all those beyond theirs."""
    by_host: dict[str, list[Address]] = {}
    for address in sorted(found, key=lambda address: address not in served):
        by_host.setdefault(address[0], []).append(address)
    gone = [address for addresses in by_host.values() for address in addresses[limits.per_ip_max :]]
    kept = {host: addresses[: limits.per_ip_max] for host, addresses in by_host.items()}
    count = sum(map(len, kept.values()))
    sizes = Counter({host: len(addresses) for host, addresses in kept.items()})
    while count > limits.connections_max:
        ((host, size),) = sizes.most_common(1)
        gone.append(kept[host].pop())
        sizes[host] = size - 1
        count -= 1
    return gone


def connections(port: int) -> list[Address]:
    """Return the other ends of the connections to this port of ours, those included that nobody has accepted yet."""
    found: list[Address] = []
    local = f":{port:04X}"
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except FileNotFoundError:  # no IPv6
            continue
        for line in lines:
            # sl  local_address  rem_address  st …
            fields = line.split(None, 4)
            if fields[3] == _ESTABLISHED and fields[1].endswith(local):
                found.append(_address(fields[2]))
    return found


def _address(text: str) -> Address:
    """Of `0100007F:1F90`: words of four bytes in the order of this machine, then the port."""
    host, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    if len(raw) == 4:
        return str(IPv4Address(raw)), int(port, 16)
    address = IPv6Address(raw)
    return str(address.ipv4_mapped or address), int(port, 16)
