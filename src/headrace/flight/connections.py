"""Connection limits of the Flight endpoint.

gRPC accepts every connection, and `pyarrow` cannot set a limit. So the connections are counted once a second in the kernel's table, and
those beyond the limit are shut down: first those without a call in progress, from the address that has the most. The same happens when
a call has waited too long for its first message, because `pyarrow` does not report the peer of that call.

The kernel looks through the connections of the whole system for that table, which takes 10 ms of processor time. A process that has fewer
open files than the limits allow connections needs no count.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from headrace.flight.calls import Calls
from headrace.flight.sockets import Address, address_of, open_files, shut
from headrace.limits import CONNECTIONS_PER_IP_MAX, FLIGHT_CONNECTIONS_MAX

_log = logging.getLogger(__name__)
_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LATE_CHECKS_MAX: Final = 3
_ESTABLISHED: Final = "01"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connection limits, in total and per address."""

    connections_max: int = FLIGHT_CONNECTIONS_MAX
    per_ip_max: int = CONNECTIONS_PER_IP_MAX


class ConnectionWatch:
    """Counter of the connections to one port. Thread-safe."""

    def __init__(self, port: int, calls: Calls, limits: ConnectionLimits) -> None:
        self._port, self._calls, self._limits = port, calls, limits
        self.disconnected = 0
        self._late_checks = 0
        """Consecutive checks that found a call that waits too long for its peer."""

    def check(self) -> int:
        """Disconnect excess and late peers. Return how many."""
        served = [address for peer in self._calls.peers if (address := address_of(peer)) is not None]
        late = self._calls.late_openings
        self._late_checks = self._late_checks + 1 if late else 0
        if not late and open_files() <= min(self._limits.connections_max, self._limits.per_ip_max):
            return 0
        found = connections(self._port)
        chosen = set(surplus(found, set(served), self._limits))
        if late:
            chosen.update(set(found) - set(served))
        if self._late_checks >= _LATE_CHECKS_MAX:
            # The silent calls share connections with calls in progress: close the oldest, one per check.
            chosen.update(served[:1])
        if not chosen:
            return 0
        count = shut(self._port, chosen)
        self.disconnected += count
        _log.warning("disconnected peers of the Flight endpoint", extra={"connections": count, "of": len(found), "silent_calls": late})
        return count


def surplus(found: Iterable[Address], served: set[Address], limits: ConnectionLimits) -> list[Address]:
    """Return the connections to close: those beyond the limit per address, then those beyond the total limit."""
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
    """Return the peer addresses of the connections to this local port, including those not accepted yet."""
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
    """Parse `0100007F:1F90`: four-byte words in native byte order, then the port."""
    host, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    if len(raw) == 4:
        return str(IPv4Address(raw)), int(port, 16)
    address = IPv6Address(raw)
    return str(address.ipv4_mapped or address), int(port, 16)
