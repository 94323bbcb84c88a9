"""A broker with a Flight endpoint in this process. Its event loop runs on a thread, so that tests can use the blocking client."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from headrace.access.access import Access, AccessSettings
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import Engine, TopicConfig
from headrace.engine.embedded import EmbeddedEngine
from headrace.engine.memory import MemoryEngine
from headrace.flight.client import ALL, FlightClient, Servers
from headrace.flight.endpoint import Endpoint, EndpointSettings
from headrace.records import RecordBatch
from headrace.storage.files import DiskFiles
from headrace.storage.store import StoreOptions

T = TypeVar("T")
ROOT = Principal("root")
NOW = 1_700_000_000_000
DEADLINE_SECONDS = 300.0


class Harness:
    """A broker and its endpoint. `now` is the broker's clock. `local_files`: its clients read the files of the broker."""

    def __init__(self) -> None:
        self.now = NOW
        self.local_files = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-broker", daemon=True)
        self.engine: Engine
        self.broker: Broker
        self.access: Access
        self.endpoint: Endpoint
        self.password: str | None = None

    def run(self, work: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(DEADLINE_SECONDS)

    def call(self, work: Callable[[], T]) -> T:
        async def wrapped() -> T:
            return work()

        return self.run(wrapped())

    async def open(self, path: Path | None, key: bytes | None, settings: EndpointSettings, access: AccessSettings) -> None:
        clock = lambda: self.now  # noqa: E731  # one word for three users
        self.engine = (
            MemoryEngine(clock=clock)
            if path is None
            else EmbeddedEngine(DiskFiles(path), StoreOptions(key=key, headroom_bytes=0), clock=clock)
        )
        self.access = Access(self.engine, clock=clock, random_bytes=secrets.token_bytes, settings=access)
        self.broker = Broker(
            self.engine,
            clock=clock,
            settings=BrokerSettings(),
            authorize=self.access.authorize,
            audit_hook=self.access.record_decision,
            random_bytes=secrets.token_bytes,
        )
        self.access.listen(self.broker.access_changed)
        await self.broker.open()
        self.password = await self.access.open()
        self.endpoint = await Endpoint.open("127.0.0.1", 0, self.broker, self.access, settings)

    async def close(self) -> None:
        assert await self.endpoint.drain(DEADLINE_SECONDS) == 0, "a call did not end"
        await self.access.close()
        await self.broker.close()

    @property
    def servers(self) -> Servers:
        return Servers.parse(self.endpoint.address)

    def client(self, **more: Any) -> FlightClient:
        return FlightClient(Servers.parse(self.endpoint.address, **{"local_files": self.local_files, **more}))

    def topic(self, name: str, partitions: int = 1, **config: Any) -> str:
        self.run(self.broker.create_topic(ROOT, name, partitions=partitions, config=TopicConfig(**config)))
        return name

    def publish(self, topic: str, record_batch: RecordBatch, partition: int | None = 0) -> None:
        async def published() -> None:
            await self.broker.publish(ROOT, topic, record_batch, partition=partition)

        self.run(published())


@contextmanager
def running_harness(
    path: Path | None = None,
    *,
    key: bytes | None = None,
    settings: EndpointSettings = EndpointSettings(),
    access: AccessSettings = AccessSettings(),
) -> Iterator[Harness]:
    harness = Harness()
    harness._thread.start()
    try:
        harness.run(harness.open(path, key, settings, access))
        try:
            yield harness
        finally:
            harness.run(harness.close())
    finally:
        harness._loop.call_soon_threadsafe(harness._loop.stop)
        harness._thread.join(DEADLINE_SECONDS)
        harness._loop.close()


def rows(client: FlightClient, topic: str, partition: int = 0, start: int | None = None, stop: int | None = None, **more: Any) -> list[Any]:
    """Return the rows of a range, by default of the whole partition, as dictionaries."""
    held = client.describe([topic])[topic].partitions[partition]
    start, stop = held.first if start is None else start, held.end if stop is None else stop
    return [row for batch in client.read(topic, partition, start, stop, **more) for row in batch.to_pylist()]


def values(*items: bytes | str | None, **columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(items, pa.binary()), **columns})


__all__ = ["ALL", "DEADLINE_SECONDS", "NOW", "ROOT", "Harness", "rows", "running_harness", "values"]
