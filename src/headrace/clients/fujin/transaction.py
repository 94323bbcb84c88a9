"""Fujin transaction: records of several topics that become visible atomically."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from headrace.clients.errors import ClientClosed, NotSent, NotSupported, OutcomeUnknown
from headrace.clients.fujin.streams import WriterStream
from headrace.records import Headers
from headrace.wire.fujin import Request, WriteForm, encode


class Transaction:
    """Transaction created by `FujinClient.transaction`. Commits if the block succeeds, rolls back otherwise.

    It belongs to one connection. If that is lost, all calls fail with `NotSent`, since the server rolls back; a COMMIT without a reply
    fails with `OutcomeUnknown`.
    """

    def __init__(self, begin: Callable[[], Awaitable[WriterStream]], form: WriteForm) -> None:
        self._begin, self._form = begin, form
        self._stream: WriterStream | None = None
        self._count = 0

    async def __aenter__(self) -> Transaction:
        self._stream = await self._begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        stream = self._writer()
        try:
            if failure is None:
                await self._commit(stream)
            elif stream.is_open:
                await self._step(Request.ROLLBACK)
        except NotSent:
            if failure is None:
                raise
        finally:
            self._stream = None
            stream.leave()

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> None:
        """Stage a record and wait for the reply. The commit makes it durable and visible."""
        if key is not None or partition is not None:
            raise NotSupported("Fujin", "keys" if key is not None else "partitions", "flymq:// has them")
        await self.publish_many(topic, [value], headers=headers)

    async def commit_offset(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        raise NotSupported("Fujin", "offsets in a transaction", "flymq:// does")

    async def publish_many(self, topic: str, values: Sequence[bytes], *, headers: Headers = ()) -> int:
        """Stage many records, each with `headers`."""
        stream = self._writer()
        self._count += len(values)
        try:
            await asyncio.gather(*(self._write(stream, topic, value, headers) for value in values))
        except OutcomeUnknown:
            raise NotSent(self._count) from None
        return len(values)

    async def _write(self, stream: WriterStream, topic: str, value: bytes, headers: Headers) -> None:
        await stream.request(lambda cid: encode.writes(topic, [cid], [value], [headers] if headers else None, form=self._form))

    async def _commit(self, stream: WriterStream) -> None:
        if not stream.is_open:
            raise NotSent(self._count)
        try:
            await stream.request(lambda cid: encode.transact(Request.COMMIT, cid))
        except OutcomeUnknown:
            raise OutcomeUnknown(self._count) from None

    async def _step(self, request: Request) -> None:
        try:
            await self._writer().request(lambda cid: encode.transact(request, cid))
        except OutcomeUnknown:
            raise NotSent(self._count) from None

    def _writer(self) -> WriterStream:
        if self._stream is None:
            raise ClientClosed("the transaction has ended")
        return self._stream
