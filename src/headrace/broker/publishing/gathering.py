"""Single records, which are gathered during a turn of the event loop and appended together.

Most clients send one record and wait for its reply. An append for each of them costs more than the record: futures and callbacks in every
layer, and a flush of the log that starts while the next records are still in the sockets. Here the records that a turn publishes to one
partition become one batch, which is appended when the loop has read all ready sockets.

A batch holds records of one protocol, so that they share a meter. The order of the calls is the order in the log: whatever else is
appended in the same turn is appended after `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from headrace.broker.meters import Meter, Meters
from headrace.broker.publishing.published import PublishedOne
from headrace.engine.contract import Appended, Write
from headrace.errors import BrokerError
from headrace.limits import KIB
from headrace.records import RecordBatch

RECORD_BYTES_MAX: Final = KIB
"""Key and value of a record that is gathered. A larger one is worth an append of its own."""
_RECORDS_MAX: Final = 1_024
"""Records of one batch."""

Staged: TypeAlias = asyncio.Future[list[Appended]]
Append: TypeAlias = Callable[[Sequence[Write]], Staged]
Place: TypeAlias = tuple[str, int]
"""Topic and partition."""


class _Batch:
    """Records for one partition that wait for the end of the turn."""

    __slots__ = ("began", "keys", "meter", "outcomes", "protocol", "values")

    def __init__(self, meter: Meter, protocol: str, began: float) -> None:
        self.meter, self.protocol, self.began = meter, protocol, began
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.outcomes: list[PublishedOne] = []


class Gathering:
    """The records of this turn. `append` appends a batch and counts it as in flight, `landed` counts it as done."""

    def __init__(self, append: Append, landed: Callable[[Staged], None], meters: Meters) -> None:
        self._append = append
        self._count_landed = landed
        self._meters = meters
        self._batches: dict[Place, _Batch] = {}

    def add(self, place: Place, value: bytes, key: bytes | None, meter: Meter, protocol: str) -> PublishedOne:
        batch = self._batches.get(place)
        if batch is None or batch.meter is not meter or len(batch.values) >= _RECORDS_MAX:
            batch = self._start(place, meter, protocol)
        if key is not None and batch.keys is None:
            batch.keys = [None] * len(batch.values)
        if batch.keys is not None:
            batch.keys.append(key)
        batch.values.append(value)
        outcome = PublishedOne(place[1])
        batch.outcomes.append(outcome)
        return outcome

    def _start(self, place: Place, meter: Meter, protocol: str) -> _Batch:
        if place in self._batches:
            self.send()
        if not self._batches:
            asyncio.get_running_loop().call_soon(self.send)
        batch = self._batches[place] = _Batch(meter, protocol, self._meters.ticks())
        return batch

    def send(self) -> None:
        """Append what was gathered so far."""
        batches, self._batches = self._batches, {}
        for (topic, partition), batch in batches.items():
            write = Write(topic, partition, RecordBatch(batch.values, batch.keys))
            try:
                staged = self._append([write])
            except BrokerError as error:
                # The topic was deleted in this turn. A session may be the caller, so it is not called back from here.
                asyncio.get_running_loop().call_soon(self._fail, batch, error)
            else:
                staged.add_done_callback(partial(self._landed, batch, write))

    def _landed(self, batch: _Batch, write: Write, staged: Staged) -> None:
        self._count_landed(staged)
        error = staged.exception()
        if error is not None:
            self._fail(batch, error)
            return
        (appended,) = staged.result()
        batch.meter.published_singly(len(batch.values), write.size_bytes, self._meters.ticks() - batch.began)
        timestamp = appended.timestamp
        for index, outcome in enumerate(batch.outcomes):
            outcome.land(appended.offset(index), timestamp)
        self._call_back(batch)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        for outcome in batch.outcomes:
            if isinstance(error, BrokerError):
                self._meters.refuse(batch.protocol, error.code)
            outcome.fail(error)
        self._call_back(batch)

    def _call_back(self, batch: _Batch) -> None:
        for outcome in batch.outcomes:
            try:
                outcome.call_back()
            except Exception as failure:
                # A defect in one session must not cost the others their replies.
                asyncio.get_running_loop().call_exception_handler({"message": "a reply failed", "exception": failure})
