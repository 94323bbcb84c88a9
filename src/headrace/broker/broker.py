"""The broker: every verb a session may use, in one place. Each passes the gate, then hands over to the module that does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from headrace.broker.access import Authorize, Principal, allow_all
from headrace.broker.cursor import Cursor
from headrace.broker.fetch import Fetched
from headrace.broker.groups import GroupLag
from headrace.broker.publish import ProducerStamp, Published
from headrace.broker.settings import BrokerSettings
from headrace.broker.settlement import SettlementPolicy, SettlementQueue
from headrace.broker.timers import Clock, Later
from headrace.broker.transactions import Transaction
from headrace.engine.contract import Ack, Batch, Bounds, Engine, Topic, TopicConfig
from headrace.errors import BrokerError
from headrace.records import Run

_DEFAULTS = BrokerSettings()


class Broker:
    """Owns its engine: `open` opens it, `close` closes it. All verbs are called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock,
        settings: BrokerSettings = _DEFAULTS,
        authorize: Authorize = allow_all,
        later: Later | None = None,
    ) -> None:
        """`clock` gives Unix ms; `later` sets timers (None: the running loop's `call_later`)."""
        raise NotImplementedError

    async def open(self) -> None:
        """Open the engine and load the tables."""
        raise NotImplementedError

    async def close(self) -> None:
        """Drain: refuse new publishes, end long polls, wait for what is staged, commit settlement progress, close the engine."""
        raise NotImplementedError

    async def maintain(self) -> None:
        """Retention, compaction and the expiry of idle producers, once. Runs by itself every `settings.maintain_every_ms`."""
        raise NotImplementedError

    def access_changed(self) -> None:
        """The rules behind `authorize` have changed: forget its answers."""
        raise NotImplementedError

    # Topics

    def topics(self, who: Principal) -> list[Topic]:
        """What this principal may see, by name; internal topics are hidden."""
        raise NotImplementedError

    def topic(self, who: Principal, name: str) -> Topic:
        """Raises `UnknownTopic`."""
        raise NotImplementedError

    async def create_topic(self, who: Principal, name: str, *, partitions: int = 1, config: TopicConfig | None = None) -> Topic:
        """Raises `InvalidTopicName`, `TopicExists`, `LimitExceeded`."""
        raise NotImplementedError

    async def ensure_topic(self, who: Principal, name: str) -> Topic:
        """The topic of that name, created with the defaults if it is missing and `settings.auto_create` allows; else `UnknownTopic`."""
        raise NotImplementedError

    async def alter_topic(self, who: Principal, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        """Add partitions (never remove) or replace the configuration."""
        raise NotImplementedError

    async def delete_topic(self, who: Principal, name: str) -> None:
        """Its records, committed offsets and producer memory go; whoever waits for its records is woken with `UnknownTopic`."""
        raise NotImplementedError

    # Publish

    def publish(
        self,
        who: Principal,
        topic: str,
        run: Run,
        *,
        partition: int | None = None,
        producer: ProducerStamp | None = None,
        ack: Ack | None = None,
    ) -> asyncio.Future[Published]:
        """Stage now, in call order (which is log order per partition); the future resolves when the promise of `ack` holds.

        With `partition` None, records with a key go where FNV-1a of the key sends them, those without take turns (a whole
        keyless run goes to one partition). Raises at once `UnknownTopic`, `UnknownPartition`, `RecordTooLarge`,
        `OutOfSequence`, `NotAuthorized`, `Unavailable`; the future fails with `DiskFull` or `StorageFailed`.
        """
        raise NotImplementedError

    # Read

    async def fetch(
        self,
        who: Principal,
        topic: str,
        partition: int,
        offset: int,
        *,
        bytes_max: int,
        records_max: int = 1 << 31,
        wait_ms: int = 0,
        bytes_min: int = 1,
    ) -> Fetched:
        """Records from `offset` on. At the end it waits up to `wait_ms` for `bytes_min` bytes, then answers with what there is.

        Raises `OffsetOutOfRange` below the first offset and above the end. Expired records are left out.
        """
        raise NotImplementedError

    def bounds(self, who: Principal, topic: str, partition: int) -> Bounds:
        raise NotImplementedError

    async def offset_for_time(self, who: Principal, topic: str, partition: int, timestamp_ms: int) -> int:
        """The first offset whose record is at or after the time; the end if there is none."""
        raise NotImplementedError

    def cursor(
        self,
        who: Principal,
        topic: str,
        partition: int,
        offset: int,
        deliver: Callable[[list[Batch]], None],
        *,
        credit_bytes: int,
        failed: Callable[[BrokerError], None] | None = None,
    ) -> Cursor:
        """Push from `offset` on: history, then live, with no gap and no duplicate.

        `deliver` is called on the loop while there is credit; each delivery spends its key and value bytes and may overdraw by
        one batch. `failed` is called once when the cursor cannot go on (the topic is gone). Raises `OffsetOutOfRange`.
        """
        raise NotImplementedError

    # Groups

    async def commit(self, who: Principal, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """The next offset to read, by (topic, partition). Durable when it returns; may go backwards."""
        raise NotImplementedError

    def committed(self, who: Principal, group: str, topic: str, partition: int) -> int | None:
        raise NotImplementedError

    def lag(self, who: Principal, group: str) -> list[GroupLag]:
        """One entry for each partition the group has committed an offset in."""
        raise NotImplementedError

    def groups(self, who: Principal) -> list[str]:
        raise NotImplementedError

    async def delete_group(self, who: Principal, group: str) -> None:
        """Forget its offsets. Raises `InvalidRequest` while a settlement queue of it is open."""
        raise NotImplementedError

    # Settlement and transactions

    def queue(
        self,
        who: Principal,
        group: str,
        topic: str,
        *,
        policy: SettlementPolicy,
        partitions: Sequence[int] | None = None,
        start: Literal["earliest", "latest"] | int = "latest",
    ) -> SettlementQueue:
        """A consumer's share in a group's work. Starts at the group's committed offset if there is one, else at `start`."""
        raise NotImplementedError

    def begin(self, who: Principal, *, id: str | None = None, timeout_ms: int = 60_000) -> Transaction:
        """Open a transaction. Raises `LimitExceeded`, and `InvalidTransaction` while one of the same id is open."""
        raise NotImplementedError
