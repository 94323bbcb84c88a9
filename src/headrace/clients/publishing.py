"""Publishing, the same for all protocols: argument checks, batches, deadlines, and which record was refused.

The client of a protocol sends a batch in `_submit`; the rest is here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, Final, TypeVar

from headrace.clients.arguments import check_count, check_headers, check_key, check_text, check_values, wrong
from headrace.clients.errors import NotSent, OutcomeUnknown, RecordRefused
from headrace.clients.messages import Key, Receipt
from headrace.clients.unsupported import BaseClient
from headrace.clients.window import Batch, Window
from headrace.errors import BrokerError
from headrace.limits import KIB
from headrace.records import Headers

BATCH_BYTES_MAX: Final = 256 * KIB
_OTHERS: Final[Mapping[str, str]] = {
    "keys": "flymq:// has them",
    "headers": "fujin:// has them",
    "partitions": "flymq:// and rustlog:// have them",
}
"""The protocols that carry what others do not."""
_Done = TypeVar("_Done")
_Wanted = TypeVar("_Wanted")


@dataclass(slots=True)
class Records:
    """Records to publish together."""

    topic: str
    values: list[bytes]
    keys: list[bytes | None] | None = None
    partition: int | None = None
    headers: Headers = ()
    """Headers of each record."""


class Publisher(BaseClient, ABC):
    """Publishing methods of all clients."""

    carries: ClassVar[frozenset[str]] = frozenset()
    """Parts of a record besides its value: keys, headers, partitions."""
    only_partition: ClassVar[int | None] = None
    """The partition of every record, for a protocol without partitions that has a fixed one."""
    batch_records_max: ClassVar[int] = 2_048
    """Records per batch of `publish_many`."""
    _window: Window[Any]
    _publish_seconds: float

    @abstractmethod
    async def _submit(self, records: Records) -> Sequence[Batch]:
        """Wait for room in the window and send the records, as one batch or several."""

    @property
    def unacknowledged(self) -> int:
        """Number of records published and not acknowledged."""
        return self._window.records

    async def publish(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout: float | None = None,
    ) -> Receipt:
        """Publish a record and wait for the acknowledgement, at most `timeout` seconds; None: the client's `publish_seconds`.

        The receipt has partition, offset and timestamp if the protocol reports them. Raises the broker's error, and after the deadline
        `NotSent` or `OutcomeUnknown`.
        """
        self._check(topic, key, partition, headers)
        check_values([value], None)
        try:
            (timed,) = await self._within(Records(topic, [value], _keys(key, [value]), partition, headers), timeout)
            await timed.settled()
        except RecordRefused as refused:
            raise refused.failure from None
        return timed.batch.receipts()[0]

    async def send(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> asyncio.Future[Receipt]:
        """Publish a record. Waits for room in the window only; the future resolves with the acknowledgement.

        The future fails with the broker's error, or with `OutcomeUnknown` or `NotSent` if the client is closed first.
        """
        self._check(topic, key, partition, headers)
        check_values([value], None)
        (batch,) = await self._submit(Records(topic, [value], _keys(key, [value]), partition, headers))
        return then(batch.done, lambda _: batch.receipts()[0], lambda failure: getattr(failure, "failure", failure))

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None, headers: Headers = ()
    ) -> asyncio.Future[list[Receipt]]:
        """Publish values as one batch. Waits for room in the window; the future resolves when all are acknowledged.

        The future fails with `RecordRefused` if the broker refuses a record; other records may have been written.
        """
        self._check(topic, key, partition, headers)
        _check_iterable(values)
        check_values(values, 0)
        batches = [] if not values else await self._submit(Records(topic, list(values), _keys(key, values), partition, headers))
        if len(batches) == 1:
            return then(batches[0].done, lambda _: batches[0].receipts())
        return asyncio.ensure_future(_all_receipts(batches))

    async def publish_many(
        self,
        topic: str,
        values: Iterable[bytes] | AsyncIterable[bytes],
        *,
        key: Key = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout: float | None = None,
    ) -> int:
        """Publish all values as fast as the window allows. Returns their number once the last is acknowledged.

        If the broker refuses a record, sends no further ones and raises `RecordRefused` with its index and the number of records that
        were kept. Each record has `timeout` seconds, as in `publish`.
        """
        self._check(topic, key, partition, headers)
        _check_iterable(values)
        tally, count = _Tally(), 0
        async for batch in batches_of(values, self.batch_records_max):
            check_values(batch, count)
            await self._add(tally, Records(topic, batch, _keys(key, batch), partition, headers), timeout)
            count += len(batch)
            await tally.settle_done()
            if tally.refused is not None:
                break
        await tally.settle_all()
        return count

    # Internals.

    def _check(self, topic: str, key: Key, partition: int | None, headers: Headers) -> None:
        self._check_open()
        check_text("topic", topic)
        check_key(key)
        check_count("partition", partition)
        if key is not None:
            self._check_carried("keys")
        if partition is not None and partition != self.only_partition:
            self._check_carried("partitions")
        if headers:
            self._check_carried("headers")
            check_headers(headers)

    def _check_carried(self, what: str) -> None:
        if what not in self.carries:
            raise self._unsupported(what, what, _OTHERS[what])

    @abstractmethod
    def _check_open(self) -> None: ...

    async def _add(self, tally: _Tally, records: Records, timeout: float | None) -> None:
        """Submit records of `publish_many`. A batch with a record that fits no frame fails before any of it is sent: submits its records
        one by one up to that record, which counts as refused."""
        try:
            tally.add(await self._within(records, timeout))
        except BrokerError as failure:
            if len(records.values) == 1:
                tally.refuse(failure)
                return
            for index, value in enumerate(records.values):
                keys = None if records.keys is None else [records.keys[index]]
                await self._add(tally, replace(records, values=[value], keys=keys), timeout)
                if tally.refused is not None:
                    return

    async def _within(self, records: Records, timeout: float | None) -> list[_Timed]:
        """Submit records with a deadline. Raises `NotSent` if the window has no room in time."""
        seconds = self._publish_seconds if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + seconds if seconds else None
        if deadline is None or self._window.has_room(len(records.values), sum(map(len, records.values))):
            batches = await self._submit(records)
        else:
            try:
                async with asyncio.timeout_at(deadline):
                    batches = await self._submit(records)
            except TimeoutError:
                raise NotSent(len(records.values), f"no room in the window within {seconds:g} s") from None
        return [_Timed(batch, self._window, seconds, deadline) for batch in batches]


@dataclass(slots=True)
class _Timed:
    """A batch and its deadline."""

    batch: Batch
    window: Window[Any]
    seconds: float
    deadline: float | None

    async def settled(self) -> None:
        """Wait for the acknowledgement. After the deadline an unsent batch is withdrawn."""
        done: asyncio.Future[None] = self.batch.done
        if not done.done():
            left = None if self.deadline is None else max(0.0, self.deadline - done.get_loop().time())
            # Unlike `await done`, this does not cancel the future with its caller, which would disturb the order of replies.
            await asyncio.wait((done,), timeout=left)
        if done.done():
            return done.result()
        why = f"no acknowledgement within {self.seconds:g} s"
        is_unsent = self.window.withdraw([self.batch])
        raise (NotSent if is_unsent else OutcomeUnknown)(self.batch.count, why)


class _Tally:
    """Counts the records of `publish_many` that were kept, and finds the first that was refused."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, _Timed]] = deque()
        self._count = self._kept = 0
        self.refused: tuple[int, RecordRefused] | None = None

    def add(self, batches: Iterable[_Timed]) -> None:
        for timed in batches:
            self._under_way.append((self._count, timed))
            self._count += timed.batch.count

    def refuse(self, failure: BrokerError) -> None:
        """Note that the next record was refused before it was sent."""
        self.refused = (self._count, RecordRefused(index=0, kept=0, failure=failure))

    async def settle_done(self) -> None:
        while self._under_way and self._under_way[0][1].batch.done.done():
            await self._settle()

    async def settle_all(self) -> None:
        """Wait for every batch. Raises `RecordRefused` with the numbers of all of them."""
        while self._under_way:
            await self._settle()
        if self.refused is not None:
            index, first = self.refused
            raise RecordRefused(index=index, kept=self._kept, failure=first.failure)

    async def _settle(self) -> None:
        begin, timed = self._under_way.popleft()
        try:
            await timed.settled()
            self._kept += timed.batch.count
        except RecordRefused as refused:
            self._kept += refused.kept
            if self.refused is None or begin + refused.index < self.refused[0]:
                self.refused = (begin + refused.index, refused)


