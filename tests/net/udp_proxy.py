"""A UDP proxy with faults: it loses, reorders and duplicates datagrams, or drops them all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import TracebackType

Address = tuple[str, int]


class UdpProxy:
    """A proxy between clients and `host:port`, with one socket to the server per client.

    Faults are attributes that may change while it runs; a seed selects the affected datagrams.
    """

    def __init__(self, host: str, port: int, *, seed: int = 4848) -> None:
        self._target = (host, port)
        self._dice = random.Random(seed)
        self.host, self.port = "127.0.0.1", 0
        self.lost = 0.0
        """The share of datagrams that never arrive."""
        self.doubled = 0.0
        """The share that arrives twice."""
        self.delayed = 0.0
        """The share that arrives late, behind those sent after it."""
        self.is_cut = False
        """Nothing arrives any more, on either side."""
        self.passed = self.dropped = 0
        self._ways: dict[Address, asyncio.DatagramTransport] = {}
        self._opening: dict[Address, list[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._front: asyncio.DatagramTransport

    async def __aenter__(self) -> UdpProxy:
        loop = asyncio.get_running_loop()
        front, _ = await loop.create_datagram_endpoint(lambda: _Ear(self._from_client), local_addr=(self.host, 0))
        self._front = front
        self.port = front.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        for task in list(self._tasks):
            task.cancel()
        for transport in (self._front, *self._ways.values()):
            transport.close()

    def forget(self) -> None:
        """Act like a restarted router: the server receives nothing more from these clients."""
        for transport in self._ways.values():
            transport.close()
        self._ways.clear()

    def _from_client(self, data: bytes, client: Address) -> None:
        way = self._ways.get(client)
        if way is not None:
            self._pass(data, way, None)
        elif client in self._opening:
            self._opening[client].append(data)
        else:
            self._opening[client] = [data]
            task = asyncio.get_running_loop().create_task(self._open_way(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open_way(self, client: Address) -> None:
        def back(data: bytes, _: Address) -> None:
            self._pass(data, self._front, client)

        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Ear(back), remote_addr=self._target)
        self._ways[client] = transport
        for data in self._opening.pop(client):
            self._pass(data, self._ways[client], None)

    def _pass(self, data: bytes, way: asyncio.DatagramTransport, to: Address | None) -> None:
        dice = self._dice.random
        if self.is_cut or dice() < self.lost:
            self.dropped += 1
            return
        self.passed += 1
        copies = 2 if dice() < self.doubled else 1
        for _ in range(copies):
            if dice() < self.delayed:
                asyncio.get_running_loop().call_later(0.01 * dice(), _send, way, data, to)
            else:
                _send(way, data, to)


def _send(way: asyncio.DatagramTransport, data: bytes, to: Address | None) -> None:
    if not way.is_closing():
        way.sendto(data, to)


class _Ear(asyncio.DatagramProtocol):
    def __init__(self, hear: Callable[[bytes, Address], None]) -> None:
        self._hear = hear

    def datagram_received(self, data: bytes, address: Address) -> None:
        self._hear(data, address)
