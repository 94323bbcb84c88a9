"""Flight server: converts tickets, commands and actions to broker calls.

    Flight thread ── Bridge ──► loop: broker.fetch ──► batches ──► Flight thread: wrap, send     (DoGet, one chunk read ahead)
    Flight thread: record batch ──► chunks ── Bridge ──► loop: broker.publish ──► durable        (DoPut, a window of bytes in flight)

gRPC uses one thread per call and its own flow control: a reader that does not read blocks the generator, and a put stops reading while
its window is full.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyarrow import flight

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.overview import Report
from headrace.errors import BrokerError, InvalidRequest, NotCoordinator, OffsetOutOfRange, UnknownTopic
from headrace.flight import request
from headrace.flight.actions import Actions
from headrace.flight.bridge import Bridge
from headrace.flight.calls import Call, Calls
from headrace.flight.errors import flight_error
from headrace.flight.forwarding import ABANDONED, Connected
from headrace.flight.login import MIDDLEWARE
from headrace.flight.puts import AppendPut, Handles, LettersPut, Put, StagePut, window_bytes
from headrace.flight.reading import ArrowBatches, below
from headrace.flight.request import Append, Range, Stage, check_stored, decode, decode_put, encode, stored_schema
from headrace.flight.writing import Target
from headrace.limits import FLIGHT_READ_AHEAD_BYTES

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ENDPOINTS: Final = 8
"""The maximum number of ranges per partition in GetFlightInfo."""
_ENDPOINT_ROWS_MIN: Final = 100_000


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """The server. `who` returns the user of a call; the middleware counts `calls`. `coordinator` returns a connection on which a call is
    passed on to another broker; None if this one serves it. `local_files`: readers on this machine may read the files of the log."""

    def __init__(
        self,
        location: str,
        broker: Broker,
        bridge: Bridge,
        who: Callable[[flight.ServerCallContext], Principal],
        calls: Calls,
        report: Report = dict,
        coordinator: Callable[[flight.ServerCallContext], Connected | None] = lambda context: None,
        *,
        local_files: bool = True,
        **options: Any,
    ) -> None:
        self._broker, self._bridge, self._who, self._coordinator = broker, bridge, who, coordinator
        self._actions = Actions(broker, bridge, report, local_files=local_files)
        self._turns = itertools.count()
        self._handles = Handles()
        self.calls = calls
        super().__init__(location, **options)

    # Metadata

    def list_flights(self, context: flight.ServerCallContext, criteria: bytes) -> Iterator[flight.FlightInfo]:
        """List the partitions of the topics that the caller may see and whose names begin with `criteria`."""
        with self._call(context) as who:
            prefix = bytes(criteria or b"").decode(errors="replace")
            return iter(self._bridge.wait(lambda: self._flights(who, prefix)))

    async def _flights(self, who: Principal, prefix: str) -> list[flight.FlightInfo]:
        flights: list[flight.FlightInfo] = []
        slices = await self._broker.listed(who, lambda topics: [topic for topic in topics if topic.name.startswith(prefix)])
        for topic in itertools.chain.from_iterable(slices):
            try:
                flights += [self._flight(who, topic.name, partition) for partition in range(topic.partitions)]
            except UnknownTopic:
                pass  # deleted meanwhile
            await asyncio.sleep(0)  # yield: there may be thousands of topics
        return flights

    def _flight(self, who: Principal, topic: str, partition: int) -> flight.FlightInfo:
        bounds = self._broker.bounds(who, topic, partition)
        size = self._broker.size_bytes(who, topic, partition)
        descriptor = flight.FlightDescriptor.for_path(topic, str(partition))
        return flight.FlightInfo(stored_schema(request.STORED), descriptor, [], bounds.end - bounds.first, size)

    def get_flight_info(self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        with self._call(context) as who:
            wanted = _ranges(descriptor)
            schema = stored_schema(check_stored(wanted[0].columns))
            return self._bridge.wait(
                lambda: self._broker.with_new_topics(lambda: self._info(who, descriptor, wanted[0], len(wanted) > 1, schema))
            )

    async def _info(
        self, who: Principal, descriptor: flight.FlightDescriptor, wanted: Range, whole_topic: bool, schema: pa.Schema
    ) -> flight.FlightInfo:
        topic = self._broker.topic(who, wanted.topic)
        places = range(topic.partitions) if whole_topic else [wanted.partition]
        endpoints: list[flight.FlightEndpoint] = []
        rows = size = 0
        for partition in places:
            bounds = self._broker.bounds(who, topic.name, partition)
            start, stop = _bounded(wanted, bounds.first, bounds.end)
            held = bounds.end - bounds.first
            rows += stop - start
            size += self._broker.size_bytes(who, topic.name, partition) * (stop - start) // held if held else 0
            parts = max(1, min(_ENDPOINTS, (stop - start) // _ENDPOINT_ROWS_MIN))
            for begin, end in await self._actions.split(who, topic.name, partition, start, stop, parts):
                ticket = Range(topic.name, partition, begin, end, wanted.columns, wanted.rows_max)
                endpoints.append(flight.FlightEndpoint(encode(ticket), []))
        return flight.FlightInfo(schema, descriptor, endpoints, rows, size)

    # Reading

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        with self._call(context) as who:
            wanted = decode(ticket.ticket, Range, "ticket")
            columns = check_stored(wanted.columns)
            bounds = self._bridge.find(self._broker, lambda: self._checked_bounds(who, wanted))
            start, stop = _bounded(wanted, bounds[0], bounds[1])
            arrows = ArrowBatches(columns, wanted.rows_max)
            reading = _Call(self.calls, context, lambda: who, carries_rows=True)
            return flight.GeneratorStream(arrows.schema, self._rows(reading, wanted, start, stop, arrows))

    def _checked_bounds(self, who: Principal, wanted: Range) -> tuple[int, int]:
        self._broker.check_reads(who, wanted.topic)
        bounds = self._broker.bounds(who, wanted.topic, wanted.partition)
        return bounds.first, bounds.end

    def _rows(self, call: _Call, wanted: Range, position: int, stop: int, arrows: ArrowBatches) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Yield record batches on the thread of the call, at the pace of the reader, with one chunk read ahead."""

        def fetch(who: Principal, offset: int) -> Any:
            return self._bridge.start(
                lambda: self._broker.fetch(
                    who, wanted.topic, wanted.partition, offset, bytes_max=FLIGHT_READ_AHEAD_BYTES, with_expired=True
                )
            )

        coming = None
        with call as who:
            try:
                coming = fetch(who, position) if position < stop else None
                while coming is not None:
                    fetched = self._bridge.result(coming, None)
                    coming = fetch(who, fetched.next_offset) if fetched.next_offset < stop else None
                    yield from call.sent(arrows.feed(below(fetched.batches, stop), self._broker.now))
                yield from call.sent(arrows.flush())
            finally:
                if coming is not None:
                    coming.cancel()

    # Writing

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        call = self._call(context, carries_rows=True)
        with call as who:
            command = _command(descriptor)
            coordinator = None if isinstance(command, Append) else self._coordinator(context)
            if coordinator is not None:
                answer = coordinator.put(descriptor, reader.schema, self._rows_of(context, call, reader))
            else:
                with self._put(who, command, reader.schema) as put:
                    for chunk in self._rows_of(context, call, reader):
                        put.take(chunk)
                    answer = encode(put.finish())
            try:
                writer.write(answer)
            except OSError:
                raise _gone() from None

    def _rows_of(
        self, context: flight.ServerCallContext, call: _Call, reader: flight.MetadataRecordBatchReader
    ) -> Iterator[pa.RecordBatch]:
        yield from call.received(reader)
        if context.is_cancelled():  # the rows of a disconnected caller end like complete ones
            raise _gone()

    def _put(self, who: Principal, command: request.Put, schema: pa.Schema) -> Put:
        """Return the put of a command. Permissions are checked before any row is received and decompressed."""
        if command.topic is not None:
            self._bridge.find(self._broker, lambda: self._check_may_put(who, command))
        if isinstance(command, Append):
            return AppendPut(
                self._bridge, self._broker, who, schema, Target(command.topic, command.partition, next(self._turns)), self._window
            )
        if isinstance(command, Stage):
            target = Target(command.topic, None, next(self._turns))
            return StagePut(self._bridge, self._broker, who, schema, target, self._window, command, self._handles)
        return LettersPut(self._bridge, self._broker, who, schema, command.topic)

    def _check_may_put(self, who: Principal, command: request.Put) -> None:
        assert command.topic is not None
        self._broker.topic(who, command.topic)
        if isinstance(command, request.Letters):
            self._broker.check_reads(who, command.topic)
        else:
            self._broker.check_ready(who, command.topic, ())

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Return a clear error: by default `pyarrow` replies with a traceback."""
        with self._call(context):
            raise InvalidRequest("DoExchange is not supported; use DoGet or DoPut")

    def _window(self) -> int:
        """Return the window of one put. Readers count too, because they use memory."""
        return window_bytes(self.calls.carriers_under_way)

    # Actions

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        with self._call(context):
            return [(name, (kind.__doc__ or "").strip()) for name, kind in request.ACTIONS.items()]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        with self._call(context) as who:
            body = b"" if action.body is None else action.body.to_pybytes()
            try:
                return iter([encode(self._actions.answer(who, action.type, body))])
            except NotCoordinator:
                coordinator = self._coordinator(context)
                if coordinator is not None:
                    return iter(coordinator.act(action))
                return iter([encode(self._actions.answer(who, action.type, body))])

    def _call(self, context: flight.ServerCallContext, *, carries_rows: bool = False) -> _Call:
        return _Call(self.calls, context, lambda: self._who(context), carries_rows=carries_rows)


class _Call:
    """Context of a call that the middleware has counted. A `BrokerError` becomes a Flight error, any other exception an internal error
    without details."""

    def __init__(self, calls: Calls, context: flight.ServerCallContext, who: Callable[[], Principal], *, carries_rows: bool) -> None:
        self._calls, self._peer, self._who, self._carries_rows = calls, context.peer(), who, carries_rows
        self._call: Call = context.get_middleware(MIDDLEWARE).call

    def __enter__(self) -> Principal:
        self._calls.opened(self._call, self._peer, carries_rows=self._carries_rows)
        try:
            return self._who()
        except BrokerError as error:
            self._calls.refused[error.code] += 1
            raise flight_error(error) from None

    def sent(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield items; the call waits for the peer until the next one is requested."""
        for one in rows:
            self._call.peers_turn()
            yield one
            self._call.our_turn()

    def received(self, reader: flight.MetadataRecordBatchReader) -> Iterator[pa.RecordBatch]:
        """Yield record batches; the call waits for the peer until the next one arrives. Raises `InvalidRequest`."""
        while True:
            self._call.peers_turn()
            try:
                batch, metadata = reader.read_chunk()
            except StopIteration:
                return
            except pa.ArrowException as failure:
                raise InvalidRequest(f"the rows of a put cannot be read: {str(failure)[:200]}") from None
            finally:
                self._call.our_turn()
            if metadata is not None and metadata.to_pybytes() == ABANDONED:
                raise _gone()
            if batch is not None:
                yield batch

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(failure, BrokerError):
            self._calls.refused[failure.code] += 1
            raise flight_error(failure) from None
        if isinstance(failure, Exception) and not isinstance(failure, flight.FlightError):
            _log.error("defect: a call of the Flight endpoint failed", exc_info=failure)
            raise flight.FlightInternalError("internal error; see the log of the broker") from None


