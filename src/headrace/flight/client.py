"""Blocking client of the Flight endpoint: topics as Arrow record batches. Thread-safe.

Errors of the broker are raised as the same class. If the broker does not answer, idempotent requests are retried a few times: reading
resumes after the last row received. Appending is never repeated.
"""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyarrow import flight

from headrace.errors import BrokerError, InvalidRequest, LoginFailed, NotCoordinator, Unavailable
from headrace.flight import local, request
from headrace.flight.errors import broker_error
from headrace.flight.put_schema import check_put_schema
from headrace.flight.request import ALL, DEFAULT_PORT, READ_SCHEMA, STORED, TIMESTAMP_TYPE, encode
from headrace.located import Located
from headrace.overview import Overview, TopicCounters
from headrace.retry import ATTEMPTS_MAX, exponential

__all__ = [
    "ALL",
    "READ_SCHEMA",
    "Appended",
    "FlightClient",
    "PartitionState",
    "Publication",
    "Servers",
    "StageSize",
    "TopicSchema",
    "TopicState",
    "check_put_schema",
]

_PUBLISH_SECONDS: Final = 600.0
"""A publication larger than memory takes long, and a retry does not make it faster."""
_PING_MS: Final = 360_000
"""A gRPC server accepts one ping per five minutes on an idle connection, and closes connections that send more: with pings every 30
seconds, a task with three minutes between two batches lost its put."""
_OPTIONS: Final = [
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
_FAILURES: Final = (flight.FlightError, pa.ArrowInvalid)
"""Arrow raises `ArrowInvalid` if it cannot start a call, for example without a free thread."""
_BACKOFF: Final = exponential()
_CONNECTION_FAILURES: Final = (flight.FlightUnavailableError, flight.FlightTimedOutError)


@dataclass(frozen=True, slots=True)
class Servers:
    """Addresses of the broker and credentials. The addresses are tried in order until one answers."""

    addresses: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    """The password of the user; without a user, an API key."""
    tls: bool = False
    ca_file: str = ""
    server_name: str = ""
    """The name in the server's certificate, if it is not the host of the address."""
    timeout_seconds: float = 30.0
    certificate_file: str = ""
    """The client certificate, with its key in `key_file`."""
    key_file: str = ""
    local_files: bool = True
    """Whether rows are read from the files of a broker on the same machine if this process may open them."""

    @classmethod
    def parse(cls, text: str, **more: Any) -> Servers:
        """Parse `host:port,host:port`. The default port is 8815; the prefix `grpc+tls://` selects TLS. Raises `InvalidRequest`."""
        addresses: list[str] = []
        for part in filter(None, map(str.strip, text.split(","))):
            scheme, found, rest = part.rpartition("://")
            if found and scheme not in ("grpc", "grpc+tcp", "grpc+tls"):
                raise InvalidRequest(f"{part!r}: {scheme}:// is not supported; expected HOST:PORT or grpc+tls://HOST:PORT")
            if scheme == "grpc+tls":
                more["tls"] = True
            addresses.append(_address(rest))
        if not addresses:
            raise InvalidRequest(f"{text!r} names no server; expected HOST:PORT")
        return cls(tuple(addresses), **more)


def _address(text: str) -> str:
    text = text.rstrip("/")
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):  # an IPv6 address without brackets
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidRequest(f"{text!r} is not HOST:PORT")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The offsets of a partition, `end` excluded, and its size on disk."""

    first: int
    end: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic at the time of the reply."""

    name: str
    partitions: tuple[PartitionState, ...]
    retention_ms: int
    cleanup: str


