"""A broker on the memory engine with a manual clock."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.broker import Broker, BrokerSettings, Principal, allow_all
from headrace.broker.authorizer import Authorize
from headrace.engine.contract import Ack, Appended, Write
from headrace.engine.memory import MemoryEngine
from headrace.errors import BrokerError
from headrace.records import Record, RecordBatch

ANN = Principal("ann")


@dataclass(eq=False)
class HandTimer:
    callback: Callable[[], object]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class HandClock:
    """Unix ms and timers that only `tick` moves."""

    now: int = 1_700_000_000_000
    _timers: list[tuple[float, int, HandTimer]] = field(default_factory=list)
    _count: int = 0

    def __call__(self) -> int:
        return self.now

    def later(self, seconds: float, callback: Callable[[], object]) -> HandTimer:
        timer = HandTimer(callback)
        self._count += 1
        heapq.heappush(self._timers, (self.now + seconds * 1000, self._count, timer))
        return timer

    def tick(self, ms: int) -> None:
        """Advance the clock. Timers fire in order, each at its own time."""
        until = self.now + ms
        while self._timers and self._timers[0][0] <= until:
            time, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, int(time))
            if not timer.is_cancelled:
                timer.callback()
        self.now = until

    def forget_timers(self) -> None:
        self._timers.clear()

    @property
    def running(self) -> int:
        """Timers that have neither fired nor been cancelled."""
        return sum(not timer.is_cancelled for _, _, timer in self._timers)


class FragileEngine(MemoryEngine):
    """Appends that touch `topic` (None: any) fail through their future while `error` is set; all wait while `held`."""

    def __init__(self, *, clock: Callable[[], int]) -> None:
        super().__init__(clock=clock)
        self.error: BrokerError | None = None
        self.topic: str | None = None
        self.held: list[Callable[[], None]] | None = None
        self.appends = 0

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        self.appends += 1
        touched = self.topic is None or any(write.topic == self.topic for write in writes)
        if self.error is not None and touched:
            failed: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(failed.set_exception, self.error)
            return failed
        return super().append(writes, ack=ack, urgent=urgent, owned=owned)

    def hold(self) -> None:
        """Keep everything staged from now on invisible, until `let_go`."""
        self.held = []

    def let_go(self) -> None:
        held, self.held = self.held, None
        for flush in held or ():
            flush()

    def _flush(self) -> None:
        if self.held is None:
            super()._flush()
        else:
            self.held.append(super()._flush)


async def turns(count: int = 30) -> None:
    """Let every ready task run. The memory engine needs only iterations of the loop, so this does not wait."""
    for _ in range(count):
        await asyncio.sleep(0)


class Harness:
    def __init__(self, settings: BrokerSettings | None = None, authorize: Authorize = allow_all) -> None:
        self.settings = BrokerSettings() if settings is None else settings
        self.authorize = authorize
        self.clock = HandClock()
        self.engine = FragileEngine(clock=self.clock)
        self.dice = random.Random(7)
        """Shared by all brokers on this log, so that none repeats the random bytes of an earlier one."""
        self.broker = self._broker()

    def _broker(self) -> Broker:
        return Broker(
            self.engine,
            clock=self.clock,
            settings=self.settings,
            authorize=self.authorize,
            later=self.clock.later,
            random_bytes=self.dice.randbytes,
        )

    async def restart(self) -> None:
        """Restart after a clean stop."""
        await self.broker.close()
        await self.crash()

    async def crash(self) -> None:
        """Start a new broker on the same log, without closing the old one. Its timers are dropped."""
        self.clock.forget_timers()
        self.broker = self._broker()
        await self.broker.open()

    async def put(self, *values: str, topic: str = "t", partition: int | None = None) -> None:
        await self.broker.publish(ANN, topic, RecordBatch([value.encode() for value in values]), partition=partition)

    async def records(self, topic: str = "t", partition: int = 0) -> list[Record]:
        """Return all records of the log, also of internal topics."""
        bounds = self.engine.bounds(topic, partition)
        batches = await self.engine.read(topic, partition, bounds.first, bytes_max=1 << 30)
        return [record for batch in batches for record in batch.records()]

    async def values(self, topic: str = "t", partition: int = 0) -> list[str]:
        return [(record.value or b"").decode() for record in await self.records(topic, partition)]
