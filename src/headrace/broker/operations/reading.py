"""Broker operations that read topics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from headrace.broker.authorizer import Action, Authorizer, Principal
from headrace.broker.meters import Meter, Meters
from headrace.broker.publishing.publish import Publisher
from headrace.broker.reading.cursor import Cursor, Cursors, Delivered
from headrace.broker.reading.fetch import Fetched, Fetcher
from headrace.broker.reading.waits import Ends, Watermarks
from headrace.broker.topics import Topics
from headrace.broker.tracing import Tracer, headers_of
from headrace.engine.contract import Batch, Engine
from headrace.errors import BrokerError

_READABLE_MAX: Final = 65_536


class ReadOperations:
    """Part of `Broker`."""

    meters: Meters
    _engine: Engine
    _authorizer: Authorizer
    _topics: Topics
    _publisher: Publisher
    _fetcher: Fetcher
    _watermarks: Watermarks
    _cursors: Cursors
    _readable: dict[tuple[Principal, str], tuple[range, Meter]]
    """Partitions that a principal may read, for `read_now`."""

    def _check_sees(self, who: Principal, topic: str) -> None:
        raise NotImplementedError

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
        with_expired: bool = False,
    ) -> Fetched:
        """Read from `offset` on. At the end of the partition, wait up to `wait_ms` for `bytes_min` bytes, then return what is there. Raises
        `OffsetOutOfRange` below the first offset and above the end. Expired records are left out, unless `with_expired` is set by a caller
        that does not wait and filters whole columns."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._topics.find_partition(topic, partition)
        began = self.meters.ticks()
        fetched = await self._fetcher.fetch(
            topic,
            partition,
            offset,
            bytes_max=bytes_max,
            records_max=records_max,
            wait_ms=wait_ms,
            bytes_min=bytes_min,
            with_expired=with_expired,
        )
        if wait_ms:
            self._authorizer.check(who, Action.READ, "topic", topic)  # the permission may have ended during the wait
        meter = self.meters.meter(topic, who.protocol)
        meter.delivered(fetched.batches)
        if not wait_ms:
            meter.fetch_duration.observe(self.meters.ticks() - began)
        if self._publisher.tracer is not None and fetched.batches:
            self._trace(self._publisher.tracer, who, topic, fetched.batches)
        return fetched

    def read_now(
        self, who: Principal, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31
    ) -> Sequence[Batch] | None:
        """Return what `fetch` would return without a wait, if there are records, they are in memory and none expires. Otherwise return
        None: `fetch` waits or raises. Raises `NotAuthorized`."""
        partitions, meter = self._readable.get((who, topic)) or self._find_readable(who, topic)
        if partition not in partitions or self._publisher.tracer is not None:
            return None
        began = self.meters.ticks()
        batches = self._engine.read_now(topic, partition, offset, bytes_max=bytes_max, records_max=records_max)
        if batches is not None:
            for batch in batches:
                if batch.expires:
                    return None
            meter.read(batches, self.meters.ticks() - began)
        return batches

    def _find_readable(self, who: Principal, topic: str) -> tuple[range, Meter]:
        """Return the partitions that this principal may read and their meter, and cache both until the topic or the rules change."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        found = self._engine.topics().get(topic)
        if found is None or found.internal:
            return range(0), Meter.zero()
        readable = range(found.partitions), self.meters.meter(topic, who.protocol)
        if len(self._readable) >= _READABLE_MAX:
            self._readable.clear()
        self._readable[who, topic] = readable
        return readable

    def check_reads(self, who: Principal, topic: str) -> None:
        """Check that records held back by a protocol may still be delivered. Raises `NotAuthorized`."""
        self._authorizer.check(who, Action.READ, "topic", topic)

    async def wait_for_growth(self, who: Principal, ends: Ends, wait_ms: int) -> bool:
        """Wait until a partition grows beyond its known end (topic → partition → end), or a partition exists that is not in `ends`. Returns
        False when the time is over first. Raises `UnknownTopic`, also while waiting."""
        for topic in ends:
            self._check_sees(who, topic)
        return await self._watermarks.moved(ends, wait_ms)

    def cursor(
        self,
        who: Principal,
        topic: str,
        partition: int,
        offset: int,
        deliver: Callable[[Delivered], None],
        *,
        credit_bytes: int,
        failed: Callable[[BrokerError], None] | None = None,
    ) -> Cursor:
        """Push records from `offset` on: history, then live, without gap or duplicate. `deliver` is called on the loop while there is
        credit. Each delivery uses credit for its key and value bytes and may overdraw by one batch. `failed` is called once when the cursor
        cannot continue (the topic is deleted). If retention deletes records before they are read, the cursor continues at the first offset.
        Raises `OffsetOutOfRange`."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._publisher.check_open()
        self._topics.find_partition(topic, partition)
        check = partial(self._authorizer.check, who, Action.READ, "topic", topic)
        meter = self.meters.meter(topic, who.protocol)
        if (tracer := self._publisher.tracer) is not None:
            untraced = deliver

            def deliver(batches: Delivered) -> None:
                self._trace(tracer, who, topic, batches)
                untraced(batches)

        return self._cursors.start(topic, partition, offset, deliver, credit_bytes=credit_bytes, failed=failed, check=check, meter=meter)

    @staticmethod
    def _trace(tracer: Tracer, who: Principal, topic: str, batches: list[Batch]) -> None:
        tracer.deliver(topic, who.protocol, sum(map(len, batches)), headers_of(batches))