def _path(descriptor: flight.FlightDescriptor) -> list[str]:
    try:
        return [part.decode() for part in descriptor.path]
    except UnicodeDecodeError:
        raise InvalidRequest("a path must be UTF-8") from None


def _ranges(descriptor: flight.FlightDescriptor) -> Sequence[Range]:
    """Return the range of a descriptor, or two equal ranges for all partitions of a topic."""
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        return [decode(descriptor.command, Range, "command")]
    path = _path(descriptor)
    if len(path) == 1:
        whole = decode(encode({"topic": path[0]}), Range, "path")
        return [whole, whole]
    if len(path) == 2 and path[1].isascii() and path[1].isdigit() and len(path[1]) < 10 and path[1] == str(int(path[1])):
        return [decode(encode({"topic": path[0], "partition": int(path[1])}), Range, "path")]
    raise InvalidRequest("a path is [topic] or [topic, partition]")


def _gone() -> flight.FlightError:
    return flight.FlightCancelledError("the caller has disconnected")


def _command(descriptor: flight.FlightDescriptor) -> request.Put:
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        return decode_put(descriptor.command)
    wanted = _ranges(descriptor)
    return Append(wanted[0].topic, None if len(wanted) > 1 else wanted[0].partition)


def _bounded(wanted: Range, first: int, end: int) -> tuple[int, int]:
    """Return start and stop with defaults filled in. Raises `OffsetOutOfRange`, `InvalidRequest`."""
    start = first if wanted.start is None else wanted.start
    stop = end if wanted.stop is None else wanted.stop
    if wanted.stop is not None and start > stop:
        raise InvalidRequest(f"a range cannot end at {stop} before it starts at {start}")
    if not first <= start <= end or stop > end:
        raise OffsetOutOfRange(wanted=stop if first <= start <= end else start, first=first, end=end)
    return start, stop
