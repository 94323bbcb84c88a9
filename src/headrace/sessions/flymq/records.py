"""Operations of BROKER for records with headers and timestamps, which PRODUCE and FETCH do not carry.

| operation | arguments | result |
|---|---|---|
| record.publish | topic, records: [{value, key, headers}], partition | {placed: [[partition, offset, timestamp]], refused: error or null} |
| record.details | topic, partition, offset, count | [{offset, timestamp, headers, is_tombstone}] |

Bytes are base64. A header is [name, value]. A record without a value is a tombstone.

record.publish keeps the records before the first one that the broker refuses: `placed` has one entry for each of them, and `refused` is
the error of the next one. Nothing after it is written. If the first one is refused, the reply is its error.

record.details returns the records of the offsets `offset` to `offset` + `count` that still exist, or the first part of them if their
headers are large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final

import msgspec

from headrace.broker import Broker, Principal, Published, settled
from headrace.columns import headers_bytes
from headrace.errors import BrokerError, InvalidRecord, LimitExceeded
from headrace.limits import FLYMQ_FETCH_BYTES_MAX
from headrace.records import RecordBatch
from headrace.sessions.flymq.errors import publish_error_reply
from headrace.sessions.flymq.staging import columns

RECORDS_MAX: Final = 10_000
"""Records of one call."""


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    value: bytes | None = None
    key: bytes | None = None
    headers: list[tuple[str, bytes]] = []


class _Records(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    records: Annotated[list[_Record], msgspec.Meta(min_length=1, max_length=RECORDS_MAX)]
    partition: int | None = None


class _Range(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partition: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    count: Annotated[int, msgspec.Meta(ge=1, le=RECORDS_MAX)]


class RecordCalls:
    """Operations by name. `who` returns the current principal."""

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._broker, self._who = broker, who
        self.operations: dict[str, tuple[type[Any], Callable[[Any], Awaitable[object]]]] = {
            "record.publish": (_Records, self._publish),
            "record.details": (_Range, self._details),
        }

    async def _publish(self, arguments: _Records) -> object:
        who, topic, batch = self._who(), arguments.topic, _batch(arguments.records)
        await self._broker.ensure_topic(who, topic)
        staged: list[asyncio.Future[Published]] = []
        refused: BrokerError | None = None
        spans = [slice(0, len(batch))]
        while spans:
            span = spans.pop()
            publish = partial(self._broker.publish, who, topic, batch[span], partition=arguments.partition)
            try:
                staged.append(await settled(publish))
            except InvalidRecord as error:
                refused, spans = error, [slice(span.start, span.start + error.index)] if error.index else []
            except BrokerError as error:
                middle = (span.start + span.stop) // 2
                if isinstance(error, LimitExceeded) and middle > span.start:
                    spans += [slice(middle, span.stop), slice(span.start, middle)]
                else:
                    refused, spans = refused or error, []
        placed: list[tuple[int, int, int]] = []
        for outcome in await asyncio.gather(*staged, return_exceptions=True):
            if isinstance(outcome, BrokerError):
                refused = outcome
                break
            if isinstance(outcome, BaseException):
                raise outcome
            placed += zip(*columns(outcome), strict=True)
        if refused is not None and not placed:
            raise refused
        return {"placed": placed, "refused": None if refused is None else publish_error_reply(refused).message}

    async def _details(self, arguments: _Range) -> object:
        topic, partition, who = arguments.topic, arguments.partition, self._who()
        self._broker.check_reads(who, topic)
        offset, end = arguments.offset, arguments.offset + arguments.count
        rows: list[dict[str, object]] = []
        size_bytes = 0
        while offset < end and size_bytes < FLYMQ_FETCH_BYTES_MAX:
            bounds = self._broker.bounds(who, topic, partition)
            offset = max(offset, bounds.first)
            if offset >= min(end, bounds.end):
                break
            found = await self._broker.fetch(who, topic, partition, offset, bytes_max=FLYMQ_FETCH_BYTES_MAX, records_max=end - offset)
            for batch in found.batches:
                headers = batch.headers() or [()] * len(batch)
                size_bytes += sum(map(headers_bytes, headers))
                for at, timestamp, pairs, value in zip(batch.offsets(), batch.timestamps(), headers, batch.values(), strict=True):
                    if at < end:
                        rows.append({"offset": at, "timestamp": timestamp, "headers": pairs, "is_tombstone": value is None})
            if found.next_offset <= offset:
                break
            offset = found.next_offset
        return rows


def _batch(records: list[_Record]) -> RecordBatch:
    keys = [record.key for record in records]
    headers = [tuple(record.headers) for record in records]
    return RecordBatch([record.value for record in records], keys if any(keys) else None, headers if any(headers) else None)
