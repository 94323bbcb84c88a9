"""The load of the fault tests, as applications make it: publishers and members of groups that know the address of one broker.

Each partition has one publisher, which numbers its values and keeps a ledger of their outcomes:

    plain          single records; the client has the addresses of both brokers
    transactions   a FlyMQ transaction for each batch, through one broker, which hands the connection over if it is not the coordinator
    writer         an exactly-once writer over Flight, through one broker; it repeats each version until it is acknowledged

The first two send each value once: after an unknown outcome they go on with the next value. Two groups, one ordered and one shared, have a
member at each broker, which settles what it gets.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, cast

import pyarrow as pa

import headrace
from headrace.clients.errors import NotSent, OutcomeUnknown
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import GroupMode
from headrace.errors import BrokerError, HeadraceError, UnknownStage
from headrace.flight.client import FlightClient, Servers

BATCH: Final = 10
PUBLISH_SECONDS: Final = 20.0
RECOVERY_SECONDS_MAX: Final = 240.0
UNKNOWN_KINDS: Final = frozenset(("outcome_unknown", "unknown_outcome"))
MODES: Final[tuple[GroupMode, ...]] = ("ordered", "shared")
"""Modes of the groups, which are their names too."""
BEHIND_MAX: Final = 100
"""Records of a partition that a group may be behind its publisher, which waits then."""
_PAUSE_SECONDS: Final = 0.05


class Places(Protocol):
    """Addresses of two brokers."""

    tcp: list[str]
    flight: list[str]


class Outcome(enum.Enum):
    """What a publisher knows about a value."""

    ACKNOWLEDGED = enum.auto()
    REFUSED = enum.auto()
    UNKNOWN = enum.auto()


Send: TypeAlias = Callable[[list[bytes]], Awaitable[list[Outcome]]]


@dataclass
class Ledger:
    """Outcomes of the values of one partition, in the order in which they were sent."""

    acknowledged: list[int] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    may_be_late: bool = False
    """Whether a value of unknown outcome may be stored after later ones. Not if the coordinator writes it: Kafka fences a former one."""

    def note(self, number: int, outcome: Outcome) -> None:
        if outcome is Outcome.ACKNOWLEDGED:
            self.acknowledged.append(number)
        else:
            (self.unknown if outcome is Outcome.UNKNOWN else self.refused).add(number)


def outcome_of(failure: object) -> Outcome:
    """Return what an error says about the value that was sent."""
    if isinstance(failure, OutcomeUnknown):
        return Outcome.UNKNOWN
    if isinstance(failure, NotSent | HeadraceError):
        kind = str(getattr(failure, "kind", "") or getattr(failure, "code", ""))
        return Outcome.UNKNOWN if kind in UNKNOWN_KINDS else Outcome.REFUSED
    raise AssertionError(failure)


def plain(client: FlyMqClient, topic: str, partition: int) -> Send:
    async def send(values: list[bytes]) -> list[Outcome]:
        futures = [await client.send(topic, value, partition=partition) for value in values]
        found = await asyncio.gather(*futures, return_exceptions=True)
        return [Outcome.ACKNOWLEDGED if isinstance(one, headrace.Receipt) else outcome_of(one) for one in found]

    return send


def transactions(client: FlyMqClient, topic: str, partition: int) -> Send:
    async def send(values: list[bytes]) -> list[Outcome]:
        transaction = client.transaction()
        try:
            await transaction.begin()
            for value in values:
                await transaction.publish(topic, value, partition=partition)
        except HeadraceError:
            return [Outcome.REFUSED] * len(values)  # without a commit nothing may be stored, whatever the error
        try:
            await transaction.commit()
        except HeadraceError as failure:
            return [outcome_of(failure)] * len(values)
        return [Outcome.ACKNOWLEDGED] * len(values)

    return send


class Writer:
    """An exactly-once writer that does not give up. `repeated` counts versions of which an earlier attempt had been published."""

    def __init__(self, address: str, topic: str, partition: int) -> None:
        self._client = FlightClient(Servers.parse(address))
        self._topic, self._partition, self._name = topic, partition, f"writer-{partition}"
        self._version = -1
        self.repeated = 0

    async def send(self, values: list[bytes]) -> list[Outcome]:
        self._version += 1
        await asyncio.to_thread(self._write, values)
        return [Outcome.ACKNOWLEDGED] * len(values)

    def _write(self, values: list[bytes]) -> None:
        places = pa.array([self._partition] * len(values), pa.int32())
        rows = pa.RecordBatch.from_arrays([pa.array(values, pa.binary()), places], names=["value", "partition"])
        deadline, attempt = time.monotonic() + RECOVERY_SECONDS_MAX, 0
        while True:
            handle = f"{self._name}-{self._version}-{attempt}"
            try:
                self._client.stage(handle, [rows], topic=self._topic, writer=self._name)
                self.repeated += self._client.publish(self._name, self._version, [handle]).already
                return
            except BrokerError as failure:
                if not (failure.retriable or isinstance(failure, UnknownStage)) or time.monotonic() > deadline:
                    raise
            attempt += 1
            time.sleep(_PAUSE_SECONDS)


class Load:
    """Publishes numbered values to each partition, one batch at a time, at the pace of the groups, until it is stopped."""

    PARTITIONS: Final = 5

    def __init__(self, topic: str, places: Places, groups: Groups) -> None:
        self.ledgers = [Ledger(may_be_late=partition == 0) for partition in range(self.PARTITIONS)]
        self._topic, self._places, self._groups = topic, places, groups
        self._is_stopped = False
        self._progress = asyncio.Condition()
        self._clients: list[FlyMqClient] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.writers: list[Writer] = []

    async def start(self) -> None:
        first, second = self._places.tcp
        sends = [plain(await self._connected(f"{first},{second}"), self._topic, 0)]
        sends += [transactions(await self._connected(place), self._topic, number) for number, place in enumerate((first, second), 1)]
        self.writers = [Writer(place, self._topic, number) for number, place in enumerate(self._places.flight, 3)]
        sends += [writer.send for writer in self.writers]
        self._tasks = [asyncio.create_task(self._publish(partition, send)) for partition, send in enumerate(sends)]

    async def _connected(self, places: str) -> FlyMqClient:
        url = f"flymq://{places}"
        client = await headrace.connect(url, resend_writes=False, publish_seconds=PUBLISH_SECONDS, refused_connections_max=0)
        self._clients.append(cast(FlyMqClient, client))
        return self._clients[-1]

    async def stop(self) -> None:
        self._is_stopped = True
        try:
            _, pending = await asyncio.wait(self._tasks, timeout=RECOVERY_SECONDS_MAX)
            for task in pending:
                task.cancel()
            assert not pending, "no broker answers"
            await asyncio.gather(*self._tasks)
        finally:
            for client in self._clients:
                client.abandon()

    async def progressed(self) -> None:
        """Wait until a value that is sent from now on is acknowledged in each partition."""
        before = [len(ledger.acknowledged) for ledger in self.ledgers]
        # A batch that is under way may have been written before the call, so two have to arrive.
        wanted = [count + 2 * BATCH for count in before]
        async with asyncio.timeout(RECOVERY_SECONDS_MAX), self._progress:
            await self._progress.wait_for(
                lambda: (
                    any(task.done() for task in self._tasks)
                    or all(len(ledger.acknowledged) >= count for ledger, count in zip(self.ledgers, wanted, strict=True))
                )
            )

    async def _publish(self, partition: int, send: Send) -> None:
        ledger, number = self.ledgers[partition], 0
        try:
            while not self._is_stopped:
                numbers = range(number, number + BATCH)
                number += BATCH
                outcomes = await send([b"%d" % one for one in numbers])
                for one, outcome in zip(numbers, outcomes, strict=True):
                    ledger.note(one, outcome)
                await self._notify()
                if any(outcome is not Outcome.ACKNOWLEDGED for outcome in outcomes):
                    await asyncio.sleep(_PAUSE_SECONDS)
                while self._groups.behind(partition, ledger) > BEHIND_MAX and not self._is_stopped:  # noqa: ASYNC110  # another task counts
                    await asyncio.sleep(_PAUSE_SECONDS)
        except BaseException:
            await self._notify()
            raise

    async def _notify(self) -> None:
        async with self._progress:
            self._progress.notify_all()


class Groups:
    """Members of two groups, one at each broker, which settle what they get until they are stopped."""

    def __init__(self, topic: str, places: Places) -> None:
        self.delivered: dict[str, list[set[int]]] = {group: [set() for _ in range(Load.PARTITIONS)] for group in MODES}
        self._topic = topic
        self._tasks = [asyncio.create_task(self._consume(place, mode)) for place in places.tcp for mode in MODES]

    async def _consume(self, place: str, mode: GroupMode) -> None:
        """Take and settle. After an error the member leaves with its connection, so that others get what it has not settled."""
        while True:
            try:
                async with headrace.connect(f"flymq://{place}", refused_connections_max=0) as client:
                    subscription = await cast(FlyMqClient, client).subscribe(
                        self._topic, "earliest", group=mode, mode=mode, settlement="auto"
                    )
                    async for batch in subscription.batches():
                        assert batch.partition is not None
                        self.delivered[mode][batch.partition].update(map(int, batch.values))
            except HeadraceError:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for found in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(found, asyncio.CancelledError):
                raise AssertionError("a member of a group ended") from cast(BaseException, found)

    def behind(self, partition: int, ledger: Ledger) -> int:
        """Return about how many values of the partition the slower group has not got."""
        return len(ledger.acknowledged) - min(len(places[partition]) for places in self.delivered.values())

    def missing(self, ledgers: Sequence[Ledger]) -> int:
        """Return how many acknowledged values were not delivered, over all groups."""
        return sum(
            len(set(ledger.acknowledged) - delivered)
            for places in self.delivered.values()
            for ledger, delivered in zip(ledgers, places, strict=True)
        )

    async def unsettled(self, client: FlyMqClient) -> int:
        """Return how many records are not settled, over all groups."""
        return sum(
            [await client.lag(self._topic, group=group, partition=partition) for group in MODES for partition in range(Load.PARTITIONS)]
        )

    async def caught_up(self, ledgers: Sequence[Ledger], client: FlyMqClient) -> tuple[int, int]:
        """Wait until every acknowledged value is delivered and settled. Returns how many are not delivered and not settled after the
        longest wait."""
        left = -1, -1
        try:
            async with asyncio.timeout(RECOVERY_SECONDS_MAX):
                while left != (0, 0) and not any(task.done() for task in self._tasks):
                    try:
                        left = self.missing(ledgers), await self.unsettled(client)
                    except HeadraceError:
                        left = -1, -1
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError:
            pass
        return left