@dataclass(frozen=True, slots=True)
class Appended:
    """The number of records written and their positions: (partition, base offset, count)."""

    records: int
    placements: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class StageSize:
    """The size of a stage."""

    records: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of a publish. `already`: this or a later version was published before, and nothing changed."""

    writer: str
    version: int
    already: bool
    records: int


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """The schema that a topic requires."""

    name: str
    version: int
    kind: str
    """json, avro or protobuf."""
    definition: bytes
    others: tuple[bytes, ...] = ()
    """The definitions of other versions in the order to try them: older ones in descending order, then newer ones."""


class FlightClient:
    """A client that connects on first use."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._lock = threading.Lock()
        self._flight: flight.FlightClient | None = None
        self._token: tuple[bytes, bytes] | None = None
        self._turn = 0
        self._is_closed = False
        self._local: tuple[flight.FlightClient, bool] | None = None
        """The last connection that read, and whether the files of its broker can be read."""

    def __enter__(self) -> FlightClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            connected, self._flight, self._is_closed = self._flight, None, True
        if connected is not None:
            connected.close()

    # Topics

    def topics(self) -> list[str]:
        """Return the names of the topics that this user may see."""
        return list(self._ask("topics", request.Topics()))

    def describe(self, topics: Sequence[str]) -> dict[str, TopicState]:
        """Return the states of topics. Raises `UnknownTopic`."""
        return _states(self._ask("describe", request.Describe(list(topics))))

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic. Raises `TopicExists`, `InvalidTopicName`."""
        self._ask("create_topic", request.CreateTopic(name, partitions), again=False)

    def ensure_topic(self, name: str) -> None:
        """Create a topic if it does not exist. Raises `UnknownTopic` if the broker does not create topics automatically."""
        self._ask("ensure_topic", request.EnsureTopic(name))

    def wait(self, ends: Mapping[str, Mapping[int, int]], wait_ms: int) -> dict[str, TopicState]:
        """Return the topics when an end offset exceeds the given one, a partition is missing in `ends`, or the time has elapsed."""
        asked = request.Wait({topic: dict(places) for topic, places in ends.items()}, wait_ms)
        return _states(self._ask("wait", asked, seconds=self._servers.timeout_seconds + wait_ms / 1000))

    def offset_for_time(self, topic: str, times: Mapping[int, int]) -> dict[int, int | None]:
        """Return for each partition the first offset at or after the time (Unix ms); None if there is none."""
        found: Mapping[str, int | None] = self._ask("offset_for_time", request.OffsetForTime(topic, dict(times)))
        return {int(partition): offset for partition, offset in found.items()}

    # Reading

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        stop: int,
        *,
        columns: Sequence[str] = ALL,
        rows_max: int = 65_536,
        reached: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows with start <= offset < stop, in order, with exactly these columns.

        `reached` is called before each batch with the offset after it, for callers with their own retry policy. Raises `OffsetOutOfRange`
        below the first and above the end offset, `UnknownTopic`, `UnknownPartition`.
        """
        for name in columns:
            if name not in READ_SCHEMA.names:
                raise InvalidRequest(f"unknown column {name!r}; expected {', '.join(READ_SCHEMA.names)}")
        return self._read(topic, partition, start, stop, tuple(columns), rows_max, reached)

    def _read(
        self,
        topic: str,
        partition: int,
        start: int,
        stop: int,
        columns: tuple[str, ...],
        rows_max: int,
        reached: Callable[[int], None] | None,
    ) -> Iterator[pa.RecordBatch]:
        stored = [name for name in dict.fromkeys(columns) if name in STORED] or ["offset"]
        complete = _ConstantColumns(topic, partition, columns)
        position, failures = start, 0
        while True:
            try:
                for batch, read_on in self._rows(request.Range(topic, partition, position, stop, stored, rows_max)):
                    position, failures = read_on, 0
                    if reached is not None:
                        reached(position)
                    yield complete(batch)
                return
            except _FAILURES as failure:
                if start < stop <= position:  # all rows have arrived
                    return
                failures = self._failed(failure, failures)

    def _rows(self, wanted: request.Range) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield each batch with the offset after it, from local files where that is possible."""
        if (wanted.start or 0) < (wanted.stop or 0) and self._can_read_files():
            return local.rows(wanted, self._locate, self._stream)
        return self._stream(wanted)

    def _can_read_files(self) -> bool:
        """Return whether this process can read the files of the broker. Asks it once per connection."""
        connected = self._connected()
        if self._local is None or self._local[0] is not connected:
            can_read = False
            if self._servers.local_files and (machine := local.machine()):
                try:
                    can_read = local.can_open(self._ask("local_file", request.LocalFile(machine)))
                except InvalidRequest:
                    pass  # an older broker
            self._local = connected, can_read
        return self._local[1]

    def _locate(self, wanted: request.Range, position: int) -> Located:
        assert wanted.stop is not None
        return msgspec.convert(self._ask("locate", request.Locate(wanted.topic, wanted.partition, position, wanted.stop)), Located)

    def _stream(self, wanted: request.Range) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield each batch with the offset after it."""
        reader = self._connected().do_get(flight.Ticket(encode(wanted)), self._options(None))
        try:
            while True:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    return
                yield chunk.data, request.decode_place(chunk.app_metadata)
        finally:
            reader.cancel()

    def split(self, topic: str, partition: int, start: int, stop: int, parts: int) -> list[tuple[int, int]]:
        """Divide a range into at most `parts` ranges, at batch boundaries where there are any."""
        return [(begin, end) for begin, end in self._ask("split", request.Split(topic, partition, start, stop, parts))]

    # Writing

    def append(self, topic: str, batches: Iterable[pa.RecordBatch], *, partition: int | None = None) -> Appended:
        """Append rows with the column `value` and optionally `key`, `headers`, `partition`, `timestamp`.

        When this returns, all rows are as durable as the topic guarantees. An error has the number of durable ones (`durable_records`).
        """
        answer = self._put(request.Append(topic, partition), batches)
        if answer is None:
            return Appended(0, [])
        return Appended(answer["records"], [(place[0], place[1], place[2]) for place in answer["placements"]])

    def _put(self, command: request.Put, batches: Iterable[pa.RecordBatch], otherwise: pa.RecordBatch | None = None) -> Any:
        """Send a put and return the reply; None if there is nothing to send."""
        coming = iter(batches)
        first = next(coming, otherwise)
        if first is None:
            return None
        descriptor = flight.FlightDescriptor.for_command(encode(command))
        try:
            if isinstance(command, request.Append):
                self._ensure_connected()
            else:
                self.drop([])  # finds the coordinator, which these puts need
            upload, answers = self._started_put(descriptor, first.schema)
            with upload:
                upload.write_batch(first)
                for batch in coming:
                    upload.write_batch(batch)
                upload.done_writing()
                answer = answers.read()
        except flight.FlightError as failure:
            error = _raised(failure)
            if isinstance(error, NotCoordinator):
                self._drop_connection()  # a caller that repeats the put meets the next broker
            raise error from None
        if answer is None:
            raise Unavailable("the broker closed the put without a reply")
        return request.decode(answer.to_pybytes(), dict, "answer")

    def _started_put(self, descriptor: flight.FlightDescriptor, schema: pa.Schema) -> Any:
        try:
            return self._connected().do_put(descriptor, schema, self._options(None))
        except pa.ArrowInvalid as failure:
            raise _raised(failure) from None

    # Schemas and dead letters

    def schema(self, topic: str, version: int = 0) -> TopicSchema | None:
        """Return the schema that the topic requires, or another version of it; None: no schema. Raises `UnknownTopic`, `UnknownSchema`."""
        found = self._ask("schema", request.Schema(topic, version))
        if found is None:
            return None
        definition, others = b64decode(found["definition"]), tuple(map(b64decode, found["others"]))
        return TopicSchema(found["name"], found["version"], found["kind"], definition, others)

    def stage(
        self,
        handle: str,
        batches: Iterable[pa.RecordBatch],
        *,
        topic: str | None,
        writer: str,
        epoch: str = "",
        order: int = 0,
    ) -> StageSize:
        """Like `append`, but the records become visible when the handle is published. `topic` None: the column `topic` has it.

        When this returns, the handle is sealed, also without any batch. If it raises, the staged records are dropped.
        """
        command = request.Stage(handle, writer, topic, epoch, order)
        try:
            answer = self._put(command, batches, otherwise=_nothing(topic))
        except BrokerError:
            raise  # the broker has dropped it, unless it belongs to another put
        except BaseException:
            self._drop_quietly(handle)
            raise
        return StageSize(answer["records"], answer["size_bytes"])

    def _drop_quietly(self, handle: str) -> None:
        """Drop a stage whose batches failed: the broker sees that as their normal end."""
        try:
            self.drop([handle])
        except BrokerError:
            pass  # the stage expires

    def publish(self, writer: str, version: int, handles: Sequence[str], *, epoch: str = "", remember_ms: int = 0) -> Publication:
        """Make all records staged under the handles visible atomically. A version that was published before has no effect, so this may be
        repeated; a writer with a single version may repeat it within `remember_ms`. Raises `UnknownStage`, `StaleEpoch`."""
        asked = request.Publish(writer, version, list(handles), epoch, remember_ms)
        answer = self._ask("publish", asked, seconds=_PUBLISH_SECONDS)
        return Publication(answer["writer"], answer["version"], answer["already"], answer["records"])

    def drop(self, handles: Sequence[str]) -> int:
        """Drop staged records. Return how many of the handles existed."""
        return int(self._ask("drop", request.Drop(list(handles))))

    def status(self) -> Overview:
        """Return the overview of the broker, as far as this user may see it."""
        return msgspec.convert(self._ask("status", request.Status()), Overview)

    def topic_counters(self) -> list[TopicCounters]:
        """Return size and traffic of every topic that this user may see."""
        return msgspec.convert(self._ask("topic_counters", request.TopicCounters()), list[TopicCounters])

    def last_version(self, writer: str) -> int | None:
        """Return the last version that the writer has published; None: none."""
        found: int | None = self._ask("last_version", request.LastVersion(writer))
        return found

    def dead_letters(self, topic: str, batch: pa.RecordBatch) -> int:
        """Move records to the dead letters of their topic: columns `partition`, `offset`, `error`, `reason`. Records that were moved before
        for the same reason are skipped. Return how many were moved."""
        answer = self._put(request.Letters(topic), [batch])
        return int(answer["moved"])

    # Groups

    def commit(self, group: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Commit the next offsets: topic → partition → offset. Durable when this returns."""
        self._ask("commit", request.Commit(group, {topic: dict(places) for topic, places in offsets.items()}))

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the committed offsets of the group by partition."""
        found: Mapping[str, int] = self._ask("committed", request.Committed(group, topic))
        return {int(partition): offset for partition, offset in found.items()}

    # Connection

    def _ask(self, name: str, body: request.Request, *, seconds: float | None = None, again: bool = True) -> Any:
        """Execute an action and return the reply. With `again`, retry after a connection failure."""
        action, failures = flight.Action(name, encode(body)), 0
        options = self._servers.timeout_seconds if seconds is None else seconds
        while True:
            try:
                (answer,) = self._connected().do_action(action, self._options(options))
                return request.decode(answer.body.to_pybytes(), object, "answer")
            except _FAILURES as failure:
                failures = self._failed(failure, failures if again else ATTEMPTS_MAX)

    def _ensure_connected(self) -> None:
        """Check the connection and the token before a put, which cannot be repeated. Costs a round trip, and finds another address or a
        new token if necessary."""
        failures = 0
        while True:
            try:
                self._connected().list_actions(self._options(self._servers.timeout_seconds))
                return
            except _FAILURES as failure:
                failures = self._failed(failure, failures)

    def _failed(self, failure: flight.FlightError | pa.ArrowInvalid, failures: int) -> int:
        """Raise the error, or prepare another attempt and return the number of failures."""
        if isinstance(failure, pa.ArrowInvalid):
            raise _raised(failure) from None
        error = broker_error(failure)
        failures += 1
        if isinstance(failure, flight.FlightUnauthenticatedError) and self._token is not None and failures < ATTEMPTS_MAX:
            self._drop_connection(next_address=False)  # the token has expired, or the broker was restarted
            return failures
        if error is not None and not isinstance(error, Unavailable):
            raise error from None
        if isinstance(error, NotCoordinator) and len(self._servers.addresses) == 1:
            raise error from None  # there is no other broker to ask
        if failures >= ATTEMPTS_MAX or not isinstance(failure, _CONNECTION_FAILURES):
            raise _raised(failure) from None
        self._drop_connection()
        time.sleep(_BACKOFF(failures))
        return failures

    def _connected(self) -> flight.FlightClient:
        with self._lock:
            if self._is_closed:
                raise Unavailable("the client is closed")
            if self._flight is None:
                connected = self._connect(self._servers.addresses[self._turn % len(self._servers.addresses)])
                if self._servers.user:
                    self._token = self._log_in(connected)
                self._flight = connected
            return self._flight

    def _connect(self, address: str) -> flight.FlightClient:
        servers, options = self._servers, dict[str, Any](generic_options=_OPTIONS)
        if not servers.tls:
            return flight.FlightClient(f"grpc+tcp://{address}", **options)
        if servers.ca_file:
            options["tls_root_certs"] = Path(servers.ca_file).read_bytes()
        if servers.certificate_file:
            options["cert_chain"], options["private_key"] = Path(servers.certificate_file).read_bytes(), Path(servers.key_file).read_bytes()
        if servers.server_name:
            options["override_hostname"] = servers.server_name
        return flight.FlightClient(f"grpc+tls://{address}", **options)

    def _log_in(self, connected: flight.FlightClient) -> tuple[bytes, bytes]:
        options = flight.FlightCallOptions(timeout=self._servers.timeout_seconds)
        try:
            token: tuple[bytes, bytes] = connected.authenticate_basic_token(self._servers.user, self._servers.password, options)
            # The broker verifies the password with the first call.
            list(connected.list_actions(flight.FlightCallOptions(timeout=self._servers.timeout_seconds, headers=[token])))
        except flight.FlightUnauthenticatedError as failure:
            raise _raised(failure) from None
        return token

    def _drop_connection(self, *, next_address: bool = True) -> None:
        """Make the next call reconnect, to the next address. The connection is not closed: other threads may use it."""
        with self._lock:
            self._flight = self._token = None
            self._turn += next_address

    def _options(self, seconds: float | None) -> flight.FlightCallOptions:
        if self._token is not None:
            return flight.FlightCallOptions(timeout=seconds, headers=[self._token])
        if self._servers.password and not self._servers.user:
            return flight.FlightCallOptions(timeout=seconds, headers=[(b"authorization", b"Bearer " + self._servers.password.encode())])
        return flight.FlightCallOptions(timeout=seconds)


class _ConstantColumns:
    """Adds the columns that are constant within a range."""

    def __init__(self, topic: str, partition: int, columns: tuple[str, ...]) -> None:
        self._constants = {
            "topic": pa.scalar(topic, pa.string()),
            "partition": pa.scalar(partition, pa.int32()),
            "timestampType": pa.scalar(TIMESTAMP_TYPE, pa.int32()),
        }
        self._columns = columns
        self._schema = pa.schema([READ_SCHEMA.field(name) for name in columns])
        self._made: dict[str, pa.Array] = {}

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.names == list(self._columns):
            return batch
        arrays = [self._constant(name, batch.num_rows) if name in self._constants else batch.column(name) for name in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _constant(self, name: str, rows: int) -> pa.Array:
        """Return a slice of an array created before, if it is long enough."""
        made = self._made.get(name)
        if made is None or len(made) < rows:
            made = self._made[name] = pa.repeat(self._constants[name], rows)
        return made.slice(0, rows)


def _nothing(topic: str | None) -> pa.RecordBatch:
    """Return an empty record batch, whose schema a put without batches needs."""
    names = ["value"] if topic is not None else ["value", "topic"]
    return pa.RecordBatch.from_arrays([pa.array([], pa.binary() if name == "value" else pa.string()) for name in names], names=names)


def _raised(failure: flight.FlightError | pa.ArrowInvalid) -> BrokerError:
    if isinstance(failure, pa.ArrowInvalid):
        return Unavailable(f"the call cannot be made: {_first_line(failure)}; check the limit of threads and memory of this process")
    error = broker_error(failure)
    if error is not None:
        return error
    if isinstance(failure, flight.FlightUnauthorizedError | flight.FlightInternalError | flight.FlightServerError):
        return BrokerError(_first_line(failure))
    if isinstance(failure, flight.FlightUnauthenticatedError):
        return LoginFailed()
    return Unavailable(_first_line(failure))


def _first_line(failure: flight.FlightError | pa.ArrowInvalid) -> str:
    """Return the first line of a gRPC error, without the debug context."""
    return str(failure).partition("gRPC client debug context")[0].strip().partition("\n")[0] or type(failure).__name__


def _states(found: Mapping[str, Any]) -> dict[str, TopicState]:
    return {
        name: TopicState(name, tuple(PartitionState(*places) for places in state["partitions"]), state["retention_ms"], state["cleanup"])
        for name, state in found.items()
    }