async def _all_receipts(batches: Sequence[Batch]) -> list[Receipt]:
    tally = _Tally()
    tally.add(_Timed(batch, Window(records_max=0, bytes_max=0), 0, None) for batch in batches)
    await tally.settle_all()
    return [receipt for batch in batches for receipt in batch.receipts()]


async def batches_of(values: Iterable[bytes] | AsyncIterable[bytes], records_max: int) -> AsyncIterator[list[bytes]]:
    """Group values into batches. Values of an asynchronous iterable are sent one by one: the next may take arbitrarily long."""
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield [value]
        return
    iterator = iter(values)
    while batch := _next_batch(iterator, records_max):
        yield batch


def _next_batch(values: Iterator[bytes], records_max: int) -> list[bytes]:
    batch: list[bytes] = []
    size_bytes = 0
    for value in islice(values, records_max):
        batch.append(value)
        size_bytes += _size_bytes(value)
        if size_bytes >= BATCH_BYTES_MAX:
            break
    return batch


def _size_bytes(value: object) -> int:
    """Return the size of a value. One of a wrong type ends the batch, so that the error comes before further values are read."""
    return len(value) if isinstance(value, bytes) else BATCH_BYTES_MAX


def _keys(key: Key, values: Sequence[bytes]) -> list[bytes | None] | None:
    """Return the key of each value; None if there are no keys."""
    if key is None:
        return None
    if not callable(key):
        return [key] * len(values)
    keys = [key(value) for value in values]
    for made in keys:
        if made is not None and not isinstance(made, bytes):
            wrong("key", "a function that returns bytes or None", made)
    return keys


def _check_iterable(values: object) -> None:
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, (Iterable, AsyncIterable)):
        wrong("values", "an iterable of bytes", values)


def then(
    done: asyncio.Future[_Done],
    make: Callable[[_Done], _Wanted],
    failed: Callable[[BaseException], BaseException] = lambda failure: failure,
) -> asyncio.Future[_Wanted]:
    """Return a future with `make` applied to the result of `done`, or with `failed` applied to its failure."""
    wanted: asyncio.Future[_Wanted] = done.get_loop().create_future()

    def hand_over(done: asyncio.Future[_Done]) -> None:
        if wanted.done():
            return
        if done.cancelled():
            wanted.cancel()
        elif (failure := done.exception()) is not None:
            wanted.set_exception(failed(failure))
            wanted.exception()  # retrieved: `close` reports it even if the future is never awaited
        else:
            wanted.set_result(make(done.result()))

    done.add_done_callback(hand_over)
    return wanted
