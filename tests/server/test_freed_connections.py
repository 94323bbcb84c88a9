"""A closed connection is freed at once: its objects do not wait for a garbage collection, which would stop the event loop."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator, Sequence

import pytest
import uvloop

from headrace.broker.broker import Broker
from headrace.engine.memory import MemoryEngine
from headrace.net.listener import Listener
from headrace.net.protocol import ServedProtocol
from headrace.server.config_sources import resolve
from headrace.server.protocols import Protocols
from headrace.server.wiring import access_of
from headrace.wire import figg, flymq, rustlog
from headrace.wire.blipmq import encoder
from headrace.wire.flymq import messages as flymq_messages
from headrace.wire.rustlog import Dialect
from headrace.wire.rustlog import messages as rustlog_messages
from tests.net.polling import until
from tests.net.test_listener import listening

KEY = "the-key-of-this-test"
CONNECTIONS = 20
REQUESTS = {
    "figg": [figg.encode.publish("t", [1], [b"value"]), figg.encode.attach("t", 0)],
    "rustlog": [
        rustlog.encode_request(Dialect.BINARY, rustlog_messages.Produce("t", 0, [b"value"])),
        rustlog.encode_request(Dialect.BINARY, rustlog_messages.Fetch("t", 0, 0, 1 << 20)),
    ],
    "flymq": [
        flymq.encode_request(flymq_messages.ProduceBatch("t", [b"value"])),
        flymq.encode_request(flymq_messages.Fetch("t", 0, 0, 5_000)),
        flymq.encode_request(flymq_messages.Consume("t", 0, 0)),
    ],
    "blipmq": [encoder.hello(1), encoder.auth(2, KEY.encode()), encoder.publishes(1, "t", [3], [b"value"]), encoder.ping(4)],
}
"""Each is answered."""


async def use(listener: Listener, requests: Sequence[bytes]) -> None:
    """Connect, send each request, and wait for an answer to each."""
    loop = asyncio.get_running_loop()
    with socket.socket() as peer:
        peer.setblocking(False)
        await loop.sock_connect(peer, (listener.host, listener.port))
        for request in requests:
            await loop.sock_sendall(peer, request)
            await loop.sock_recv(peer, 1 << 20)
    await until(lambda: listener.counters.open == 0)


async def garbage(protocol: ServedProtocol, requests: Sequence[bytes]) -> int:
    """Return the number of objects that only a collection frees, the least of three rounds. What connections leave behind is found in each;
    what other tests of this process have left may be found in one of them."""
    async with listening([protocol]) as listener:
        for _ in range(3):
            await use(listener, requests)
        rounds: list[int] = []
        for _ in range(3):
            gc.collect()
            for _ in range(CONNECTIONS):
                await use(listener, requests)
            rounds.append(gc.collect())
        return min(rounds)


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.usefixtures("without_collections")
def test_a_closed_connection_needs_no_garbage_collection(name: str) -> None:
    async def run() -> int:
        engine = MemoryEngine(clock=lambda: 0)
        await engine.open()
        config = resolve().config
        broker = Broker(engine, clock=lambda: 0)
        await broker.open()
        access = access_of(config, engine, lambda: 0)
        await access.open()
        protocols = Protocols(broker, engine, config, access, clock=lambda: 0, blipmq_keys={"bench": KEY})
        await protocols.open()
        (protocol,) = protocols.named([name])
        return await garbage(protocol, REQUESTS[name])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run())
    assert found < CONNECTIONS
