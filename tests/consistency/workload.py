"""Clients of a mixed load across restarts of the broker. Each records its operations and their results.

    plain           one value at a time through raw sockets of four protocols; never sent again
    transactions    FlyMQ and Fujin, over two topics at once, some rolled back
    writers         versions of exactly-once writers through Arrow Flight, repeated over reconnects until confirmed
    work queue      Fujin consumers that acknowledge, reject and forget
    committer       a FlyMQ group that moves forward

The broker is killed with SIGKILL at any time. `Life` has its current address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import pyarrow as pa

from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.fujin.client import FujinClient
from headrace.errors import HeadraceError, InvalidTransaction
from headrace.flight.client import FlightClient, Servers
from tests.consistency.history import Commit, Delivery, History, Position, Read, Restart, Settlement, Unit
from tests.crash.peer import Peer
from tests.crash.protocols import BlipMqPeer, FlyMqPeer, RustLogPeer
from tests.crash.serving import SMALL, Broker, check_directory

T = TypeVar("T")
PARTITIONS: Final = {"plain": 1, "left": 2, "right": 2, "ledger": 2, "work": 2}
QUEUE: Final = "work"
GROUP: Final = "billing"
SECONDS_MAX: Final = 300.0
SETTINGS: Final = {**SMALL, "HEADRACE__LISTEN__FLIGHT": "127.0.0.1:0"}


class Over(Exception):
    """The broker was stopped; pending requests have an unknown outcome."""


class Life:
    """One process of the broker."""

    def __init__(self, tcp: tuple[str, int], quic: tuple[str, int], flight: str) -> None:
        self.tcp, self.quic, self.flight = tcp, quic, flight
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self) -> None:
        self._over.set()

    async def within(self, work: Awaitable[T]) -> T:
        """Return the reply; raises `Over` if the broker stops first."""
        answer, over = asyncio.ensure_future(work), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({answer, over}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Over
            return answer.result()
        finally:
            for task in (answer, over):
                task.cancel()
            with contextlib.suppress(BaseException):
                await answer


class Workload:
    """`run` starts the broker `lives` times and records everything in `history`."""

    def __init__(self, directory: Path, *, seed: int) -> None:
        self._directory = directory
        self._rng = random.Random(seed)
        self.history = History()
        self._numbers: dict[str, int] = {}
        self._positions: dict[str, int] = {}
        self._versions: dict[str, Unit] = {}
        self.kills = 0

    async def run(self, lives: int) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))  # every blocking client keeps a thread
        for number in range(lives):
            await self._live(number, killed=True)
            self.kills += 1
        await self._live(lives, killed=False)
        report = await asyncio.to_thread(check_directory, self._directory)
        assert report.returncode == 0, report.stdout + report.stderr

    async def _live(self, number: int, *, killed: bool) -> None:
        broker = Broker(self._directory, settings=SETTINGS)
        try:
            tcp = await asyncio.to_thread(broker.wait_ready)
            self.history.add(Restart())
            async with await FlyMqClient.connect(*tcp) as client:
                if number == 0:
                    for topic, count in PARTITIONS.items():
                        await client.create_topic(topic, partitions=count)
                await self._observe(client)
            await self._suffer(broker, tcp, killed=killed)
        finally:
            if broker.process.poll() is None:
                await asyncio.to_thread(broker.kill)

    async def _suffer(self, broker: Broker, tcp: tuple[str, int], *, killed: bool) -> None:
        """Run all clients, then kill the broker or, once nothing is pending, stop it."""
        flight = json.loads((self._directory / "ready.json").read_text())["protocols"]["flight"][0]
        publishing, consuming = Life(tcp, broker.quic, flight), Life(tcp, broker.quic, flight)
        publishers = [asyncio.create_task(self._client(publishing, act)) for act in self._acts()]
        consumers = [asyncio.create_task(self._client(consuming, self._consume)) for _ in range(2)]
        try:
            await asyncio.sleep(self._rng.uniform(0.4, 2.0))
            if killed:
                await asyncio.to_thread(broker.kill)
            publishing.end()
            await asyncio.gather(*publishers)
            if not killed:
                await self._drain_queue()
        finally:
            publishing.end()
            consuming.end()
            await asyncio.gather(*publishers, *consumers)
        if not killed:
            async with await FlyMqClient.connect(*tcp) as reader:
                await self._observe(reader)
            assert await asyncio.to_thread(broker.stop, SECONDS_MAX) == 0, broker.output()

    async def _client(self, life: Life, act: Callable[[Life], Awaitable[None]]) -> None:
        """Repeat until the broker stops. A connection may be lost before, for example if the broker accepts slowly."""
        while not life.is_over:
            try:
                await act(life)
            except (Over, HeadraceError, OSError):
                await asyncio.sleep(0.02)

    def _acts(self) -> Iterator[Callable[[Life], Awaitable[None]]]:
        for kind in (Peer, FlyMqPeer, RustLogPeer, BlipMqPeer):
            yield lambda life, kind=kind: self._plain(life, kind)  # type: ignore[misc]  # mypy cannot infer a default of a lambda
        yield self._flymq_transactions
        yield self._fujin_transactions
        for name in ("writer-a", "writer-b"):
            yield lambda life, name=name: self._write_versions(life, name)  # type: ignore[misc]  # as above
        yield self._commit

    def _next(self, producer: str) -> int:
        self._numbers[producer] = self._numbers.get(producer, 0) + 1
        return self._numbers[producer]

    def _unit(self, producer: str, *topics: str) -> Unit:
        number = self._next(producer)
        unit = Unit(producer, number, tuple((topic, f"{producer}-{number}-{index}") for index, topic in enumerate(topics)))
        self.history.add(unit)
        return unit

    # Publishing.

    async def _plain(self, life: Life, kind: type[Peer]) -> None:
        """Publish on a blocking socket. The thread ends with the connection, which the kill ends."""

        def publish() -> None:
            with kind(life.tcp, timeout=SECONDS_MAX) as peer:
                while not life.is_over:
                    unit = self._unit(f"plain-{kind.NAME}", self._rng.choice(("plain", "plain", QUEUE)))
                    ((topic, value),) = unit.values
                    peer.publish([(topic, unit.number, value.encode())])
                    while peer.acknowledged() < unit.number:
                        pass
                    unit.outcome = "ok"
                    time.sleep(0.002)  # yields the processor to other clients

        await asyncio.to_thread(publish)

    async def _flymq_transactions(self, life: Life) -> None:
        client = await life.within(FlyMqClient.connect(*life.tcp))
        try:
            while True:
                unit = self._unit("flymq-tx", *self._rng.choices(("left", "right"), k=self._rng.randrange(1, 6)))
                transaction = client.transaction()
                try:
                    await life.within(transaction.begin())
                    for topic, value in unit.values:
                        await life.within(transaction.publish(topic, value.encode()))
                    if self._rng.random() < 0.2:
                        unit.outcome = "fail"
                        await life.within(transaction.rollback())
                        continue
                except BaseException:
                    unit.outcome = "fail"  # no commit was requested
                    raise
                try:
                    await life.within(transaction.commit())
                except InvalidTransaction:
                    unit.outcome = "fail"
                    raise
                unit.outcome = "ok"
        finally:
            client.abandon()
            await client.close()

    async def _fujin_transactions(self, life: Life) -> None:
        client = await life.within(FujinClient.connect(*life.quic))
        try:
            while True:
                unit = self._unit("fujin-tx", *self._rng.choices(("left", "right"), k=self._rng.randrange(1, 6)))
                rolled_back = self._rng.random() < 0.2
                unit.outcome = "fail"  # until the commit is sent

                async def transact(unit: Unit = unit, rolled_back: bool = rolled_back) -> None:
                    async with client.transaction() as transaction:
                        for topic, value in unit.values:
                            await transaction.publish(topic, value.encode())
                        if rolled_back:
                            raise _RolledBack
                        unit.outcome = "unknown"
                    unit.outcome = "ok"

                with contextlib.suppress(_RolledBack):
                    await life.within(transact())
        finally:
            client.abandon()
            await client.close()

    async def _write_versions(self, life: Life, name: str) -> None:
        """Stage and publish each version until it is confirmed, also after restarts."""

        def write() -> None:
            with FlightClient(Servers((life.flight,), timeout_seconds=SECONDS_MAX)) as client:
                while not life.is_over:
                    unit = self._versions.get(name)
                    if unit is None:
                        unit = self._versions[name] = self._unit(name, *["ledger"] * 12)
                    handle = f"{name}-{unit.number}-{self._next('handle')}"
                    rows = pa.record_batch({"value": pa.array([value.encode() for _, value in unit.values], pa.binary())})
                    client.stage(handle, [rows], topic="ledger", writer=name)
                    client.publish(name, unit.number, [handle])
                    unit.outcome = "ok"
                    del self._versions[name]

        await asyncio.to_thread(write)

    # Reading.

    async def _consume(self, life: Life) -> None:
        client = await life.within(FujinClient.connect(*life.quic))
        try:
            subscription = await life.within(client.subscribe(QUEUE))
            while True:
                message = await life.within(anext(subscription))
                value = message.value.decode()
                self.history.add(Delivery(QUEUE, value))
                choice = self._rng.random()
                if choice < 0.03:
                    await life.within(message.nack())
                elif choice < 0.97 and await life.within(message.ack()):
                    self.history.add(Settlement(QUEUE, value))
        finally:
            client.abandon()
            await client.close()

    async def _drain_queue(self) -> None:
        """Consume until every confirmed value was delivered at least once. The checker names those that were not."""
        deadline = time.monotonic() + SECONDS_MAX
        wanted = {
            value
            for event in self.history.events
            if isinstance(event, Unit) and event.outcome == "ok"
            for topic, value in event.values
            if topic == QUEUE
        }
        while time.monotonic() < deadline:
            delivered = {event.value for event in list(self.history.events) if isinstance(event, Delivery)}
            if wanted <= delivered:
                return
            await asyncio.sleep(0.1)

    async def _commit(self, life: Life) -> None:
        client = await life.within(FlyMqClient.connect(*life.tcp))
        try:
            while True:
                end = await life.within(client.end_offset("plain"))
                offset = min(self._positions.get(GROUP, 0) + 1, end)
                self._positions[GROUP] = offset
                commit = Commit(GROUP, offset)
                self.history.add(commit)
                await life.within(client.commit("plain", offset, group=GROUP))
                commit.outcome = "ok"
                await asyncio.sleep(0.005)
        finally:
            client.abandon()
            await client.close()

    async def _observe(self, client: FlyMqClient) -> None:
        """Read every partition from its start, and the position of the group."""
        for topic, count in PARTITIONS.items():
            for partition in range(count):
                offsets: list[int] = []
                values: list[str] = []
                while fetched := await client.fetch(topic, len(offsets), partition=partition, records_max=2_000):
                    offsets += [message.offset for message in fetched if message.offset is not None]
                    values += [message.value.decode() for message in fetched]
                self.history.add(Read((topic, partition), tuple(offsets), tuple(values)))
        self.history.add(Position(GROUP, await client.committed("plain", group=GROUP)))


class _RolledBack(Exception):
    """The client rolls back."""
